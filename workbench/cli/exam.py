"""exam: how many held-out questions a trained model answers, with and without its pictures."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from workbench.cli.arguments import PRECISIONS, Commands, command, count
from workbench.cli.show import say, show

CHOICES = ("both", "blank", "shuffled", "none")


def add(commands: Commands) -> None:
    exam = command(
        commands,
        "exam",
        _exam,
        "held-out accuracy with intervals, controls without the picture, expert load",
    )
    exam.add_argument("path", type=Path, help="folder of a checkpoint that was trained here")
    exam.add_argument("--per-kind", type=count, default=100, help="questions of each kind about pictures (default 100)")
    exam.add_argument("--facts", type=count, help="questions about facts (default: every held-out phrasing)")
    exam.add_argument("--control", choices=CHOICES, default="both", help="ask again without the picture (default both)")
    exam.add_argument("--precision", choices=PRECISIONS, default="mxfp4", help="how weights are held (default mxfp4)")
    exam.add_argument(
        "--activations",
        choices=("float32", "bfloat16"),
        help="what is computed in (default: as the precision says; a processor without bf16 units is slow in it)",
    )
    exam.add_argument(
        "--against",
        type=Path,
        metavar="RUN",
        help="folder of the training run: compare with its weights before rounding",
    )
    exam.add_argument("--max-new-tokens", type=count, help="tokens of a reply, thoughts included (default 224)")
    exam.add_argument("--device", default=None, help="device; default: the accelerator of this machine, else cpu")
    exam.add_argument("--save", action="store_true", help="keep the record as exam.json beside the weights")


def _exam(args: argparse.Namespace) -> int:
    from workbench.cluster import default_device
    from workbench.exam.record import CONTROLS, EXAM_NAME
    from workbench.exam.run import run_exam
    from workbench.training.config import MAX_NEW_TOKENS

    report = run_exam(
        args.path,
        per_kind=args.per_kind,
        num_facts=args.facts,
        precision=args.precision,
        activations=args.activations,
        controls=[name for name in CONTROLS if args.control in (name, "both")],
        against=args.against,
        max_new_tokens=args.max_new_tokens or MAX_NEW_TOKENS,
        device=args.device or default_device(),
        say=lambda line: say(line, sys.stderr),
    )
    if args.save:
        report.save(args.path / EXAM_NAME)
    show(args, report)
    return 0 if report.ok else 1
