"""Metrics of a run as JSON lines, one record each, written whole: readable while the run goes on and after it died.

A line is an object with "kind" and "step"; see `loop` for the kinds. A resumed run cuts the file back to the step it
goes on from, so that every step stands in it once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from workbench.base import ConfigError

__all__ = ["MetricsTail", "MetricsWriter", "OnRecord", "describe_record", "read_metrics"]


OnRecord = Callable[[Mapping[str, Any]], None]


class MetricsWriter:
    """Appends records to a file, and shows each to `on_record`.

    Records of steps from `first_step` on that an earlier run wrote are dropped first.
    """

    def __init__(self, path: Path | str, *, first_step: int = 0, on_record: OnRecord | None = None) -> None:
        self.path, self.on_record = Path(path), on_record
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
        record = {"kind": kind, "step": step, **values}
        self._file.write(_line(record))
        if self.on_record is not None:
            self.on_record(record)

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
        record = _parse(line)
        if record is None:
            raise ConfigError("not a metrics record", where=f"{path}, line {number}", found=line[:80])
        if kind in (None, record.get("kind")):
            records.append(record)
    return records


class MetricsTail:
    """Follows a metrics file that another process writes: `new` gives the whole records since the last call."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._offset = self._size()

    def new(self) -> list[dict[str, Any]]:
        size = self._size()
        if size <= self._offset:
            self._offset = size  # nothing new, or a resumed run cut the file back and goes on from there
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            lines = file.read().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        self._offset += sum(len(line) for line in whole)
        return [record for line in whole if (record := _parse(line)) is not None]

    def _size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0


def describe_record(record: Mapping[str, Any], num_steps: int) -> str:
    """One line for a terminal."""
    step = f"step {record['step'] + 1:>6,} of {num_steps:,}"
    if record["kind"] == "step":
        left = (num_steps - record["step"] - 1) * record["seconds"]
        load = max(record["load"].values(), default=1.0)
        return (
            f"{step}  loss {record['loss']:.4f}  {record['phase']}  grad {record['grad_norm']:.2f}  "
            f"load {load:.2f}  {record['tokens_per_s']:,.0f} tokens/s  {left / 60:.0f} min left"
        )
    if record["kind"] == "tower":
        marks = "  ".join(f"{name} {record[name]:.0%}" for name in ("shape", "letter", "picture"))
        return f"{step}  tower lesson, batch {record['lesson_step'] + 1:,}: loss {record['loss']:.3f}  right: {marks}"
    if record["kind"] == "exam":
        marks = "  ".join(f"{kind} {right}/{num}" for kind, (right, num) in record["scores"].items())
        return f"{step}  held out: {marks}"
    return f"{step}  layout {record['layout']}, {record['num_params']:,} parameters"


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _line(record: Mapping[str, object]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"
