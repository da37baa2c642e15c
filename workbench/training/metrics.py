"""Metrics of a run as JSON lines, one record each, written whole: readable while the run goes on and after it died.

A line is an object with "kind" and "step"; see `loop` for the kinds. A resumed run cuts the file back to the step it
goes on from, so that every step stands in it once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from workbench.base import ConfigError

__all__ = ["MetricsWriter", "read_metrics"]


class MetricsWriter:
    """Appends records to a file; records of steps from `first_step` on that an earlier run wrote are dropped first."""

    def __init__(self, path: Path | str, *, first_step: int = 0) -> None:
        self.path = Path(path)
        kept = [record for record in read_metrics(self.path) if record["step"] < first_step]
        # Written anew and renamed, never cut in place: a kill in between leaves the old file or the new one.
        fresh = self.path.with_name(self.path.name + ".new")
        with fresh.open("wb") as file:
            file.writelines(_line(record) for record in kept)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self.path)
        self._file = self.path.open("ab", buffering=0)

    def write(self, kind: str, step: int, **values: object) -> None:
        self._file.write(_line({"kind": kind, "step": step, **values}))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path | str, kind: str | None = None) -> list[dict[str, Any]]:
    """All whole records, of one kind where given; no file is no records.

    A last line without its end was torn by a kill, or is just being written, and is left out. Raises ConfigError for a
    broken line anywhere else.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    records = []
    for number, line in enumerate(lines[:-1], start=1):  # behind the last line end: nothing, or a torn line
        try:
            record = json.loads(line)
            good = isinstance(record, dict) and isinstance(record.get("step"), int)
        except ValueError:
            good = False
        if not good:
            raise ConfigError("not a metrics record", where=f"{path}, line {number}", found=line[:80])
        if kind in (None, record.get("kind")):
            records.append(record)
    return records


def _line(record: Mapping[str, object]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"
