"""The command line: each command is one public function, printed. `--json` on every command prints its record instead.

Exit codes: 0 good · 1 the answer is "no" (findings, a failed gate, a regression) · 2 the question could not be asked
(an error, told in a line; or a bug of ours, with its traceback) · 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TextIO

from workbench import __version__
from workbench.base import LayoutError, RequestError, WorkbenchError, plain, printable_lines

if TYPE_CHECKING:
    from workbench.deployment import Deployment
    from workbench.placement import Layout

__all__ = ["main"]

PRECISIONS = ("fp32", "bf16", "fp8", "int8", "int4", "mxfp4")


class Record(Protocol):
    """What a command prints."""

    def to_json(self) -> dict[str, Any]: ...
    def render(self) -> str: ...


class UsageError(Exception):
    """Arguments that name no command or do not fit it."""


class Parser(argparse.ArgumentParser):
    """Raises where the standard one ends the process, so that a usage error is reported like any other."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}\n{self.format_usage().rstrip()}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Only --help and --version raise SystemExit."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if not arguments:
        _print(parser.format_help().rstrip(), sys.stderr)
        return 2
    as_json = "--json" in arguments
    try:
        args = parser.parse_args(arguments)
        return int(args.run(args))
    except (UsageError, WorkbenchError, OSError) as error:
        _print_error(error, as_json)
        return 2
    except KeyboardInterrupt:
        _print("interrupted", sys.stderr)
        return 130
    except Exception as error:  # a bug; without this it would leave exit code 1, which means "no"
        _print(traceback.format_exc().rstrip(), sys.stderr)
        if as_json:
            _print_error(error, as_json)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="workbench",
        description="Day-0 adaptation workbench for sharded giant models.",
        epilog="`workbench COMMAND --help` tells more. Exit codes: 0 good, 1 the answer is no, 2 an error.",
    )
    parser.add_argument("--version", action="version", version=f"workbench {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")

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
    generate.add_argument("--max-tokens", type=_count, default=64, help="longest answer (default 64)")
    generate.add_argument("--temperature", type=_temperature, default=0.0, help="0 takes the likeliest token (default)")
    generate.add_argument("--seed", type=int, default=0, help="of the draws above temperature 0 (default 0)")

    day0 = _command(commands, "day0", _day0, "the whole acceptance: audit, load, parity, answers, latencies, report")
    _deployment_arguments(day0)
    day0.add_argument("--out", type=Path, default=Path("out/day0"), help="folder for report.html and report.json")
    day0.add_argument("--max-first-token-s", type=_seconds, help="limit of gate latency.first_token (default 10)")
    day0.add_argument("--max-per-token-s", type=_seconds, help="limit of gate latency.per_token (default 1)")

    train = _command(commands, "train", _train, "train a model from a recipe and export it in the published format")
    train.add_argument("recipe", type=Path, help="TOML file, for example data/train/k3-nano.toml")
    train.add_argument("--out", type=Path, required=True, help="folder for states, metrics and the exported model")
    train.add_argument("--resume", action="store_true", help="go on from the last saved state in --out")

    compare = _command(
        commands, "compare", _compare, "what changed from one report to another; exit code 1 where a gate got worse"
    )
    compare.add_argument("old", type=Path, help="report.json, or the folder that holds it")
    compare.add_argument("new", type=Path, help="the later one")
    return parser


def _command(commands: argparse._SubParsersAction, name: str, run: object, help_text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=help_text, description=help_text, allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print the record as one JSON document")
    parser.set_defaults(run=run)
    return parser


def _deployment_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, help="checkpoint folder")
    parser.add_argument("--ranks", type=_count, help="number of processes; a layout is chosen (default 1)")
    parser.add_argument("--layout", help="layout such as tp2, pp2xtp4, dp2xep2:all_to_all (instead of --ranks)")
    parser.add_argument("--precision", choices=PRECISIONS, default="mxfp4", help="how weights are held on the ranks")
    parser.add_argument(
        "--device", default=None, help="device type; default: the accelerator of this machine, else cpu"
    )
    parser.add_argument(
        "--max-tokens-per-sequence",
        type=_count,
        help="cache length of one sequence (default 4096, or the model's context where that is shorter)",
    )


