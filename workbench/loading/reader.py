"""Positioned reads of shard files into a buffer that the caller owns; never a mapping.

A page of a mapped file that cannot be served (truncated file, lost network share) is a SIGBUS that kills the process;
a read that comes up short is an error with a file, an offset and a rank.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.base import CheckpointError, LoadError
from workbench.checkpoint.header import open_regular
from workbench.loading.plan import Extent
from workbench.loading.schedule import Batch

__all__ = ["ReadPolicy", "ShardReader"]

Preadv = Callable[[int, Sequence[memoryview], int], int]
OPEN_FILES = 16
SAMPLES = 32  # short reads that are looked at together
CONTROL_EVERY = 4  # of them one is accompanied by a call that reads nothing
SLOWER_THAN_CONTROL = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadPolicy:
    """When to read columns by reading through the gaps between them.

    A column slice is many short segments. Exact reads cost one call each, which is cheap on local storage; where the
    median of the last segments took longer than `slow_read_s`, and several times as long as a call that reads nothing,
    gaps up to `largest_gap` bytes are read and dropped instead, and counted in `bytes_through`. `slow_read_s=None`
    keeps all reads exact.
    """

    slow_read_s: float | None = 300e-6
    largest_gap: int = 1 << 20


class ShardReader:
    """Reads extents of the files in `root` for one rank. Not thread-safe; one thread reads.

    `scratch_bytes` bounds what is held to read through gaps.
    """

    def __init__(
        self,
        root: Path,
        *,
        rank: int = 0,
        scratch_bytes: int = 1 << 20,
        policy: ReadPolicy | None = None,
        preadv: Preadv | None = None,
    ) -> None:
        self.root, self.rank, self.policy = root, rank, policy or ReadPolicy()
        self.bytes_read = 0
        self.bytes_through = 0  # of `bytes_read`: gaps that were read and dropped
        self.num_reads = 0
        self.seconds = 0.0
        self._preadv = preadv or os.preadv
        self._scratch_bytes = scratch_bytes
        self._scratch = bytearray()
        self._files: OrderedDict[str, int] = OrderedDict()
        self._durations: deque[float] = deque(maxlen=SAMPLES)
        self._controls: deque[float] = deque(maxlen=SAMPLES // CONTROL_EVERY)

    def fill(self, batch: Batch, slot: memoryview) -> None:
        """Read all extents of a batch to their places in the slot. Raises LoadError naming file, offset and rank."""
        started = time.perf_counter()
        for read in batch.reads:
            extent = read.extent
            target = slot[read.at : read.at + extent.num_bytes]
            if extent.count == 1:
                self._read(extent.file, extent.offset, target)
            else:
                self._read_segments(extent, target)
        self.seconds += time.perf_counter() - started

    @property
    def is_slow(self) -> bool:
        """Whether short reads have been seen to take long each, and not only because this process has to wait."""
        limit = self.policy.slow_read_s
        if limit is None or len(self._durations) < SAMPLES:
            return False
        # A busy machine, or a busy interpreter, makes every call slow; that says nothing about the storage.
        control = statistics.median(self._controls)
        return statistics.median(self._durations) > max(limit, SLOWER_THAN_CONTROL * control)

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def _read_segments(self, extent: Extent, target: memoryview) -> None:
        gap = extent.stride - extent.length
        may_read_through = gap <= self.policy.largest_gap and extent.stride <= self._scratch_bytes
        for i in range(extent.count):
            if i % SAMPLES == 0 and may_read_through and self.is_slow:
                self._read_through(extent, i, target)
                return
            started = time.perf_counter()
            place = slice(i * extent.length, (i + 1) * extent.length)
            self._read(extent.file, extent.offset + i * extent.stride, target[place])
            self._durations.append(time.perf_counter() - started)
            if i % CONTROL_EVERY == 0:
                started = time.perf_counter()
                os.fstat(self._files[extent.file])
                self._controls.append(time.perf_counter() - started)

    def _read_through(self, extent: Extent, first: int, target: memoryview) -> None:
        """Segments from `first` on, by reading whole runs of rows and keeping the columns."""
        if not self._scratch:
            self._scratch = bytearray(self._scratch_bytes)
        length, stride = extent.length, extent.stride
        per_run = max(1, (self._scratch_bytes - length) // stride + 1)
        for start in range(first, extent.count, per_run):
            num = min(per_run, extent.count - start)
            span = stride * (num - 1) + length
            run = memoryview(self._scratch)[:span]
            self._read(extent.file, extent.offset + start * stride, run)
            self.bytes_through += span - num * length
            for i in range(num):
                place = (start + i) * length
                target[place : place + length] = run[i * stride : i * stride + length]

    def _read(self, file: str, offset: int, target: memoryview) -> None:
        fd, done = self._open(file), 0
        while done < len(target):
            try:
                count = self._preadv(fd, [target[done:]], offset + done)
            except OSError as error:
                raise LoadError(
                    f"reading failed: {error.strerror or error}",
                    where=self.root / file,
                    found=f"offset {offset + done}, rank {self.rank}",
                    next_step="Check the storage this folder lies on, then load again",
                ) from error
            if count == 0:
                raise LoadError(
                    f"file ends at byte {offset + done}, {len(target) - done} bytes short; did it change since it was "
                    "opened?",
                    where=self.root / file,
                    found=f"offset {offset}, rank {self.rank}, file now {os.fstat(fd).st_size} bytes",
                    next_step="Run `workbench audit` on the folder",
                )
            done += count
            self.num_reads += 1
            self.bytes_read += count

    def _open(self, file: str) -> int:
        if file in self._files:
            self._files.move_to_end(file)
            return self._files[file]
        if len(self._files) >= OPEN_FILES:
            os.close(self._files.popitem(last=False)[1])
        try:
            self._files[file] = open_regular(self.root / file)
        except CheckpointError as error:
            raise LoadError(
                error.message, where=error.where, found=f"rank {self.rank}", next_step=error.next_step
            ) from error
        return self._files[file]
