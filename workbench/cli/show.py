"""What a command prints: a record as text or as one JSON document, and errors in the form that was asked for."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from typing import Any, Protocol, TextIO

from workbench.base import plain, printable_lines

__all__ = ["Record", "print_error", "print_json", "say", "show"]


class Record(Protocol):
    """What a command prints."""

    def to_json(self) -> dict[str, Any]: ...
    def render(self) -> str: ...


def show(args: argparse.Namespace, record: Record) -> None:
    if args.json:
        print_json(record.to_json())
    else:
        say(record.render())


def print_json(record: object) -> None:
    say(json.dumps(plain(record), allow_nan=False))


def print_error(error: Exception, as_json: bool) -> None:
    """One line on standard error, or one document on standard output."""
    name = type(error).__name__
    if not as_json:
        say(f"{name}: {error}", sys.stderr)
        return
    facts = {key: getattr(error, key, None) for key in ("where", "found", "expected", "next_step")}
    print_json({"error": {"type": name, "message": str(error), **{k: v for k, v in facts.items() if v is not None}}})


def say(text: str, stream: TextIO | None = None) -> None:
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
