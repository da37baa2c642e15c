"""What the system says about this process, and about the memory of its host."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["HostBytes", "forget_peak", "host_memory", "peak_resident_bytes", "private_resident_bytes", "resident_bytes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostBytes:
    """Bytes of this host, or of the container it runs in where that has less; None where the system does not say."""

    total: int | None
    available: int | None  # that processes may take now without swapping: the page cache counts as free
    is_container: bool = False


def host_memory(*, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> HostBytes:
    """From the kernel's own files."""
    meminfo = _meminfo(proc / "meminfo")
    total, free = meminfo.get("MemTotal"), meminfo.get("MemAvailable")
    limit, used = _cgroup_bytes(cgroup / "memory.max"), _cgroup_bytes(cgroup / "memory.current")
    if limit is None or total is None or limit >= total:
        return HostBytes(total=total, available=free)
    return HostBytes(total=limit, available=min(free or limit, max(0, limit - (used or 0))), is_container=True)


def _meminfo(path: Path) -> dict[str, int]:
    """Entries of /proc/meminfo in bytes; empty where the file is not there (not Linux)."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines if line.endswith(" kB"))
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in pairs}


def _cgroup_bytes(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None  # "max" means no limit


def resident_bytes(pid: int | None = None) -> int | None:
    """Resident size of a process now, by default of this one, in bytes; None where the system does not tell."""
    try:
        words = Path(f"/proc/{pid or 'self'}/statm").read_text().split()
        return int(words[1]) * mmap.PAGESIZE
    except (OSError, IndexError, ValueError):
        return None


def peak_resident_bytes() -> int:
    """Largest resident size of this process so far, in bytes.

    The kernel's own mark where there is one: `getrusage` of a process that was started by a larger one tells the size
    of that, as it was when it forked.
    """
    try:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def private_resident_bytes() -> tuple[int, int]:
    """Resident bytes of this process without those of mapped files, and those of mapped files (0 where only the sum is
    known)."""
    try:
        with open("/proc/self/statm") as file:
            _, resident, shared, *_ = (int(pages) * os.sysconf("SC_PAGE_SIZE") for pages in file.read().split())
    except OSError:  # not Linux: only the peak is known
        return peak_resident_bytes(), 0
    return resident - shared, shared


def forget_peak() -> None:
    """Let `peak_resident_bytes` begin anew at the present size; does nothing where the kernel has no such switch."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")
