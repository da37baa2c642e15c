"""Through the page cache or past it: found out on the reads that a load makes anyway, and what the folder lies on.

    few bytes, a network share, most pages cached  ──▶ buffered, nothing is tried
    files and weights do not fit into memory together  ──▶ past the cache, nothing is tried
    else: long reads take turns until each way has moved `probe_bytes` ──▶ the faster one reads the rest

What a cache is good for is the next rank and the next load, so past it must be clearly faster. Where files and weights
do not fit into memory side by side, the cache keeps nothing for anybody, and each of its pages must be taken away again
for a weight; the first reads of a load do not show what that costs, so there the sizes decide.

Nothing is read for the sake of the probe. A third way, a mapping, is not offered: see `loading.reader`.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

from workbench.base import CheckpointError, host_memory
from workbench.checkpoint.header import open_regular
from workbench.loading.plan import Extent
from workbench.loading.schedule import LONG

__all__ = ["DIRECT_FROM", "StrategyProbe", "cached_share", "choose_strategy", "file_system_of", "is_network"]

DIRECT_FROM = LONG  # bytes of a read from which going past the page cache is considered
WORTH_A_PROBE = 512 << 20  # bytes of a load
PROBE_BYTES = 48 << 20
FASTER = 1.2  # how much faster reading past the cache must be: the next rank, or the next load, finds nothing cached
PLACES = 64  # extents looked at for whether the files are cached
CACHESTAT, CACHESTAT_ON = 451, {"aarch64", "loongarch64", "ppc64le", "riscv64", "s390x", "x86_64"}
MOSTLY = 0.5
NETWORK = {
    "9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "panfs", "smb3", "smbfs",
    "virtiofs", "weka", "wekafs",
}  # fmt: skip


class StrategyProbe:
    """Says of each long read whether to go past the page cache; safe to use from several threads."""

    def __init__(self, *, is_settled: bool = False, is_direct: bool = False, probe_bytes: int = PROBE_BYTES) -> None:
        self.is_settled, self.is_direct = is_settled, is_direct
        self._probe_bytes = probe_bytes
        self._lock = threading.Lock()
        self._asked = {False: 0, True: 0}  # bytes, by is_direct
        self._moved = {False: 0, True: 0}
        self._seconds = {False: 0.0, True: 0.0}

    def wants_direct(self, num_bytes: int) -> bool:
        if num_bytes < DIRECT_FROM:
            return False
        if self.is_settled:
            return self.is_direct
        with self._lock:
            choice = self._asked[True] < self._asked[False]
            self._asked[choice] += num_bytes
            return choice

    def saw(self, is_direct: bool, num_bytes: int, seconds: float) -> None:
        """A read took so long; once both ways have moved enough the faster one is kept."""
        if self.is_settled or num_bytes < DIRECT_FROM:
            return
        with self._lock:
            self._moved[is_direct] += num_bytes
            self._seconds[is_direct] += seconds
            if min(self._moved.values()) >= self._probe_bytes:
                buffered, direct = (self._moved[way] / max(self._seconds[way], 1e-9) for way in (False, True))
                self.is_direct = direct > FASTER * buffered
                self.is_settled = True

    def refuse(self) -> None:
        """The file system has no such way."""
        with self._lock:
            self.is_settled, self.is_direct = True, False


def choose_strategy(root: Path, extents: Iterable[Extent], *, is_held_on_host: bool = True) -> StrategyProbe:
    """How to read these bytes of the files in `root`. Reads nothing.

    `is_held_on_host`: whether what is read stays in host memory, as much as the files have on all ranks of this host.
    """
    long = [extent for extent in extents if extent.count == 1 and extent.length >= DIRECT_FROM]
    is_small = sum(extent.length for extent in long) < WORTH_A_PROBE
    if is_small or is_network(file_system_of(root)) or cached_share(root, long) > MOSTLY:
        return StrategyProbe(is_settled=True)
    needed = _size_of(root, {extent.file for extent in long}) * (2 if is_held_on_host else 1)
    available = host_memory().available
    is_short = available is not None and needed > available
    return StrategyProbe(is_settled=is_short, is_direct=is_short)


def _size_of(root: Path, files: Iterable[str]) -> int:
    """Bytes of these files together; one that is not there counts nothing, the load will say so."""
    total = 0
    for file in files:
        with contextlib.suppress(OSError):
            total += (root / file).stat().st_size
    return total


def cached_share(root: Path, extents: list[Extent]) -> float:
    """Share of some of these extents, spread evenly over them, that is in the page cache; 0 where nobody can say.

    The kernel is asked for its count (cachestat: Linux 6.5, of files that one owns or may write). A read that must not
    wait (RWF_NOWAIT) is no answer: since Linux 5.10 it begins to fetch what it does not find, and where the disk is
    quick it finds it then.
    """
    pages = cached = 0
    for extent in extents[:: max(1, len(extents) // PLACES)]:
        try:
            fd = open_regular(root / extent.file)
        except CheckpointError:  # the load will say so, with its rank
            return 0.0
        try:
            found = _cached_pages(fd, extent.offset, extent.length)
        finally:
            os.close(fd)
        if found is None:
            return 0.0
        cached += found
        pages += -(-extent.end // mmap.PAGESIZE) - extent.offset // mmap.PAGESIZE
    return cached / pages if pages else 0.0


def _cached_pages(fd: int, offset: int, length: int) -> int | None:
    """Pages of this part of a file that are in the page cache; None where the system does not say."""
    if platform.machine() not in CACHESTAT_ON or not sys.platform.startswith("linux"):
        return None
    asked, found = (ctypes.c_uint64 * 2)(offset, length), (ctypes.c_uint64 * 5)()
    call = ctypes.CDLL(None).syscall
    call.restype = ctypes.c_long
    failed = call(
        ctypes.c_long(CACHESTAT), ctypes.c_int(fd), ctypes.byref(asked), ctypes.byref(found), ctypes.c_uint(0)
    )
    return None if failed else int(found[0])  # cached, dirty, being written, evicted, recently evicted


def file_system_of(path: Path) -> str:
    """Type of the file system as the kernel names it ("ext4", "nfs4", "fuse.s3fs"); "" where it does not say."""
    try:
        device = os.stat(path).st_dev
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == wanted:
            return rest.split()[0]
    return ""


def is_network(file_system: str) -> bool:
    """Whether reads go to another machine, as far as the type tells; FUSE may be anything and is taken for one."""
    return file_system in NETWORK or file_system.startswith("fuse")
