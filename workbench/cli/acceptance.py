"""day0, compare: the acceptance run, and what changed from one report to another."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from workbench.cli.arguments import Commands, chosen_layout, command, deployment_arguments, seconds
from workbench.cli.show import print_json, say, show

LOG_COLUMNS = 120  # width of the table where the output is no terminal


def add(commands: Commands) -> None:
    day0 = command(commands, "day0", _day0, "the whole acceptance: audit, load, parity, answers, latencies, report")
    deployment_arguments(day0, spans_hosts=True)
    day0.add_argument("--out", type=Path, default=Path("out/day0"), help="folder for report.html and report.json")
    day0.add_argument("--max-first-token-s", type=seconds, help="limit of gate latency.first_token (default 10)")
    day0.add_argument("--max-per-token-s", type=seconds, help="limit of gate latency.per_token (default 1)")

    day0.add_argument(
        "--prove-gates",
        action="store_true",
        help="afterwards make each gate fail by a fault of its own, in copies and in ranks that end with the command; "
        "exit code 1 where one cannot be made to",
    )
    day0.add_argument(
        "--prove-report",
        action="store_true",
        help="afterwards accept sabotaged copies of the checkpoint, one fault each; exit code 1 where the verdict of "
        "one does not name its fault",
    )
    day0.add_argument(
        "--published",
        type=Path,
        metavar="DIR",
        help="another copy that is known to be right: parity is held against it, and what differs is named",
    )
    day0.add_argument(
        "--stop-at-fault", action="store_true", help="leave out what comes after the first step in which a gate failed"
    )

    compare = command(
        commands,
        "compare",
        _compare,
        "what changed from one report to another; exit code 1 where a gate got worse or has no proof any more",
    )
    compare.add_argument("old", type=Path, help="report.json, or the folder that holds it")
    compare.add_argument("new", type=Path, help="the later one")


def _day0(args: argparse.Namespace) -> int:
    from workbench.day0 import prove_gates, prove_report, run_day0

    limits = {"latency.first_token": args.max_first_token_s, "latency.per_token": args.max_per_token_s}
    options: dict[str, Any] = {
        "layout": chosen_layout(args),
        "precision": args.precision,
        "device": args.device,
        "max_tokens": args.max_tokens_per_sequence,
        "limits": {gate_id: limit for gate_id, limit in limits.items() if limit is not None},
        "out": args.out,
        "say": None if args.json else say,
    }
    report = run_day0(args.path, published=args.published, stop_at_fault=args.stop_at_fault, **options)
    proofs = prove_gates(args.path, report, **options) if args.prove_gates else None
    report = report if proofs is None else proofs.report
    copies = prove_report(args.path, **options) if args.prove_report else None
    if copies is not None:
        report = copies.entered(report)
        report.write(args.out)
    if args.json:
        record = report.to_json() if proofs is None else {**proofs.to_json(), "report": report.to_json()}
        print_json(record if copies is None else {**record, "sabotaged_copies": copies.to_json()})
    else:
        if proofs is not None:
            say(f"\n{proofs.render(width=shutil.get_terminal_size((LOG_COLUMNS, 24)).columns)}")
        if copies is not None:
            say(f"\n{copies.render()}")
        if proofs is not None or copies is not None:
            say(f"\nproofs are in the report: {args.out / 'report.html'} and {args.out / 'report.json'}")
    return 0 if report.passed and all(x is None or x.passed for x in (proofs, copies)) else 1


def _compare(args: argparse.Namespace) -> int:
    from workbench.report import compare_reports, read_report

    comparison = compare_reports(read_report(args.old), read_report(args.new))
    show(args, comparison)
    return 0 if comparison.passed else 1
