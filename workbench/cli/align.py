"""align: where a deployment parts from a reference, layer by layer, and which mistake would explain it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.base import RequestError
from workbench.cli.arguments import PRECISION_NAMES, Commands, chosen_layout, command, count, precision
from workbench.cli.show import show

if TYPE_CHECKING:
    from workbench.align import ParityPrompt, TraceFolder
    from workbench.spec import ModelSpec

DTYPES = ("float32", "bfloat16")
LENGTHS = (24, 9)  # of the prompts that are drawn where none is given


def add(commands: Commands) -> None:
    align = command(commands, "align", _align, "hold a deployment against a reference, layer by layer")
    align.add_argument("path", type=Path, help="checkpoint folder")
    align.add_argument(
        "--reference",
        default="own",
        metavar="own|FOLDER",
        help="the float64 model of this package (default), or a trace folder captured elsewhere (docs/capture.md)",
    )
    align.add_argument("--ranks", type=count, help="number of processes; a layout is chosen (default 1)")
    align.add_argument("--layout", help="layout such as tp2, tp2xep2, pp2 (instead of --ranks)")
    align.add_argument(
        "--precision",
        type=precision,
        default="bf16",
        metavar=PRECISION_NAMES,
        help="how weights are held (default bf16)",
    )
    align.add_argument("--dtype", choices=DTYPES, help="of activations; default float32 for fp32, else bfloat16")
    align.add_argument("--device", default=None, help="device type; default: the accelerator here, else cpu")
    align.add_argument("--text", action="append", default=[], help="prompt; may be repeated (default: drawn tokens)")
    align.add_argument("--seed", type=int, default=0, help="of the drawn prompts (default 0)")
    align.add_argument("--save", type=Path, metavar="FOLDER", help="also write the served trace, for another machine")
    align.add_argument("--no-counter-tests", action="store_true", help="name the guilty operator, not the mistake")


def _align(args: argparse.Namespace) -> int:
    import torch

    from workbench.align import (
        align_model,
        counter_test,
        read_trace_folder,
        served_by,
        write_trace_folder,
    )
    from workbench.cluster import default_device
    from workbench.deployment import Deployment
    from workbench.spec import read_spec

    spec = read_spec(args.path)
    layout = chosen_layout(args)
    folder = None if args.reference == "own" else read_trace_folder(args.reference, spec)
    prompts = _prompts(args, spec, folder)
    dtype = args.dtype or ("float32" if args.precision == "fp32" else "bfloat16")
    longest = max(len(prompt.token_ids) for prompt in prompts)
    with Deployment.start(
        args.path,
        layout,
        precision=args.precision,
        dtype=dtype,
        device=args.device or default_device(),
        num_slots=1,
        max_tokens=longest,
    ) as deployment:
        served = served_by(deployment, precision=args.precision, dtype=getattr(torch, dtype))
        report = align_model(served, args.path, prompts, reference=None if folder is None else folder.as_reference())
        if args.save is not None:
            write_trace_folder(args.save, prompts, served.forward(prompts), dtype=served.dtype)
    if not args.no_counter_tests:
        report = report.with_counter_tests(counter_test(report, args.path, prompts, held=served.held))
    show(args, report)
    return 0 if report.passed else 1


def _prompts(args: argparse.Namespace, spec: ModelSpec, folder: TraceFolder | None) -> list[ParityPrompt]:
    """The prompts of the trace, the given texts, or drawn tokens that mean nothing: arithmetic does not mind."""
    import random

    from workbench.align import ParityPrompt

    if folder is not None:
        if args.text:
            raise RequestError("a trace brings its own prompts", where="--text")
        return list(folder.prompts)
    if args.text:
        from workbench.serving import read_tokenizer

        tokenizer = read_tokenizer(args.path, spec)
        return [
            ParityPrompt(label=f"text {n}", token_ids=tuple(tokenizer.encode(text))) for n, text in enumerate(args.text)
        ]
    rng = random.Random(args.seed)
    special = {spec.tokens.bos, spec.tokens.eos, spec.tokens.pad, spec.tokens.media}
    ordinary = [token for token in range(min(spec.vocab_size, 1 << 20)) if token not in special]
    return [
        ParityPrompt(label=f"{length} drawn tokens", token_ids=tuple(rng.choices(ordinary, k=length)))
        for length in LENGTHS
    ]
