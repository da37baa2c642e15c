"""families: which model families are known, and what a folder of configs describes."""

from __future__ import annotations

import argparse
from pathlib import Path

from workbench.cli.arguments import Commands, command
from workbench.cli.show import show


def add(commands: Commands) -> None:
    families = command(commands, "families", _families, "which model families are known, or a table of many configs")
    families.add_argument(
        "path", type=Path, nargs="?", help="folder of config files (*.json), or one file; without it: the families"
    )


def _families(args: argparse.Namespace) -> int:
    from workbench.spec.overview import describe_configs, describe_families

    if args.path is None:
        show(args, describe_families())
        return 0
    report = describe_configs(args.path)
    show(args, report)
    return 1 if report.refused else 0
