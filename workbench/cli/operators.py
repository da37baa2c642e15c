"""`workbench operators`: what the model needs of a device, and what this one makes of it."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from workbench.base import ConfigError
from workbench.cli.arguments import PRECISIONS, Commands, chosen_layout, command, count
from workbench.cli.show import say, show

__all__ = ["add"]

DEFAULT_PROMPT = 512


def add(commands: Commands) -> None:
    parser = command(
        commands,
        "operators",
        _operators,
        "operators and collectives of one pass, from the model itself, each tried on this device; "
        "exit code 1 where one is missing, falls back, is approximated or fails",
    )
    parser.add_argument("path", type=Path, help="checkpoint folder, a folder with only config.json, or the file itself")
    parser.add_argument("--ranks", type=count, help="number of ranks; a layout is chosen (default 1)")
    parser.add_argument("--layout", help="layout such as tp2, pp2xtp4, dp2xep2:all_to_all (instead of --ranks)")
    parser.add_argument("--precision", choices=PRECISIONS, default="mxfp4", help="how weights are held on the ranks")
    parser.add_argument("--phase", choices=("prefill", "decode", "both"), default="both", help="passes to look at")
    parser.add_argument("--tokens", type=count, help=f"prompt tokens of a prefill (default {DEFAULT_PROMPT})")
    parser.add_argument("--sequences", type=count, default=1, help="sequences in a pass of one replica (default 1)")
    parser.add_argument("--context", type=_context, help="tokens cached before a decode step (default: --tokens)")
    parser.add_argument("--image", type=_grid, metavar="ROWSxCOLUMNS", help="also an image of so many patches")
    parser.add_argument("--no-probe", action="store_true", help="only the inventory; try nothing")
    parser.add_argument("--device", help="device to try operators on; default: this machine's accelerator, else cpu")


def _operators(args: argparse.Namespace) -> int:
    from workbench.cluster import default_device
    from workbench.operators import Workload, survey_operators
    from workbench.spec import read_spec

    spec = read_spec(args.path)
    tokens = args.tokens or min(DEFAULT_PROMPT, spec.max_context - 1)
    context = tokens if args.context is None else args.context
    workloads = []
    if args.phase in ("prefill", "both"):
        workloads.append(Workload(phase="prefill", num_sequences=args.sequences, new_tokens=tokens))
    if args.phase in ("decode", "both"):
        workloads.append(Workload(phase="decode", num_sequences=args.sequences, context=context))
    if args.image is not None and spec.vision is None:
        raise ConfigError("this model takes no pictures", where=args.path)
    device = None if args.no_probe else args.device or default_device()
    survey = survey_operators(
        spec,
        chosen_layout(args),
        workloads,
        precision=args.precision,
        image_grid=args.image,
        device=device,
        progress=None if args.json else _tell,
    )
    show(args, survey)
    return 0 if survey.ok else 1


def _tell(done: int, total: int) -> None:
    say(f"tried {done} of {total} operators", sys.stderr)


def _context(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0")
    return int(text)


def _grid(text: str) -> tuple[int, int, int]:
    match = re.fullmatch(r"([0-9]{1,5})x([0-9]{1,5})", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a patch grid such as 16x24")
    return 1, int(match[1]), int(match[2])
