"""Arguments that several commands share, and what they stand for: a layout, a running deployment."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from workbench.base import LayoutError

if TYPE_CHECKING:
    from workbench.deployment import Deployment
    from workbench.loading import ExpertMemory
    from workbench.placement import Layout

__all__ = [
    "PRECISIONS",
    "PRECISION_NAMES",
    "Commands",
    "Parser",
    "UsageError",
    "cache_arguments",
    "chosen_layout",
    "command",
    "count",
    "deploy",
    "deployment_arguments",
    "deployment_options",
    "limit",
    "number",
    "precision",
    "seconds",
    "size",
    "temperature",
]

PRECISIONS = ("fp32", "bf16", "fp8", "int8", "int4", "mxfp4")
PRECISION_NAMES = f"{'|'.join(PRECISIONS)}|MAP.json"
Commands = argparse._SubParsersAction  # what a command is added to


_FACTORS = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4}


class UsageError(Exception):
    """Arguments that name no command or do not fit it."""


class Parser(argparse.ArgumentParser):
    """Raises where the standard one ends the process, so that a usage error is reported like any other."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}\n{self.format_usage().rstrip()}")


def command(commands: Commands, name: str, run: object, help_text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=help_text, description=help_text, allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print the record as one JSON document")
    parser.set_defaults(run=run)
    return parser


def deployment_arguments(
    parser: argparse.ArgumentParser,
    *,
    path_type: Callable[[str], object] = Path,
    path_help: str = "checkpoint folder",
    spans_hosts: bool = False,
) -> None:
    """`spans_hosts`: whether torchrun may start the command on several hosts, whose ranks are then its ranks."""
    parser.set_defaults(spans_hosts=spans_hosts)
    parser.add_argument("path", type=path_type, help=path_help)
    parser.add_argument("--ranks", type=count, help="number of processes; a layout is chosen (default 1)")
    parser.add_argument("--layout", help="layout such as tp2, pp2xtp4, dp2xep2:all_to_all (instead of --ranks)")
    parser.add_argument(
        "--precision",
        type=precision,
        default="mxfp4",
        metavar=PRECISION_NAMES,
        help="how weights are held on the ranks (default mxfp4)",
    )
    parser.add_argument(
        "--device", default=None, help="device type; default: the accelerator of this machine, else cpu"
    )
    parser.add_argument(
        "--max-tokens-per-sequence",
        type=count,
        help="cache length of one sequence (default 4096, or the model's context where that is shorter)",
    )


def cache_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kv-cache-dtype",
        choices=("auto", "fp8", "int8"),
        default="auto",
        help="how rows of tokens are cached (default auto: as they are computed; else one byte a value)",
    )
    parser.add_argument(
        "--cache-tokens",
        type=count,
        metavar="N",
        help="let the slots of a replica share a cache of N tokens (default: each has room for its longest sequence)",
    )
    parser.add_argument(
        "--expert-memory",
        type=size,
        metavar="SIZE",
        help="hold only so much of the routed experts on each rank (2GiB, 500MB) and fetch the rest when they are used",
    )
    parser.add_argument(
        "--expert-host-memory",
        type=size,
        metavar="SIZE",
        help="with --expert-memory: keep so much more of them in host memory (default: a few, on their way)",
    )


def number(text: str, kind: Callable[[str], float], what: str, is_good: Callable[[float], bool]) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not is_good(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def count(text: str) -> int:
    return int(number(text, int, "a number from 1", lambda value: value >= 1))


def size(text: str) -> int:
    """Bytes of "2GiB", "500MB" or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]i?)?B?", text.strip())
    factor = _FACTORS[(match[2] or "").removesuffix("i")] if match else 0
    base = 1024 if match and match[2] and match[2].endswith("i") else 1000
    value = int(float(match[1]) * base**factor) if match else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size above 0 such as 2GiB, 500MB or a number of bytes")
    return value


def limit(text: str) -> int:
    return int(number(text, int, "a number from 0", lambda value: value >= 0))


def precision(text: str) -> str:
    """A name, or a precision map, which ranks read themselves: as an absolute path."""
    if text in PRECISIONS:
        return text
    if text.endswith(".json"):
        return str(Path(text).resolve())
    raise argparse.ArgumentTypeError(
        f"invalid choice: {text!r} (choose from {', '.join(PRECISIONS)}, or a precision map, *.json)"
    )


def seconds(text: str) -> float:
    return float(number(text, float, "a time in seconds above 0", lambda value: 0 < value < math.inf))


def temperature(text: str) -> float:
    return float(number(text, float, "a temperature from 0", lambda value: 0 <= value < math.inf))


def chosen_layout(args: argparse.Namespace) -> Layout:
    from workbench.placement import Layout, check_layout, choose_layout
    from workbench.spec import read_spec

    spec = read_spec(args.path)
    given = num_given_ranks()
    if given is not None and args.ranks not in (None, given):
        raise LayoutError(f"torchrun has started {given} ranks, --ranks says {args.ranks}", next_step="Leave it out")
    if args.layout is None:
        return choose_layout(spec, args.ranks or given or 1)
    layout = Layout.parse(args.layout)
    if given not in (None, layout.world_size):
        raise LayoutError(
            f"--layout {layout} needs {layout.world_size} ranks, torchrun has started {given}",
            next_step="Change --nnodes or --nproc-per-node",
        )
    if args.ranks not in (None, layout.world_size):
        raise LayoutError(f"--layout {layout} needs {layout.world_size} ranks, --ranks says {args.ranks}")
    check_layout(spec, layout)
    return layout


def num_given_ranks() -> int | None:
    """How many ranks torchrun has started for this command; None where it has not started it."""
    from workbench.deployment.started import current_hosts

    hosts = current_hosts()
    return None if hosts is None else hosts.world_size


def deployment_options(args: argparse.Namespace, *, num_slots: int) -> dict[str, Any]:
    """What `deployment_arguments` say of a deployment, besides path and layout."""
    from workbench.cluster import default_device
    from workbench.spec import read_spec

    max_tokens = args.max_tokens_per_sequence or min(4096, read_spec(args.path).max_context)
    prefix_pages, cache_tokens = max(0, getattr(args, "prefix_pages", 0)), getattr(args, "cache_tokens", None)
    if prefix_pages and cache_tokens is None:  # kept pages beside what the slots may need
        cache_tokens = num_slots * max_tokens + prefix_pages * args.page_tokens
    return {
        "precision": args.precision,
        "device": args.device or default_device(),
        "num_slots": num_slots,
        "max_tokens": max_tokens,
        "kv_dtype": getattr(args, "kv_cache_dtype", "auto"),
        "cache_tokens": cache_tokens,
        "num_snapshots": prefix_pages,
        "expert_memory": _expert_memory(args),
    }


def _expert_memory(args: argparse.Namespace) -> ExpertMemory | None:
    held, in_host = getattr(args, "expert_memory", None), getattr(args, "expert_host_memory", None)
    if held is None:
        if in_host is not None:
            raise UsageError("--expert-host-memory is more of --expert-memory, which says how much is held for use")
        return None
    from workbench.loading import ExpertMemory

    return ExpertMemory(held, in_host or 0)


@contextlib.contextmanager
def deploy(args: argparse.Namespace, *, num_slots: int = 8) -> Iterator[Deployment]:
    from workbench.deployment import Deployment
    from workbench.view import terminal_progress

    layout = chosen_layout(args)
    options = deployment_options(args, num_slots=num_slots)
    with (
        terminal_progress(layout.world_size) as progress,
        Deployment.start(args.path, layout, on_progress=None if args.json else progress, **options) as deployment,
    ):
        yield deployment
