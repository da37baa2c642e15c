"""How much host memory a load takes, as the kernel counts it."""

from __future__ import annotations

import ctypes
import sys
import time

from workbench.base import peak_resident_bytes, private_resident_bytes

__all__ = ["HostMemory", "return_freed_memory"]


class HostMemory:
    """Growth of this process over its size now: by samples, or by the kernel's own peak where that was raised.

    The kernel's peak counts mapped files, and those come and go: under pressure the kernel drops pages of libraries.
    What is taken off is therefore the most that any sample saw of them, not what is left of them at the end.
    """

    def __init__(self) -> None:
        (self.before, self.mapped), self.peak_before = private_resident_bytes(), peak_resident_bytes()
        self.highest, self._sampled_s = self.before, -1.0

    def sample(self, *, at_most_every_s: float = 0.0) -> None:
        """Look now; does nothing where the last look was that short ago."""
        now = time.monotonic()
        if now - self._sampled_s < at_most_every_s:
            return
        self._sampled_s = now
        private, mapped = private_resident_bytes()
        self.highest, self.mapped = max(self.highest, private), max(self.mapped, mapped)

    @property
    def growth(self) -> int:
        self.sample()
        peak = peak_resident_bytes()
        if peak > self.peak_before:
            self.highest = max(self.highest, peak - self.mapped)
        return self.highest - self.before


def return_freed_memory() -> None:
    """Hand freed memory back to the system now; does nothing where the C library has no such call.

    glibc keeps freed blocks of up to 32 MiB in its heap once it has seen one of their size, and gives none back while
    anything lives above them; a piece that was let go would still count beside the next one.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform != "win32" else None
    if trim is not None:
        trim(0)
