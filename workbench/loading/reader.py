"""Positioned reads of shard files into memory that the caller owns; never a mapping.

A page of a mapped file that cannot be served (truncated file, lost network share) is a SIGBUS that kills the process;
a read that comes up short is an error with a file, an offset and a rank. A handler for that signal is no way out: it
belongs to the whole process, Python's runs only after the faulting instruction, which faults again, and the copy that
faulted may be any library's. A mapping also leaves the weights in the page cache, to be taken away and read again when
memory is short, where a rank must own what it serves from; and it has a copy to make like any read.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import statistics
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from workbench.base import CheckpointError, LoadError
from workbench.checkpoint.header import open_regular
from workbench.loading.plan import Extent
from workbench.loading.schedule import PAGE, Batch, Read
from workbench.loading.strategy import StrategyProbe

__all__ = ["Places", "ReadPolicy", "ShardReader"]

Preadv = Callable[[int, Sequence[memoryview], int], int]
Places = Mapping[int, memoryview]  # by where in the slot the bytes would lie otherwise
OPEN_FILES = 16  # of each thread
MANY_BUFFERS = 512  # in one call; the kernel takes 1024
LONG_COPY = 64 << 10  # bytes from which a copy lets go of the interpreter
SAMPLES = 32  # short reads that are looked at together
CONTROL_EVERY = 4  # of them one is accompanied by a read of as many bytes that are in memory
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
    """Reads extents of the files in `root` for one rank. Several threads may call `fill`; each opens its own files, so
    that the kernel sees the order in which each reads.

    `scratch_bytes` bounds what all threads together hold to read through gaps and past the page cache.
    """

    def __init__(
        self,
        root: Path,
        *,
        rank: int = 0,
        scratch_bytes: int = 1 << 20,
        policy: ReadPolicy | None = None,
        preadv: Preadv | None = None,
        num_threads: int = 1,
        strategy: StrategyProbe | None = None,
    ) -> None:
        self.root, self.rank, self.policy = root, rank, policy or ReadPolicy()
        self.strategy = strategy or StrategyProbe(is_settled=True)
        self.bytes_read = 0
        self.bytes_through = 0  # of `bytes_read`: gaps that were read and dropped
        self.bytes_direct = 0  # of `bytes_read`: past the page cache
        self.num_reads = 0
        self.num_threads = num_threads
        self._busy_s = 0.0
        self._preadv = preadv or os.preadv
        self._scratch_bytes = scratch_bytes // num_threads // PAGE * PAGE or scratch_bytes
        self._own = threading.local()
        self._seen: dict[str, tuple[int, int, int]] = {}  # what a file was when it was first opened
        self._all_files: list[OrderedDict[tuple[str, bool], int]] = []
        self._lock = threading.Lock()
        self._memory_fd, self._memory_bytes = -1, 0
        self._durations: deque[float] = deque(maxlen=SAMPLES)
        self._controls: deque[float] = deque(maxlen=SAMPLES // CONTROL_EVERY)

    def fill(self, batch: Batch, slot: memoryview, places: Places | None = None) -> None:
        """Read all extents of a batch to where they belong in the slot, or in `places`. Raises LoadError naming file,
        offset and rank."""
        started = time.perf_counter()
        for read, pages in zip(batch.reads, _pages(batch, slot), strict=True):
            if read.extent.count == 1:
                self._read(read, slot, places or {}, pages)
            else:
                self._read_segments(read.extent, _targets(read, slot, places or {})[0])
        with self._lock:
            self._busy_s += time.perf_counter() - started

    @property
    def seconds(self) -> float:
        """Spent reading so far; of several threads, their mean."""
        return self._busy_s / self.num_threads

    @property
    def is_slow(self) -> bool:
        """Whether short reads have been seen to take long each, and not only because this process has to wait."""
        limit = self.policy.slow_read_s
        if limit is None or len(self._durations) < SAMPLES:
            return False
        # A busy machine, or a busy interpreter, makes every call slow; that says nothing about the storage.
        control = statistics.median(self._controls)
        return statistics.median(self._durations) > max(limit, SLOWER_THAN_CONTROL * control)

    def check_unchanged(self) -> None:
        """Raises LoadError where a file is another one, or was written to, since its first read."""
        for file, seen in self._seen.items():
            try:
                now = _identity(os.stat(self.root / file))
            except OSError:
                now = (0, 0, 0)
            if now != seen:
                self._changed(file)

    def _changed(self, file: str) -> NoReturn:
        raise LoadError(
            "file changed while it was read: what was loaded may be of two checkpoints",
            where=self.root / file,
            found=f"rank {self.rank}",
            next_step="Load again once nothing writes to this folder",
        )

    def close(self) -> None:
        """Close the files of all threads; none may be reading."""
        while self._all_files:
            for fd in self._all_files.pop().values():
                os.close(fd)
        if self._memory_fd >= 0:
            os.close(self._memory_fd)
        self._memory_fd, self._memory_bytes = -1, 0
        self._own = threading.local()

    def _read_segments(self, extent: Extent, target: memoryview) -> None:
        gap, length = extent.stride - extent.length, extent.length
        may_read_through = gap <= self.policy.largest_gap and extent.stride <= self._scratch_bytes
        fd, num_whole = self._open(extent.file), 0
        for i in range(extent.count):
            if i % SAMPLES == 0 and may_read_through and self.is_slow:
                self._count(num_whole * length, num_whole)
                self._read_through(extent, i, target)
                return
            started = time.perf_counter()
            offset, place = extent.offset + i * extent.stride, target[i * length : (i + 1) * length]
            count = self._call(fd, extent.file, [place], offset, offset + length)
            if count == length:
                num_whole += 1  # counted together: a column slice is mostly made of what Python does for each segment
            else:
                self._count(count)
                self._fill_from(fd, extent.file, offset + count, [place[count:]])
            self._durations.append(time.perf_counter() - started)
            if i % CONTROL_EVERY == 0 and may_read_through:
                started = time.perf_counter()
                self._read_memory(length)
                self._controls.append(time.perf_counter() - started)
        self._count(num_whole * length, num_whole)

    def _read_memory(self, num_bytes: int) -> None:
        """A read of so many bytes that no storage is asked for. It lets go of the interpreter as a read of a file does
        and waits as long to get it back, which a call that returns at once does not."""
        with self._lock:
            if self._memory_fd < 0:
                self._memory_fd = os.memfd_create("control") if hasattr(os, "memfd_create") else os.open(os.devnull, 0)
            if self._memory_bytes < num_bytes and hasattr(os, "memfd_create"):
                os.ftruncate(self._memory_fd, num_bytes)
                self._memory_bytes = num_bytes
        os.preadv(self._memory_fd, [self._scratch()[:num_bytes]], 0)

    def _read_through(self, extent: Extent, first: int, target: memoryview) -> None:
        """Segments from `first` on, by reading whole runs of rows and keeping the columns."""
        scratch, length, stride = self._scratch(), extent.length, extent.stride
        per_run = max(1, (self._scratch_bytes - length) // stride + 1)
        for start in range(first, extent.count, per_run):
            num = min(per_run, extent.count - start)
            span = stride * (num - 1) + length
            run = scratch[:span]
            self._fill_from(self._open(extent.file), extent.file, extent.offset + start * stride, [run])
            with self._lock:
                self.bytes_through += span - num * length
            for i in range(num):
                place = (start + i) * length
                target[place : place + length] = run[i * stride : i * stride + length]

    def _read(self, read: Read, slot: memoryview, places: Places, pages: memoryview | None) -> None:
        """One run of bytes to their place in the slot, or to those in `places`."""
        file, num_bytes = read.extent.file, read.extent.num_bytes
        is_direct = self.strategy.wants_direct(num_bytes)
        started = time.perf_counter()
        if not (is_direct and self._read_direct(read, slot, places, pages)):
            self._fill_from(self._open(file), file, read.extent.offset, _targets(read, slot, places))
        self.strategy.saw(is_direct, num_bytes, time.perf_counter() - started)

    def _read_direct(self, read: Read, slot: memoryview, places: Places, pages: memoryview | None) -> bool:
        """The same past the page cache, which moves whole pages into aligned memory; False where that cannot be.

        `pages`: memory of the slot for all pages of this read, with its bytes where they belong; else scratch is used.
        """
        file, offset, end = read.extent.file, read.extent.offset, read.extent.end
        fd = self._open(file, is_direct=True)
        if fd < 0:
            return False
        left = [] if pages is not None else _targets(read, slot, places)
        at = begin = offset // PAGE * PAGE
        while at < end:
            wanted = -(-(end - at) // PAGE) * PAGE
            buffer = pages[at - begin :] if pages is not None else self._scratch()[: min(self._scratch_bytes, wanted)]
            try:
                count = self._call(fd, file, [buffer], at, end)
            except LoadError as error:
                if not (isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EINVAL):
                    raise
                self.strategy.refuse()
                if at <= offset:
                    return False
                # Its blocks may be larger than a page, which shows where a run ends: the rest goes the other way.
                rest = left if pages is None else [slot[read.at + at - offset : read.at + read.extent.num_bytes]]
                self._fill_from(self._open(file), file, at, rest)
                break
            first, last = max(offset, at), min(at + count, end)
            if last <= first or (last < end and count % PAGE):
                self._end_of_file(fd, file, max(first, last), end)
            if pages is None:
                left = _scatter(buffer[first - at : last - at], left)
            at += count
            self._count(last - first, direct=True)
        if pages is not None:
            for place, target in _placed(read, places):
                _copy(target, slot[place : place + len(target)])
        return True

    def _fill_from(self, fd: int, file: str, offset: int, targets: list[memoryview]) -> None:
        left, end = list(targets), offset + sum(map(len, targets))
        while left:
            count = self._call(fd, file, left[:MANY_BUFFERS], offset, end)
            if count == 0:
                self._end_of_file(fd, file, offset, end)
            offset += count
            self._count(count)
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]

    def _call(self, fd: int, file: str, buffers: list[memoryview], offset: int, end: int) -> int:
        try:
            return self._preadv(fd, buffers, offset)
        except OSError as error:
            raise LoadError(
                f"reading failed: {error.strerror or error}",
                where=self.root / file,
                found=f"offset {offset}, rank {self.rank}",
                next_step="Check the storage this folder lies on, then load again",
            ) from error

    def _end_of_file(self, fd: int, file: str, offset: int, end: int) -> NoReturn:
        raise LoadError(
            f"file ends at byte {offset}, {end - offset} bytes short; did it change since it was opened?",
            where=self.root / file,
            found=f"offset {offset}, rank {self.rank}, file now {os.fstat(fd).st_size} bytes",
            next_step="Run `workbench audit` on the folder",
        )

    def _count(self, num_bytes: int, num_calls: int = 1, *, direct: bool = False) -> None:
        with self._lock:
            self.num_reads += num_calls
            self.bytes_read += num_bytes
            self.bytes_direct += num_bytes if direct else 0

    def _scratch(self) -> memoryview:
        """Memory of this thread that begins at a page, taken when it is first needed."""
        if not hasattr(self._own, "scratch"):
            self._own.scratch = memoryview(mmap.mmap(-1, self._scratch_bytes))
        scratch: memoryview = self._own.scratch
        return scratch

    def _open(self, file: str, *, is_direct: bool = False) -> int:
        """Descriptor of this thread, -1 where the file cannot be read past the page cache."""
        if not hasattr(self._own, "files"):
            self._own.files = OrderedDict()
            with self._lock:
                self._all_files.append(self._own.files)
        files: OrderedDict[tuple[str, bool], int] = self._own.files
        key = (file, is_direct)
        if key in files:
            files.move_to_end(key)
            return files[key]
        if len(files) >= OPEN_FILES:
            os.close(files.popitem(last=False)[1])
        try:
            fd = open_regular(self.root / file)
        except CheckpointError as error:
            raise LoadError(
                error.message, where=error.where, found=f"rank {self.rank}", next_step=error.next_step
            ) from error
        with self._lock:
            seen = self._seen.setdefault(file, _identity(os.fstat(fd)))
        if seen != _identity(os.fstat(fd)):
            os.close(fd)
            self._changed(file)
        if is_direct:
            try:
                fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
            except (OSError, AttributeError):  # not every file system, nor every system, has it
                os.close(fd)
                self.strategy.refuse()
                return -1
        files[key] = fd
        return fd


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _pages(batch: Batch, slot: memoryview) -> list[memoryview | None]:
    """For each read, the memory of the slot that takes all pages of the file it touches: None where its bytes lie in
    the slot otherwise than in a page, or where those around them belong to another read."""
    reads = batch.reads
    base = np.frombuffer(slot, np.uint8).__array_interface__["data"][0]
    before = [0, *(read.at + read.extent.num_bytes for read in reads[:-1])]
    after = [*(read.at for read in reads[1:]), len(slot)]
    found: list[memoryview | None] = []
    for read, low, high in zip(reads, before, after, strict=True):
        into_page = read.extent.offset % PAGE
        first, last = read.at - into_page, read.at + read.extent.num_bytes
        last += -(last - first) % PAGE
        is_free = read.extent.count == 1 and low <= first and last <= high
        found.append(slot[first:last] if is_free and (base + first) % PAGE == 0 else None)
    return found


def _placed(read: Read, places: Places) -> Iterator[tuple[int, memoryview]]:
    """What of one read has a place of its own: where in the slot it would lie otherwise, and that place."""
    at = read.at
    for num_bytes in read.pieces if places else ():
        if at in places:
            yield at, places[at]
        at += num_bytes


def _targets(read: Read, slot: memoryview, places: Places) -> list[memoryview]:
    """Where the bytes of one read go, in order; what lies side by side in the slot is one buffer."""
    targets, begin, end = [], read.at, read.at + read.extent.num_bytes
    for at, place in _placed(read, places):
        if at > begin:
            targets.append(slot[begin:at])
        targets.append(place)
        begin = at + len(place)
    if end > begin:
        targets.append(slot[begin:end])
    return targets


def _scatter(data: memoryview, targets: list[memoryview]) -> list[memoryview]:
    """Copy `data` over the targets in order; returns what of them is left to fill."""
    at = 0
    for index, target in enumerate(targets):
        count = min(len(target), len(data) - at)
        _copy(target[:count], data[at : at + count])
        at += count
        if count < len(target):
            return [target[count:], *targets[index + 1 :]]
    return []


def _copy(target: memoryview, data: memoryview) -> None:
    """Long runs without the interpreter: the pages of `target` are touched here for the first time, which takes most of
    a copy, and the other threads read meanwhile."""
    if len(data) < LONG_COPY:
        target[:] = data
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(data, np.uint8))
