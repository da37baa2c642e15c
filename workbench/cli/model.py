"""inspect, audit: what a checkpoint is, and whether its files are whole."""

from __future__ import annotations

import argparse
from pathlib import Path

from workbench.cli.arguments import Commands, command
from workbench.cli.show import show


def add(commands: Commands) -> None:
    inspect = command(commands, "inspect", _inspect, "what the model is: layers, parameters, bytes, caches")
    inspect.add_argument(
        "path", type=Path, help="checkpoint folder, or a folder with only config.json, or the file itself"
    )

    audit = command(commands, "audit", _audit, "whether the files are whole, consistent and map onto the model")
    audit.add_argument("path", type=Path, help="checkpoint folder")
    audit.add_argument("--shallow", action="store_true", help="headers and sizes only; do not read tensor contents")


def _inspect(args: argparse.Namespace) -> int:
    from workbench.base import UnsupportedModelError
    from workbench.checkpoint import inspect_checkpoint, inspect_unknown

    try:
        show(args, inspect_checkpoint(args.path))
    except UnsupportedModelError:  # no family, or one that knows a setting it cannot read: guesses, and the reason
        show(args, inspect_unknown(args.path))
        return 1
    return 0


def _audit(args: argparse.Namespace) -> int:
    from workbench.checkpoint import audit

    report = audit(args.path, deep=False if args.shallow else None)
    show(args, report)
    return 0 if report.ok else 1
