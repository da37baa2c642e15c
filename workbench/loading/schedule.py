"""A plan cut into batches that fit the staging window, and the reads that fill it.

    window = staging slots (one is consumed while the others are read into) + scratch of the readers + temporaries

Chunks of one batch lie in the slot in file order, so that neighbours in the file are read in one go. Where a read is
long its bytes lie in the slot as they lie in a page of the file, with the rest of their pages free around them: so it
can go past the page cache, which moves whole pages, without a copy of what is staged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from workbench.base import LoadError
from workbench.loading.plan import Assignment, Extent, LoadPlan

__all__ = ["Batch", "Chunk", "Read", "Window", "schedule"]

ALIGN = 64  # bytes; tensors that are aligned in the file are aligned in the slot
PAGE = 4096  # bytes that are moved together past the page cache
LONG = 1 << 20  # bytes of a read that may go past it
READERS = 4  # threads that read at one time, where the window has room for a slot of each
SMALL_WINDOW = 32 << 20  # below it one reader and two slots, which keeps rows of any model inside a slot
BATCH_BYTES = 8 << 20  # of one batch at most, unless a row is larger: what was just read is still in the cache


@dataclass(frozen=True, slots=True)
class Window:
    """How the staging window is divided, in bytes: `num_slots` of `slot`, and what all readers share of `scratch`."""

    slot: int
    scratch: int
    temporary: int
    num_slots: int = 2

    @classmethod
    def of(cls, window_bytes: int) -> Window:
        """10/16 for the slots, 5/16 for temporaries, 1/16 for scratch. Raises LoadError below 64 KiB."""
        if window_bytes < 1 << 16:
            raise LoadError(f"staging window of {window_bytes} bytes", expected="at least 65536")
        part = window_bytes // 16
        num_slots = 2 if window_bytes < SMALL_WINDOW else READERS + 1
        return cls(slot=10 * part // num_slots, scratch=part, temporary=5 * part, num_slots=num_slots)

    @property
    def num_readers(self) -> int:
        return self.num_slots - 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """Local rows [first, last) of one assignment; `staged` says where in the slot each part's bytes begin.

    `is_padding`: the bytes are stored rows beyond those in use, and only checked.
    """

    assignment: Assignment
    first: int
    last: int
    extents: dict[str, Extent]
    staged: dict[str, int] = field(default_factory=dict)
    is_padding: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(extent.num_bytes for extent in self.extents.values())


@dataclass(frozen=True, slots=True)
class Read:
    """One extent and its place in the slot; for segments apart, they are packed there without gaps.

    `pieces` are the sizes of the chunks' parts in it, in order; each begins where `Chunk.staged` says.
    """

    extent: Extent
    at: int
    pieces: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    reads: tuple[Read, ...]
    chunks: tuple[Chunk, ...]
    used_bytes: int

    def bytes_by_piece(self) -> dict[str, int]:
        """Bytes to read for each part of the model, in the order of the chunks."""
        pieces: dict[str, int] = {}
        for chunk in self.chunks:
            piece = chunk.assignment.piece
            pieces[piece] = pieces.get(piece, 0) + chunk.num_bytes
        return pieces


def schedule(plan: LoadPlan, window: Window) -> Iterator[Batch]:
    """Batches in file order. Raises LoadError where a single row does not fit the window."""
    chunks: list[Chunk] = []
    cost, most = 0, _room(window)
    for chunk in _chunks(plan, window):
        more = sum(extent.num_bytes + 2 * ALIGN for extent in chunk.extents.values())
        if chunks and cost + more > most:
            yield _batch(chunks, window)
            chunks, cost = [], 0
        chunks.append(chunk)
        cost += more
    if chunks:
        yield _batch(chunks, window)


def _room(window: Window) -> int:
    """Bytes of a batch, with the rest of two pages left free where there may be long reads."""
    room = min(window.slot, BATCH_BYTES)
    return room - 2 * PAGE if room > LONG else room


def _chunks(plan: LoadPlan, window: Window) -> Iterator[Chunk]:
    for x in plan.assignments:
        sources = x.sources
        finest = min((own for own in sources.values() if not own.is_shared), key=lambda own: own.tile)
        edges = [0, *accumulate(b - a for a, b in finest.row_ranges)]
        step = _rows_that_fit(x, window)
        for low, high in pairwise(edges):
            # A chunk never crosses a cut of the stored rows, so each part of it is one extent.
            for first in range(low, high, step):
                last = min(first + step, high)
                extents = {part: next(own.extents(*own.rows_for(first, last))) for part, own in sources.items()}
                yield Chunk(x, first, last, extents)
        for extent in x.padding:
            yield Chunk(x, 0, 0, {"weight": extent}, is_padding=True)


def _rows_that_fit(x: Assignment, window: Window) -> int:
    tile = math.lcm(*(source.tile for source in x.sources.values()))
    shared = sum(source.num_bytes for source in x.sources.values() if source.is_shared)
    per_row = x.transform.temporary_bytes * x.num_columns
    rows = 0
    for slot in (_room(window), window.slot):
        if rows < 1:
            rows = (slot - 2 * ALIGN * len(x.sources) - shared) // x.source_row_bytes
            if per_row:
                rows = min(rows, window.temporary // per_row)
            rows = rows // tile * tile if rows < x.num_rows else rows  # chunks begin where tiles do
    if rows < 1:
        least = "one row" if tile == 1 else f"a tile of {tile} rows"
        size = f"{tile * x.source_row_bytes} bytes, {tile * per_row} more to transform it"
        raise LoadError(
            f"{x.param}: {least} ({size}) does not fit the window",
            found=f"slots of {window.slot} bytes and {window.temporary} for temporaries",
            next_step="Raise window_bytes",
        )
    return min(rows, x.num_rows)


def _batch(chunks: list[Chunk], window: Window) -> Batch:
    batch = _laid_out(chunks, ALIGN)
    if any(read.extent.count == 1 and read.extent.length >= LONG for read in batch.reads):
        paged = _laid_out(chunks, PAGE)
        if -(-paged.used_bytes // PAGE) * PAGE <= window.slot:
            return paged
        return _laid_out(chunks, ALIGN)
    return batch


def _laid_out(chunks: list[Chunk], align: int) -> Batch:
    """All parts of the chunks in file order; says in `Chunk.staged` where they lie."""
    wanted = sorted(
        ((extent, chunk, part) for chunk in chunks for part, extent in chunk.extents.items()),
        key=lambda item: (item[0].file, item[0].offset),
    )
    reads: list[Read] = []
    end = 0  # of what is placed in the slot so far
    for extent, chunk, part in wanted:
        before = reads[-1].extent if reads else None
        is_next = before is not None and (before.file, before.end) == (extent.file, extent.offset)
        if before is not None and is_next and before.count == extent.count == 1:
            chunk.staged[part] = end
            joined = before.length + extent.length
            run = Extent(extent.file, before.offset, joined, joined, 1)
            reads[-1] = Read(run, reads[-1].at, (*reads[-1].pieces, extent.num_bytes))
        else:
            at = -(-end // align) * align + (extent.offset % align if extent.count == 1 else 0)
            chunk.staged[part] = at
            reads.append(Read(extent, at, (extent.num_bytes,)))
            end = at
        end += extent.num_bytes
    return Batch(tuple(reads), tuple(chunks), end)
