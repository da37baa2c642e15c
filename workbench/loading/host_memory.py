"""How much host memory a load takes, as the kernel counts it."""

from __future__ import annotations

import resource
import sys

__all__ = ["HostMemory"]


class HostMemory:
    """Growth of this process over its size now: by samples, or exactly where the kernel's own peak was raised."""

    def __init__(self) -> None:
        self.before, self.peak_before = _private_bytes()[0], _peak_bytes()
        self.highest = self.before

    def sample(self) -> None:
        self.highest = max(self.highest, _private_bytes()[0])

    @property
    def growth(self) -> int:
        peak = _peak_bytes()
        if peak > self.peak_before:
            self.highest = max(self.highest, peak - _private_bytes()[1])
        return self.highest - self.before


def _private_bytes() -> tuple[int, int]:
    """Resident bytes of this process without those of mapped files, and those of mapped files."""
    try:
        with open("/proc/self/statm") as file:
            _, resident, shared, *_ = (int(pages) * resource.getpagesize() for pages in file.read().split())
    except OSError:  # not Linux: only the peak is known
        return _peak_bytes(), 0
    return resident - shared, shared


def _peak_bytes() -> int:
    """Largest resident size so far. getrusage alone may tell that of the parent process, where that was larger."""
    try:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
