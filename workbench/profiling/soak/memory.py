"""What processes hold, from the system's own books: resident memory over time, open files, threads."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from workbench.base import resident_bytes

__all__ = ["MemoryMeter", "MemorySeries", "MemoryTrend", "memory_trend", "open_files", "threads"]

MIN_SAMPLES = 20
ALLOWED_SHARE, ALLOWED_BYTES = 0.02, 8 << 20  # growth over the judged half that allocators make by themselves


def open_files(pid: int) -> int | None:
    return _entries(f"/proc/{pid}/fd")


def threads(pid: int) -> int | None:
    return _entries(f"/proc/{pid}/task")


def _entries(folder: str) -> int | None:
    try:
        return len(os.listdir(folder))
    except OSError:
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySeries:
    """Resident bytes of one process at times in seconds after the start."""

    name: str
    pid: int
    times_s: tuple[float, ...]
    num_bytes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryTrend:
    """A line through the second half of a series, when caches have filled: its slope, and what that adds up to."""

    name: str
    num_samples: int
    median_bytes: float
    bytes_per_s: float
    growth_bytes: float

    @property
    def allowed_bytes(self) -> float:
        return max(ALLOWED_BYTES, ALLOWED_SHARE * self.median_bytes)

    @property
    def is_flat(self) -> bool | None:
        """None where there are too few samples to say."""
        return None if self.num_samples < MIN_SAMPLES else self.growth_bytes <= self.allowed_bytes


def memory_trend(series: MemorySeries) -> MemoryTrend:
    half = len(series.times_s) // 2
    times, sizes = series.times_s[half:], [float(size) for size in series.num_bytes[half:]]
    slope = statistics.linear_regression(times, sizes).slope if len(set(times)) > 1 else 0.0
    return MemoryTrend(
        name=series.name,
        num_samples=len(times),
        median_bytes=statistics.median(sizes) if sizes else 0.0,
        bytes_per_s=slope,
        growth_bytes=slope * (times[-1] - times[0]) if len(times) > 1 else 0.0,
    )


class MemoryMeter:
    """Samples all processes that `processes` names (name -> pid) every `every_s`, in a thread, inside a `with` block.

    A rank that is started again is another process, and a series of its own.
    """

    def __init__(
        self, processes: Callable[[], Mapping[str, int]], *, every_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._processes, self._every_s, self._clock = processes, every_s, clock
        self._samples: dict[tuple[str, int], list[tuple[float, int]]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soak-memory", daemon=True)

    def __enter__(self) -> MemoryMeter:
        self._start_s = self._clock()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def series(self) -> list[MemorySeries]:
        return [
            MemorySeries(name=name, pid=pid, times_s=tuple(t for t, _ in kept), num_bytes=tuple(n for _, n in kept))
            for (name, pid), kept in self._samples.items()
        ]

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            now = self._clock() - self._start_s
            for name, pid in self._processes().items():
                if num_bytes := resident_bytes(pid):  # a process that has just died holds nothing
                    self._samples.setdefault((name, pid), []).append((now, num_bytes))
