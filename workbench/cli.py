"""The command line: each command is one public function, printed. `--json` on every command prints its record instead.

Exit codes: 0 good · 1 the answer is "no" (findings, a failed gate) · 2 the question could not be asked (an error).
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from workbench import __version__
from workbench.base import WorkbenchError

if TYPE_CHECKING:
    from workbench.deployment import Deployment
    from workbench.placement import Layout

__all__ = ["main"]

PRECISIONS = ("fp32", "bf16", "fp8", "int8", "int4", "mxfp4")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = _parser().parse_args(argv)
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `workbench inspect … | head` ends quietly
    try:
        return int(args.run(args))
    except WorkbenchError as error:
        if args.json:
            print(json.dumps({"error": {"type": type(error).__name__, "message": str(error)}}))
        else:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="workbench", description="Day-0 adaptation workbench for sharded giant models."
    )
    parser.add_argument("--version", action="version", version=f"workbench {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    inspect = _command(commands, "inspect", _inspect, "what the model is: layers, parameters, bytes, caches")
    inspect.add_argument(
        "path", type=Path, help="checkpoint folder, or a folder with only config.json, or the file itself"
    )

    audit = _command(commands, "audit", _audit, "whether the files are whole, consistent and map onto the model")
    audit.add_argument("path", type=Path, help="checkpoint folder")
    audit.add_argument("--shallow", action="store_true", help="headers and sizes only; do not read tensor contents")

    _command(commands, "devices", _devices, "what this machine has, measured by doing").add_argument(
        "--folder", type=Path, help="also measure the read rate of the file system this folder lies on"
    )

    load = _command(commands, "load", _load, "load the shards onto N ranks and print the ledger")
    _deployment_arguments(load)

    generate = _command(commands, "generate", _generate, "one question, with images, answered by N ranks")
    _deployment_arguments(generate)
    generate.add_argument("text", help="the question")
    generate.add_argument("--image", type=Path, action="append", default=[], help="picture to look at; may be repeated")
    generate.add_argument("--max-tokens", type=int, default=64)
    generate.add_argument("--temperature", type=float, default=0.0)
    generate.add_argument("--seed", type=int, default=0)

    day0 = _command(commands, "day0", _day0, "the whole acceptance: audit, load, parity, answers, latencies, report")
    _deployment_arguments(day0)
    day0.add_argument("--out", type=Path, default=Path("out/day0"), help="folder for report.html and report.json")
    return parser


def _command(commands: argparse._SubParsersAction, name: str, run: object, help_text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help_text, description=help_text)
    parser.add_argument("--json", action="store_true", help="print the record as JSON")
    parser.set_defaults(run=run)
    return parser


def _deployment_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, help="checkpoint folder")
    parser.add_argument("--ranks", type=int, help="number of processes; a layout is chosen (default 1)")
    parser.add_argument("--layout", help="layout such as tp2, pp2xtp4, dp2xep2:all_to_all (instead of --ranks)")
    parser.add_argument("--precision", choices=PRECISIONS, default="mxfp4", help="how weights are held on the ranks")
    parser.add_argument(
        "--device", default=None, help="device type; default: the accelerator of this machine, else cpu"
    )
    parser.add_argument("--max-tokens-per-sequence", type=int, default=4096, help="cache length of one sequence")


def _inspect(args: argparse.Namespace) -> int:
    from workbench.checkpoint import inspect_checkpoint

    report = inspect_checkpoint(args.path)
    _show(args, report)
    return 0


def _audit(args: argparse.Namespace) -> int:
    from workbench.checkpoint import audit

    report = audit(args.path, deep=False) if args.shallow else audit(args.path)
    _show(args, report)
    return 0 if report.ok else 1


def _devices(args: argparse.Namespace) -> int:
    from workbench.cluster import survey_machine

    _show(args, survey_machine(folder=args.folder))
    return 0


def _load(args: argparse.Namespace) -> int:
    from workbench.deployment import LoadSummary

    with _deploy(args) as deployment:
        summary = LoadSummary.of(deployment.reports)
        _show(args, summary)
    return 0 if not summary.rows_missing else 1


def _generate(args: argparse.Namespace) -> int:
    from workbench.serving import open_service

    with _deploy(args) as deployment, open_service(deployment, args.path) as service:
        answer = service.infer(
            args.text,
            list(args.image) or None,
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            seed=args.seed,
        )
    _show(args, answer)
    return 0


def _day0(args: argparse.Namespace) -> int:
    from workbench.day0 import run_day0

    report = run_day0(
        args.path,
        layout=_layout(args),
        precision=args.precision,
        device=args.device,
        max_tokens=args.max_tokens_per_sequence,
        out=args.out,
        say=None if args.json else lambda line: print(line, flush=True),
    )
    if args.json:
        print(json.dumps(report.to_json()))
    return 0 if report.passed else 1


def _layout(args: argparse.Namespace) -> Layout:
    from workbench.placement import Layout, choose_layout
    from workbench.spec import read_spec

    if args.layout is not None:
        layout = Layout.parse(args.layout)
        if args.ranks is not None and args.ranks != layout.world_size:
            raise WorkbenchError(f"--layout {layout} needs {layout.world_size} ranks, --ranks says {args.ranks}")
        return layout
    return choose_layout(read_spec(args.path), args.ranks or 1)


def _deploy(args: argparse.Namespace) -> Deployment:
    from workbench.cluster import default_device
    from workbench.deployment import Deployment
    from workbench.view import terminal_progress

    layout = _layout(args)
    return Deployment.start(
        args.path,
        layout,
        precision=args.precision,
        device=args.device or default_device(),
        max_tokens=args.max_tokens_per_sequence,
        on_progress=None if args.json else terminal_progress(layout.world_size),
    )


def _show(args: argparse.Namespace, record: object) -> None:
    """Print a record that has `to_json()` and `render()`."""
    if args.json:
        print(json.dumps(record.to_json()))  # type: ignore[attr-defined]
    else:
        print(record.render())  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main())
