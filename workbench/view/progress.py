"""Watching a load: bytes, rate and time left over all ranks, and a one-line bar for terminals.

Anything that reports (rank, bytes_read, bytes_total, seconds, tensor) can be watched. Reports may come from any thread
and as often as they like: they are only counted here, drawing has a clock of its own.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TextIO

from workbench.base import human, printable

__all__ = ["LoadSnapshot", "LoadWatch", "ProgressReport", "TerminalProgress", "terminal_progress"]

MAX_SAMPLES = 400  # per rank; beyond it every second one is dropped
BAR_WIDTH = 24
REDRAW_S = 0.1


class ProgressReport(Protocol):
    """What one rank says while it loads. `bytes_total` is what this rank will read; `seconds` since it began."""

    @property
    def rank(self) -> int: ...
    @property
    def bytes_read(self) -> int: ...
    @property
    def bytes_total(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def tensor(self) -> str: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSnapshot:
    rank: int
    bytes_read: int
    bytes_total: int
    seconds: float
    tensor: str

    @property
    def is_done(self) -> bool:
        return self.bytes_read >= self.bytes_total


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSnapshot:
    """All ranks at one moment. `seconds` is the longest any rank has been at it."""

    ranks: tuple[RankSnapshot, ...]
    num_expected: int | None

    @property
    def bytes_read(self) -> int:
        return sum(rank.bytes_read for rank in self.ranks)

    @property
    def bytes_total(self) -> int:
        return sum(rank.bytes_total for rank in self.ranks)

    @property
    def seconds(self) -> float:
        return max((rank.seconds for rank in self.ranks), default=0.0)

    @property
    def fraction(self) -> float:
        """0 to 1; 1 also where there is nothing to read."""
        if not self.ranks:
            return 0.0
        return min(1.0, self.bytes_read / self.bytes_total) if self.bytes_total else 1.0

    @property
    def bytes_per_s(self) -> float | None:
        return self.bytes_read / self.seconds if self.seconds > 0 and self.bytes_read else None

    @property
    def seconds_left(self) -> float | None:
        """At the rate so far; None before there is one."""
        rate = self.bytes_per_s
        return None if rate is None else max(0, self.bytes_total - self.bytes_read) / rate

    @property
    def is_done(self) -> bool:
        """Every rank that is expected (or, where their number is unknown, that has reported) has read everything."""
        return len(self.ranks) >= (self.num_expected or 1) and all(rank.is_done for rank in self.ranks)

    def line(self) -> str:
        """One line: bar, percentage, bytes, rate, time left or taken."""
        filled = round(self.fraction * BAR_WIDTH)
        bar = "█" * filled + "░" * (BAR_WIDTH - filled)
        parts = [f"{bar} {self.fraction:4.0%}", f"{human(self.bytes_read, 'B')} of {human(self.bytes_total, 'B')}"]
        if (rate := self.bytes_per_s) is not None:
            parts.append(human(rate, "B/s"))
        if self.is_done:
            parts.append(f"in {human(self.seconds, 's')}")
        elif (left := self.seconds_left) is not None:
            parts.append(f"{human(left, 's')} left")
        expected = "" if self.num_expected is None else f" of {self.num_expected}"
        ranks = "rank" if len(self.ranks) == 1 and not expected else "ranks"
        return " · ".join([*parts, f"{len(self.ranks)}{expected} {ranks}"])


class LoadWatch:
    """Counts reports from any thread. `samples()` are (seconds, bytes) per rank, thinned to a bounded number."""

    def __init__(self, num_ranks: int | None = None) -> None:
        self.num_ranks = num_ranks
        self.version = 0  # grows with every report, so that a drawer knows whether there is news
        self._lock = threading.Lock()
        self._latest: dict[int, RankSnapshot] = {}
        self._samples: dict[int, list[tuple[float, int]]] = {}

    def __call__(self, report: ProgressReport) -> None:
        latest = RankSnapshot(
            rank=report.rank,
            bytes_read=report.bytes_read,
            bytes_total=report.bytes_total,
            seconds=report.seconds,
            tensor=report.tensor,
        )
        with self._lock:
            samples = self._samples.setdefault(latest.rank, [(0.0, 0)])
            samples.append((latest.seconds, latest.bytes_read))
            if len(samples) > MAX_SAMPLES:
                samples[1:-1] = samples[1:-1:2]
            self._latest[latest.rank] = latest
            self.version += 1

    def snapshot(self) -> LoadSnapshot:
        with self._lock:
            ranks = tuple(self._latest[rank] for rank in sorted(self._latest))
        return LoadSnapshot(ranks=ranks, num_expected=self.num_ranks)

    def samples(self) -> dict[int, list[tuple[float, int]]]:
        with self._lock:
            return {rank: list(points) for rank, points in self._samples.items()}


class TerminalProgress:
    """A bar on one line of a terminal, redrawn in place; says nothing where the stream is no terminal.

    Pass it as a progress callback. The line ends by itself when all `num_ranks` have read everything (where their
    number is unknown: all that have reported); `close()` ends it earlier.
    """

    def __init__(
        self,
        *,
        num_ranks: int | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.watch = LoadWatch(num_ranks)
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._clock = clock
        self._lock = threading.Lock()
        self._drawn_at = float("-inf")
        self._width = 0  # of what stands on the line now; 0: nothing does
        self._ranks_ended = 0  # how many had reported when the line was ended

    def __call__(self, report: ProgressReport) -> None:
        self.watch(report)
        if not self._is_terminal:
            return
        with self._lock:
            snapshot, now = self.watch.snapshot(), self._clock()
            if snapshot.is_done:
                if len(snapshot.ranks) > self._ranks_ended:  # a rank may say more than once that it is done
                    self._ranks_ended = len(snapshot.ranks)
                    self._draw(snapshot.line())
                    self._end()
            elif now - self._drawn_at >= REDRAW_S:
                self._drawn_at = now
                self._draw(snapshot.line())

    def close(self) -> None:
        """End the line where one is open, so that what is printed next starts on its own."""
        with self._lock:
            if self._width:
                self._draw(self.watch.snapshot().line())
                self._end()

    def __enter__(self) -> TerminalProgress:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _draw(self, line: str) -> None:
        line = printable(line)
        self._stream.write("\r" + line + " " * (self._width - len(line)))
        self._stream.flush()
        self._width = len(line)

    def _end(self) -> None:
        self._stream.write("\n")
        self._stream.flush()
        self._width = 0


def terminal_progress(num_ranks: int | None = None) -> TerminalProgress:
    """A progress callback for the command line."""
    return TerminalProgress(num_ranks=num_ranks)
