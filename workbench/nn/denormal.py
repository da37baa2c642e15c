"""Numbers too small for a processor's fast path, taken as zero."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["denormals_as_zero"]


@contextmanager
def denormals_as_zero() -> Iterator[None]:
    """On this thread and the workers it starts; off afterwards. Decays and gates of linear attention run into such
    numbers, which processors compute in microcode, many times slower."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
