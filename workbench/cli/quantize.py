"""quantize: a checkpoint rewritten in another storage precision."""

from __future__ import annotations

import argparse
from pathlib import Path

from workbench.cli.arguments import Commands, command
from workbench.cli.show import show


def add(commands: Commands) -> None:
    quantize = command(commands, "quantize", _quantize, "write the checkpoint in another precision, audited")
    quantize.add_argument("path", type=Path, help="checkpoint folder")
    quantize.add_argument("out", type=Path, help="new folder")
    quantize.add_argument(
        "--precision",
        required=True,
        metavar="fp8|int8|int4|mxfp4|bf16|MAP.json",
        help="of projections and experts (mxfp4: experts alone), or a precision map as `workbench sweep` writes",
    )


def _quantize(args: argparse.Namespace) -> int:
    from workbench.quantize import quantize_checkpoint

    show(args, quantize_checkpoint(args.path, args.out, args.precision))
    return 0
