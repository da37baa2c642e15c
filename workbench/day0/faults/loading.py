"""Ranks that load carelessly: `python -m workbench.day0.faults.loading`, in place of `workbench.deployment.worker`.

Every rank reads its bytes twice, the first leaves some rows of a parameter out and hears nothing of what its ledger
says about that, and the last holds more host memory than the window allows. The process ends with its deployment, and
the faults with it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from torch import Tensor

from workbench.base import LoadError
from workbench.deployment import worker
from workbench.loading import load
from workbench.loading.ledger import Ledger
from workbench.loading.reader import Places, ShardReader
from workbench.loading.schedule import Batch, Chunk
from workbench.loading.stream import Filled, Writer

__all__ = ["HoardingReader", "RereadingReader", "SkippingWriter", "UnheardLedger", "plant"]

BALLAST_BYTES = load.WINDOW_BYTES + (32 << 20)


class RereadingReader(ShardReader):
    """Reads everything twice."""

    def fill(self, batch: Batch, slot: memoryview, places: Places | None = None) -> None:
        super().fill(batch, slot, places)
        super().fill(batch, slot, places)


class HoardingReader(RereadingReader):
    """Also holds on to memory that no window accounts for."""

    ballast = b""

    def fill(self, batch: Batch, slot: memoryview, places: Places | None = None) -> None:
        self.ballast = self.ballast or b"\1" * BALLAST_BYTES
        super().fill(batch, slot, places)


class SkippingWriter(Writer):
    """Leaves out the first rows that it is given."""

    has_skipped = False

    def _write_chunk(self, chunk: Chunk, staged: Tensor, filled: Filled) -> None:
        if self.has_skipped:
            super()._write_chunk(chunk, staged, filled)
        self.has_skipped = True


class UnheardLedger(Ledger):
    """Checks as ever; what it finds does not end the load."""

    def close(self, planned: Iterator[str] | None = None) -> None:
        with contextlib.suppress(LoadError):
            super().close(planned)


def plant(rank: int, world_size: int) -> None:
    """Put the careless parts in the place of the loader's own, in this process."""
    load.ShardReader = HoardingReader if rank == world_size - 1 else RereadingReader  # type: ignore[misc]
    if rank == 0:
        load.Writer, load.Ledger = SkippingWriter, UnheardLedger  # type: ignore[misc]


if __name__ == "__main__":
    plant(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
    worker.main()
