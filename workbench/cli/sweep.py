"""sweep: which modules bear which precision, and the mix that meets a budget as a precision map."""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.base import RequestError
from workbench.cli.arguments import Commands, UsageError, command, count, number
from workbench.cli.show import say, show

if TYPE_CHECKING:
    from workbench.align.sweep import Probe

FORMATS = ("fp8", "int8", "int4", "mxfp4")
GRANULARITIES = ("kind", "layer", "kind and layer")


def add(commands: Commands) -> None:
    sweep = command(commands, "sweep", _sweep, "sensitivity of modules to precision, and the mix that meets a budget")
    sweep.add_argument("path", type=Path, help="checkpoint folder; the model is held dense in float32 in this process")
    budget = sweep.add_mutually_exclusive_group(required=True)
    budget.add_argument("--ratio", type=_positive, help="weights at most this share of bf16")
    budget.add_argument("--memory", type=count, metavar="BYTES", help="weights at most so many bytes")
    budget.add_argument("--kl", type=_positive, help="mean KL to the unchanged model at most, in nats")
    budget.add_argument("--top1", type=_share, help="share of positions with the same first choice at least")
    sweep.add_argument("--formats", default=",".join(FORMATS), help=f"of {', '.join(FORMATS)} (default all)")
    sweep.add_argument("--by", choices=GRANULARITIES, default="kind", help="what is one group (default kind)")
    data = sweep.add_mutually_exclusive_group()
    data.add_argument(
        "--held-out",
        type=count,
        metavar="N",
        help="measure on the exam: N held-out questions of each kind, and facts, where the model answers them",
    )
    data.add_argument("--text", type=Path, action="append", default=[], help="text file to measure on; may be repeated")
    sweep.add_argument("--tokens", type=count, default=256, help="most tokens of each text, or drawn (default 256)")
    sweep.add_argument("--seed", type=int, default=0, help="of drawn tokens, where no text is given (default 0)")
    sweep.add_argument("--device", default=None, help="device type; default: the accelerator here, else cpu")
    sweep.add_argument("--map", type=Path, metavar="OUT.json", help="write the chosen precision map")


def _positive(text: str) -> float:
    return float(number(text, float, "a number above 0", lambda value: value > 0))


def _share(text: str) -> float:
    return float(number(text, float, "a share from 0 to 1", lambda value: 0 <= value <= 1))


def _sweep(args: argparse.Namespace) -> int:
    from workbench.align import Budget, sweep_checkpoint

    formats = tuple(dict.fromkeys(name for name in args.formats.split(",") if name))
    if not formats or any(name not in FORMATS for name in formats):
        raise UsageError(f"--formats {args.formats}: expected some of {', '.join(FORMATS)}, separated by commas")
    report = sweep_checkpoint(
        args.path,
        _probe(args),
        Budget(num_bytes=args.memory, ratio=args.ratio, kl=args.kl, top1=args.top1),
        formats=formats,
        granularity=args.by,
        device=args.device,
        progress=None if args.json else _tell,
    )
    if args.map is not None and report.precision_map is not None:
        report.precision_map.save(args.map)
    show(args, report)
    return 0 if report.ok else 1


def _tell(done: int, total: int, what: str) -> None:
    say(f"{done} of {total}: {what}", sys.stderr)


def _probe(args: argparse.Namespace) -> Probe:
    from workbench.spec import read_spec

    if args.held_out is not None:
        from workbench.exam.held_out import held_out_passes

        return held_out_passes(args.path, args.held_out)
    spec = read_spec(args.path)
    if not args.text:
        rng = random.Random(args.seed)
        return [[rng.randrange(min(spec.vocab_size, 1 << 20)) for _ in range(args.tokens)]]
    from workbench.serving import read_tokenizer

    tokenizer = read_tokenizer(args.path, spec)
    sequences = [tokenizer.encode(path.read_text())[: args.tokens] for path in args.text]
    if not all(sequences):
        raise RequestError("a text without a token", where=", ".join(map(str, args.text)))
    return sequences