def _number(text: str, kind: Callable[[str], float], what: str, is_good: Callable[[float], bool]) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not is_good(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def _count(text: str) -> int:
    return int(_number(text, int, "a number from 1", lambda value: value >= 1))


def _seconds(text: str) -> float:
    return float(_number(text, float, "a time in seconds above 0", lambda value: 0 < value < math.inf))


def _temperature(text: str) -> float:
    return float(_number(text, float, "a temperature from 0", lambda value: 0 <= value < math.inf))


def _inspect(args: argparse.Namespace) -> int:
    from workbench.checkpoint import inspect_checkpoint

    _show(args, inspect_checkpoint(args.path))
    return 0


def _audit(args: argparse.Namespace) -> int:
    from workbench.checkpoint import audit

    report = audit(args.path, deep=False if args.shallow else None)
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
    from workbench.serving import ImageProcessor, SamplingParams, open_service, read_tokenizer
    from workbench.spec import read_spec

    # What would refuse the question is asked before the weights are loaded, which may take an hour.
    spec = read_spec(args.path)
    read_tokenizer(args.path, spec)
    SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
    for path in args.image:
        if spec.image is None or spec.vision is None:
            raise RequestError("this model takes no pictures", where=args.path)
        ImageProcessor(spec.image).process(path)
    with _deploy(args) as deployment, open_service(deployment, args.path) as service:
        answer = service.infer(
            args.text,
            args.image or None,
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            seed=args.seed,
        )
    _show(args, answer)
    return 0


def _day0(args: argparse.Namespace) -> int:
    from workbench.day0 import run_day0

    limits = {"latency.first_token": args.max_first_token_s, "latency.per_token": args.max_per_token_s}
    report = run_day0(
        args.path,
        layout=_layout(args),
        precision=args.precision,
        device=args.device,
        max_tokens=args.max_tokens_per_sequence,
        limits={gate_id: limit for gate_id, limit in limits.items() if limit is not None},
        out=args.out,
        say=None if args.json else _print,
    )
    if args.json:
        _print_json(report.to_json())
    return 0 if report.passed else 1


def _train(args: argparse.Namespace) -> int:
    from workbench.training.launch import train

    _show(args, train(args.recipe, args.out, resume=args.resume))
    return 0


def _compare(args: argparse.Namespace) -> int:
    from workbench.report import compare_reports, read_report

    comparison = compare_reports(read_report(args.old), read_report(args.new))
    _show(args, comparison)
    return 0 if comparison.passed else 1


def _layout(args: argparse.Namespace) -> Layout:
    from workbench.placement import Layout, check_layout, choose_layout
    from workbench.spec import read_spec

    spec = read_spec(args.path)
    if args.layout is None:
        return choose_layout(spec, args.ranks or 1)
    layout = Layout.parse(args.layout)
    if args.ranks not in (None, layout.world_size):
        raise LayoutError(f"--layout {layout} needs {layout.world_size} ranks, --ranks says {args.ranks}")
    check_layout(spec, layout)
    return layout


@contextlib.contextmanager
def _deploy(args: argparse.Namespace) -> Iterator[Deployment]:
    from workbench.cluster import default_device
    from workbench.deployment import Deployment
    from workbench.spec import read_spec
    from workbench.view import terminal_progress

    layout = _layout(args)
    with (
        terminal_progress(layout.world_size) as progress,
        Deployment.start(
            args.path,
            layout,
            precision=args.precision,
            device=args.device or default_device(),
            max_tokens=args.max_tokens_per_sequence or min(4096, read_spec(args.path).max_context),
            on_progress=None if args.json else progress,
        ) as deployment,
    ):
        yield deployment


def _show(args: argparse.Namespace, record: Record) -> None:
    if args.json:
        _print_json(record.to_json())
    else:
        _print(record.render())


def _print_json(record: object) -> None:
    _print(json.dumps(plain(record), allow_nan=False))


def _print_error(error: Exception, as_json: bool) -> None:
    """One line on standard error, or one document on standard output."""
    name = type(error).__name__
    if not as_json:
        _print(f"{name}: {error}", sys.stderr)
        return
    facts = {key: getattr(error, key, None) for key in ("where", "found", "expected", "next_step")}
    _print_json({"error": {"type": name, "message": str(error), **{k: v for k, v in facts.items() if v is not None}}})


def _print(text: str, stream: TextIO | None = None) -> None:
    """Write lines, whatever they hold (names from files can hold anything) and whatever the stream can spell.

    A reader that has gone away (`workbench day0 … | head`) silences what follows and ends nothing.
    """
    stream = stream or sys.stdout
    encoding = stream.encoding or "utf-8"
    shown = printable_lines(text).encode(encoding, "backslashreplace").decode(encoding)
    try:
        print(shown, file=stream, flush=True)
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    sys.exit(main())
