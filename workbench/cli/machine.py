"""devices: what this machine has."""

from __future__ import annotations

import argparse
from pathlib import Path

from workbench.cli.arguments import Commands, command
from workbench.cli.show import show


def add(commands: Commands) -> None:
    command(commands, "devices", _devices, "what this machine has, measured by doing").add_argument(
        "--folder", type=Path, help="also measure the read rate of the file system this folder lies on"
    )


def _devices(args: argparse.Namespace) -> int:
    from workbench.cluster import survey_machine

    show(args, survey_machine(folder=args.folder))
    return 0
