"""The command line: each command is one public function, printed. `--json` on every command prints its record instead.

Exit codes: 0 good · 1 the answer is "no" (findings, a failed gate, a regression) · 2 the question could not be asked
(an error, told in a line; or a bug of ours, with its traceback) · 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence

from workbench import __version__
from workbench.base import WorkbenchError
from workbench.cli import (
    acceptance,
    align,
    deployed,
    exam,
    families,
    invariance,
    machine,
    model,
    operators,
    plan,
    profile,
    quantize,
    rehearsal,
    serve,
    soak,
    sweep,
    topology,
    train,
)
from workbench.cli.arguments import Parser, UsageError
from workbench.cli.hosts import is_torchrun, run_on_hosts
from workbench.cli.show import print_error, say

__all__ = ["main"]

COMMANDS = (
    model,
    families,
    operators,
    machine,
    topology,
    plan,
    deployed,
    serve,
    invariance,
    soak,
    align,
    quantize,
    sweep,
    acceptance,
    profile,
    train,
    exam,
    rehearsal,
)  # in the order of the help


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Only --help and --version raise SystemExit."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if not arguments:
        say(parser.format_help().rstrip(), sys.stderr)
        return 2
    as_json = "--json" in arguments
    try:
        args = parser.parse_args(arguments)
        return run_on_hosts(args) if is_torchrun() else int(args.run(args))
    except (UsageError, WorkbenchError, OSError) as error:
        print_error(error, as_json)
        return 2
    except KeyboardInterrupt:
        say("interrupted", sys.stderr)
        return 130
    except Exception as error:  # a bug; without this it would leave exit code 1, which means "no"
        say(traceback.format_exc().rstrip(), sys.stderr)
        if as_json:
            print_error(error, as_json)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="workbench",
        description="Day-0 adaptation workbench for sharded giant models.",
        epilog="`workbench COMMAND --help` tells more. Exit codes: 0 good, 1 the answer is no, 2 an error.",
    )
    parser.add_argument("--version", action="version", version=f"workbench {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for module in COMMANDS:
        module.add(commands)
    return parser
