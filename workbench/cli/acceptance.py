"""day0, compare: the acceptance run, and what changed from one report to another."""

from __future__ import annotations

import argparse
from pathlib import Path

from workbench.cli.arguments import Commands, chosen_layout, command, deployment_arguments, seconds
from workbench.cli.show import print_json, say, show


def add(commands: Commands) -> None:
    day0 = command(commands, "day0", _day0, "the whole acceptance: audit, load, parity, answers, latencies, report")
    deployment_arguments(day0)
    day0.add_argument("--out", type=Path, default=Path("out/day0"), help="folder for report.html and report.json")
    day0.add_argument("--max-first-token-s", type=seconds, help="limit of gate latency.first_token (default 10)")
    day0.add_argument("--max-per-token-s", type=seconds, help="limit of gate latency.per_token (default 1)")

    compare = command(
        commands, "compare", _compare, "what changed from one report to another; exit code 1 where a gate got worse"
    )
    compare.add_argument("old", type=Path, help="report.json, or the folder that holds it")
    compare.add_argument("new", type=Path, help="the later one")


def _day0(args: argparse.Namespace) -> int:
    from workbench.day0 import run_day0

    limits = {"latency.first_token": args.max_first_token_s, "latency.per_token": args.max_per_token_s}
    report = run_day0(
        args.path,
        layout=chosen_layout(args),
        precision=args.precision,
        device=args.device,
        max_tokens=args.max_tokens_per_sequence,
        limits={gate_id: limit for gate_id, limit in limits.items() if limit is not None},
        out=args.out,
        say=None if args.json else say,
    )
    if args.json:
        print_json(report.to_json())
    return 0 if report.passed else 1


def _compare(args: argparse.Namespace) -> int:
    from workbench.report import compare_reports, read_report

    comparison = compare_reports(read_report(args.old), read_report(args.new))
    show(args, comparison)
    return 0 if comparison.passed else 1
