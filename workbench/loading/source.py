"""Which bytes of a stored tensor fill the rows that this rank holds, and how they lie once they are read.

Rows are those of the parameter that is filled: outputs of a matrix, elements of a vector. Four things may stand between
them and the file:

    a column slice      only part of each stored row is read
    tiles               one stored row is the scale of `unit` rows
    turns               rows of two parameters alternate (gate, up, gate, up): one row here is one of each
    a transposed store  a stored row is an input, so the rows of the parameter are a slice of every stored row

and a fused tensor holds the matrices of all experts, of which `base` picks one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.base import DTYPE_BITS
from workbench.checkpoint.header import TensorEntry
from workbench.loading.transform import DTYPES
from workbench.placement import Shard

__all__ = ["Extent", "Source", "source_of"]

TILE_SCALES = ("weight_scale_inv",)  # parts with one row for a tile of rows


@dataclass(frozen=True, slots=True)
class Extent:
    """`count` segments of `length` bytes in one file, `stride` apart: the bytes of some rows of a tensor."""

    file: str
    offset: int
    length: int
    stride: int
    count: int

    @property
    def num_bytes(self) -> int:
        return self.length * self.count

    @property
    def end(self) -> int:
        return self.offset + self.stride * (self.count - 1) + self.length


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The piece of one stored tensor that this rank holds.

    stored rows    |....[a b c]........[d e f]...|      `row_ranges`: (start, stop) pairs along the stored rows
    local rows           0 1 2          3 4 5
    within a row   |....[=======]................|      `row_offset`, `row_bytes` out of `row_stride` bytes

    Transposed, `row_ranges` are of the last stored dimension, `row_bytes` those of one column of `num_inputs` entries,
    and `row_stride` is the distance from one input to the next.
    """

    entry: TensorEntry
    base: int  # byte in the file where the matrix begins
    row_ranges: tuple[tuple[int, int], ...]
    row_shape: tuple[int, ...]  # local shape of one row, turns first
    row_offset: int
    row_bytes: int
    row_stride: int
    unit: int = 1  # rows of the parameter that one stored row is for
    turns: int = 1
    num_inputs: int | None = None  # of a transposed store

    @property
    def stored_rows(self) -> int:
        """Local rows as the file counts them."""
        return sum(stop - start for start, stop in self.row_ranges)

    @property
    def num_bytes(self) -> int:
        return self.stored_rows * self.row_bytes

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.entry.dtype]

    def covers(self, num_rows: int) -> bool:
        """Whether it has rows for a parameter of `num_rows`, no more and no fewer."""
        return self.stored_rows == -(-num_rows // self.unit)

    def extents(self, first: int, last: int) -> Iterator[Extent]:
        """Bytes of rows [first, last) of the parameter, in file order; rows that are whole in the file make one
        segment. Where a stored row is for several, `first` is a multiple of as many."""
        first, last, base = first // self.unit, -(-last // self.unit), 0
        for start, stop in self.row_ranges:
            low, high = max(first - base, 0), min(last - base, stop - start)
            if low < high:
                yield self._extent(start + low, high - low)
            base += stop - start

    def whole(self) -> Iterator[Extent]:
        """Everything this rank reads of it."""
        return self.extents(0, self.stored_rows * self.unit)

    def _extent(self, row: int, count: int) -> Extent:
        if self.num_inputs is not None:
            item = self.row_bytes // self.num_inputs
            return Extent(
                self.entry.file,
                self.base + self.row_offset + row * item,
                count * item,
                self.row_stride,
                self.num_inputs,
            )
        offset, length = self.base + row * self.row_stride + self.row_offset, self.row_bytes
        if length == self.row_stride:
            count, length = 1, length * count
        return Extent(self.entry.file, offset, length, self.row_stride, count)

    def rows(self, raw: Tensor) -> Tensor:
        """Bytes of one extent as rows of the parameter: (rows, turns, ...), without the turns where there are none."""
        values = raw.view(self.dtype)
        if self.num_inputs is None:
            return values.view(-1, *self.row_shape)
        by_input = values.view(self.num_inputs, -1, self.turns)
        rows = by_input.permute(1, 2, 0)
        return rows if self.turns > 1 else rows.squeeze(1)

    @property
    def is_cut(self) -> bool:
        """Whether a row is less than the file has of it, so that every row is a segment."""
        return self.num_inputs is None and self.row_bytes < self.row_stride


def source_of(entry: TensorEntry, shard: Shard, *, expert: int | None, part: int | None, tile: int) -> Source:
    """The bytes of `shard`, or of one stored `expert` of it, or of one `part` of its rows (w1 or w3 of a fused pair).

    `tile`: rows of a tile, where the model is stored in tiles.
    """
    tensor, item = shard.tensor, DTYPE_BITS[entry.dtype] // 8
    shape, ranges, base = entry.shape, shard.ranges, entry.begin
    if expert is not None:
        shape, ranges = shape[1:], ranges[1:]
        base += expert * item * math.prod(shape)
    turns = 1 + len(tensor.also_fills) if tensor.is_interleaved else 1
    unit = tile if tensor.part in TILE_SCALES else 1
    if tensor.is_transposed:
        ((first, last),), rows = ranges
        return Source(
            entry=entry,
            base=base,
            row_ranges=_rows(rows, part, turns),
            row_shape=((turns,) if turns > 1 else ()) + (last - first,),
            row_offset=first * item * shape[1],
            row_bytes=(last - first) * item * turns,
            row_stride=item * shape[1],
            turns=turns,
            num_inputs=last - first,
        )
    columns = ranges[1] if len(ranges) > 1 else ((0, 1),)  # a vector has rows of one element
    assert len(columns) == 1, f"{entry.name}: columns in several pieces"
    assert all(piece == ((0, size),) for piece, size in zip(ranges[2:], shape[2:], strict=True))
    start, stop = columns[0]
    below = item * math.prod(shape[2:])
    stride = item * math.prod(shape[1:])
    assert turns == 1 or (stop - start) * below == stride, f"{entry.name}: rows in turns are not cut by columns"
    local = tuple(sum(b - a for a, b in piece) for piece in ranges[1:])
    return Source(
        entry=entry,
        base=base,
        row_ranges=_rows(ranges[0], part, turns),
        row_shape=((turns,) if turns > 1 else ()) + local,
        row_offset=start * below,
        row_bytes=(stop - start) * below * turns,
        row_stride=stride * turns,
        unit=unit,
        turns=turns,
    )


def _rows(ranges: tuple[tuple[int, int], ...], part: int | None, turns: int) -> tuple[tuple[int, int], ...]:
    if part is not None:
        return (ranges[part],)
    return tuple((start // turns, stop // turns) for start, stop in ranges)
