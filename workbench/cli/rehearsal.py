"""rehearse: a deployment tried out before the weights arrive."""

from __future__ import annotations

import argparse
from pathlib import Path

from workbench.cli.arguments import PRECISIONS, Commands, command, count, number
from workbench.cli.show import say, show


def add(commands: Commands) -> None:
    rehearse = command(
        commands, "rehearse", _rehearse, "ghost, audit, read plan, and one rank's share of the load, in bounded memory"
    )
    rehearse.add_argument("path", type=Path, help="checkpoint folder, or a folder or file with only the config")
    rehearse.add_argument("--layout", required=True, help="layout such as tp8xdp8xep64")
    rehearse.add_argument("--rank", type=_rank, default=0, help="whose share is loaded (default 0)")
    rehearse.add_argument("--index", type=Path, help="published index: names and files of the ghost")
    rehearse.add_argument("--out", type=Path, help="where the ghost is written and stays; default: a passing folder")
    rehearse.add_argument("--precision", choices=PRECISIONS, default="mxfp4", help="how weights are held on the ranks")
    rehearse.add_argument("--keep", action="store_true", help="hold the whole share at once, where this host can")
    rehearse.add_argument(
        "--ranks-per-host", type=count, default=8, help="for the estimate of the cluster's start (default 8)"
    )
    rehearse.add_argument("--plan-only", action="store_true", help="read nothing; plan every rank instead")


def _rank(text: str) -> int:
    return int(number(text, int, "a rank, counted from 0", lambda value: value >= 0))


def _rehearse(args: argparse.Namespace) -> int:
    from workbench.placement import Layout
    from workbench.rehearsal import rehearse
    from workbench.view import terminal_progress

    layout = Layout.parse(args.layout)
    with terminal_progress(1) as progress:
        report = rehearse(
            args.path,
            layout,
            rank=args.rank,
            precision=args.precision,
            index=args.index,
            out=args.out,
            keep=args.keep,
            plan_only=args.plan_only,
            ranks_per_host=args.ranks_per_host,
            progress=None if args.json else progress,
            say=None if args.json else say,
        )
    show(args, report)
    return 0 if report.ok else 1
