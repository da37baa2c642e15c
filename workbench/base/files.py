"""Small files that nobody vouches for, read whole: bounded, and never a pipe or device, which could block for ever."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from workbench.base.errors import ConfigError, WorkbenchError

__all__ = ["read_small_file"]


def read_small_file(path: Path, *, max_bytes: int, error: type[WorkbenchError] = ConfigError) -> bytes:
    """All bytes of a regular file of at most `max_bytes`. Raises `error` for anything else."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise error("file is missing", where=path) from None
    except (OSError, ValueError) as failure:
        raise error(f"file cannot be read: {failure}", where=path) from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise error("not a regular file", where=path)
        if status.st_size > max_bytes:
            found, expected = f"{status.st_size:,} bytes", f"at most {max_bytes:,}"
            raise error("file is too large", where=path, found=found, expected=expected)
        with os.fdopen(os.dup(fd), "rb") as file:
            return file.read(status.st_size)
    except OSError as failure:
        raise error(f"file cannot be read: {failure}", where=path) from None
    finally:
        os.close(fd)
