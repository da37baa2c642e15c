"""Where the time of a load goes: seconds and bytes by stage and by piece, and how busy each stage was over time.

What is kept does not grow with the load: one line for each piece of the model, and a fixed number of time bins whose
width doubles when the load outlasts them. Times are the host's: on a device that queues its work, what one stage starts
is waited for in a later one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Literal, get_args

__all__ = ["STAGES", "Stage", "StageTimes"]

Stage = Literal["read", "wait", "transfer", "transform", "bind", "check"]
STAGES: tuple[Stage, ...] = get_args(Stage)
MAX_BINS = 128
FIRST_BIN_S = 1 / MAX_BINS


class StageTimes:
    """Times of one rank's load, from when it is made (or from `start`) to `finish`. Several threads add to it.

        read       the reading threads, their mean: from a file into a staging slot; rows that need no transform go
                   straight to their place in host memory, and are summed for the check while they are in the cache
        wait       the writing thread, until a slot is filled: reading that nothing hides
        transfer   from the slot to the device, a batch at a time; on the CPU there is nothing to move
        transform  expand, decode, encode
        bind       rows into the parameter, cast where dtypes differ, and into the ledger
        check      norms and zeros of what was written

    All but `read` are of one thread, so with what is left over they add up to the load. Bytes are those that a stage
    took in, for `bind` and `check` those that the parameter holds.
    """

    def __init__(self, *, rank: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        self.rank, self.now = rank, clock
        self.bin_s = FIRST_BIN_S
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self._bytes: dict[str, int] = dict.fromkeys(STAGES, 0)
        self._busy: dict[str, list[float]] = {stage: [0.0] * MAX_BINS for stage in STAGES}
        self._pieces: dict[str, tuple[dict[str, float], dict[str, int]]] = {}
        self._began = clock()
        self._ended: float | None = None

    def start(self) -> None:
        """Begin now; what was planned before the load is not part of it."""
        self._began = self.now()

    def add(self, stage: Stage, began: float, num_bytes: Mapping[str, int], num_threads: int = 1) -> float:
        """Count the time from `began` (as `now` gave it) until now; returns now, when the next stage may begin.

        `num_bytes` by piece: where several went through the stage together, its time is shared out by their bytes.
        `num_threads` that are at work in this stage at one time count for their part of it each.
        """
        ended = self.now()
        seconds, total = (ended - began) / num_threads, sum(num_bytes.values())
        with self._lock:
            self._seconds[stage] += seconds
            self._bytes[stage] += total
            self._mark(stage, began - self._began, ended - self._began, num_threads)
            for piece, count in num_bytes.items():
                own_seconds, own_bytes = self._pieces.setdefault(piece, ({}, {}))
                share = count / total if total else 1 / len(num_bytes)
                own_seconds[stage] = own_seconds.get(stage, 0.0) + seconds * share
                own_bytes[stage] = own_bytes.get(stage, 0) + count
        return ended

    def finish(self) -> None:
        self._ended = self.now()

    @property
    def seconds(self) -> float:
        """Of the whole load, or so far."""
        return (self.now() if self._ended is None else self._ended) - self._began

    def by_stage(self) -> dict[str, float]:
        """Seconds so far."""
        with self._lock:
            return dict(self._seconds)

    def to_json(self) -> dict[str, object]:
        """`busy`: share of each bin of `bin_s` seconds that a stage was at work. `pieces` in order of their reading."""
        seconds = self.seconds
        with self._lock:
            num_bins = min(MAX_BINS, int(seconds / self.bin_s) + 1)
            return {
                "rank": self.rank,
                "seconds": seconds,
                "seconds_by_stage": dict(self._seconds),
                "bytes_by_stage": dict(self._bytes),
                "pieces": [
                    {"name": name, "seconds_by_stage": dict(own), "bytes_by_stage": dict(num)}
                    for name, (own, num) in self._pieces.items()
                ],
                "bin_s": self.bin_s,
                "busy": {
                    stage: [round(busy / self.bin_s, 4) for busy in bins[:num_bins]]
                    for stage, bins in self._busy.items()
                },
            }

    def _mark(self, stage: Stage, first: float, last: float, num_threads: int) -> None:
        """Add one thread's interval, in seconds since the beginning, to the bins that it touches."""
        while last >= self.bin_s * MAX_BINS:
            self._double()
        bins, at = self._busy[stage], max(0.0, first)
        place = int(at / self.bin_s)
        while at < last:
            edge = min(last, (place + 1) * self.bin_s)
            bins[place] += max(0.0, edge - at) / num_threads
            at, place = edge, place + 1
            if place == MAX_BINS:
                break

    def _double(self) -> None:
        self.bin_s *= 2
        for stage, bins in self._busy.items():
            joined = [a + b for a, b in zip(bins[0::2], bins[1::2], strict=True)]
            self._busy[stage] = joined + [0.0] * (MAX_BINS - len(joined))
