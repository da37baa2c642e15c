"""What the system says about this process."""

from __future__ import annotations

import sys

__all__ = ["peak_resident_bytes"]


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
