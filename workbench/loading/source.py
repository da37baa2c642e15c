"""Where the bytes of one rank's piece of a stored tensor lie: whole tensors, slices, and experts of a fused one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from workbench.base import DTYPE_BITS
from workbench.checkpoint.header import TensorEntry
from workbench.loading.transform import DTYPES
from workbench.placement import Shard

__all__ = ["Extent", "FusedPiece", "Source", "fused_pieces", "source_of"]

Ranges = tuple[tuple[int, int], ...]


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


@dataclass(frozen=True, slots=True)
class Source:
    """The piece of one stored tensor that this rank holds.

    stored rows    |....[a b c]........[d e f]...|      `row_ranges`: (start, stop) pairs along dim 0
    local rows           0 1 2          3 4 5
    within a row   |....[=======]................|      `row_offset`, `row_bytes` out of `row_stride` bytes

    `base`: bytes of the tensor before its first row, for one matrix of a stack. `tile`: local rows that one stored row
    stands for, 1 but for the scales of tiles. `num_lines`: of a matrix stored (columns, rows), how many such lines this
    rank holds; a local row is then one place of every line, and the other fields speak of lines:

    stored lines   |....[a b c]................|      `row_ranges`: places along a line, `row_shape` ends in the lines
                   |....[a b c]................|      `row_offset`: before the first line, `row_stride`: of a line
    """

    entry: TensorEntry
    row_ranges: Ranges
    row_shape: tuple[int, ...]  # local shape of one row
    row_offset: int
    row_bytes: int
    row_stride: int
    base: int = 0
    tile: int = 1
    num_lines: int = 0

    @property
    def num_rows(self) -> int:
        return sum(stop - start for start, stop in self.row_ranges)

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.entry.dtype]

    def rows_for(self, first: int, last: int) -> tuple[int, int]:
        """Own rows that local rows [first, last) of the parameter need; `first` is the first row of a tile."""
        return first // self.tile, -(-last // self.tile)

    def extents(self, first: int, last: int) -> Iterator[Extent]:
        """Bytes of own rows [first, last), in file order; rows that are whole in the file make one segment."""
        if self.num_lines:
            yield self._across(first, last)
            return
        base = 0
        for start, stop in self.row_ranges:
            low, high = max(first - base, 0), min(last - base, stop - start)
            if low < high:
                offset = self.entry.begin + self.base + (start + low) * self.row_stride + self.row_offset
                count, length = high - low, self.row_bytes
                if length == self.row_stride:
                    count, length = 1, length * count
                yield Extent(self.entry.file, offset, length, self.row_stride, count)
            base += stop - start

    def _across(self, first: int, last: int) -> Extent:
        """Places [first, last) of every line."""
        ((start, _),) = self.row_ranges
        unit = self.row_bytes // self.num_lines
        offset = self.entry.begin + self.base + self.row_offset + (start + first) * unit
        count, length = self.num_lines, (last - first) * unit
        if length == self.row_stride:
            count, length = 1, length * count
        return Extent(self.entry.file, offset, length, self.row_stride, count)


def source_of(entry: TensorEntry, shard: Shard, *, tile: int = 1) -> Source:
    """The piece of a tensor that fills one parameter, or one slot of a stacked one."""
    shape, ranges = entry.shape, shard.ranges
    if shard.tensor.param.endswith("A_log") and len(shape) > 1:  # a vector, stored by some with dimensions of one
        place = max(range(len(shape)), key=lambda d: shape[d])
        assert math.prod(shape) == shape[place], f"{entry.name}: {shape} is no vector"
        shape, ranges = (shape[place],), (ranges[place],)
    return _rows(entry, shape, ranges, tile=tile)


@dataclass(frozen=True, slots=True)
class FusedPiece:
    """What one expert of a fused tensor gives to one parameter, or to two whose rows take turns (`twin`)."""

    param: str
    twin: str | None
    slot: int
    source: Source


def fused_pieces(entry: TensorEntry, shard: Shard) -> Iterator[FusedPiece]:
    """Experts of a tensor that holds all of a layer, as the family declares it; slots count this rank's experts.

    Rows of several parameters lie one behind another, or take turns: a pair of neighbours is then read as one row.
    """
    tensor = shard.tensor
    assert tensor.num_stacked is not None
    ((first, last),) = shard.ranges[0]
    shape, ranges = entry.shape[1:], shard.ranges[1:]
    matrix_bytes = DTYPE_BITS[entry.dtype] * math.prod(shape) // 8
    for slot, expert in enumerate(range(first, last)):
        base = expert * matrix_bytes
        if tensor.is_transposed:
            yield from _transposed_pieces(entry, shard, slot, base)
            continue
        if tensor.is_interleaved:
            (twin,) = tensor.also_fills
            pairs = tuple((start // 2, stop // 2) for start, stop in ranges[0])
            source = _rows(entry, (shape[0] // 2, 2, *shape[1:]), (pairs, ((0, 2),), *ranges[1:]), base)
            yield FusedPiece(tensor.param, twin, slot, source)
            continue
        params = (tensor.param, *tensor.also_fills)
        own = [ranges[0]] if len(params) == 1 else [(part,) for part in ranges[0]]
        for param, rows in zip(params, own, strict=True):
            yield FusedPiece(param, None, slot, _rows(entry, shape, (rows, *ranges[1:]), base))


def _transposed_pieces(entry: TensorEntry, shard: Shard, slot: int, base: int) -> Iterator[FusedPiece]:
    """The same of one matrix stored (columns, rows)."""
    tensor = shard.tensor
    ((first_line, last_line),), places = shard.ranges[1:]
    num_lines, line_bytes = last_line - first_line, DTYPE_BITS[entry.dtype] * entry.shape[2] // 8

    def piece(param: str, place: tuple[int, int], twin: str | None = None) -> FusedPiece:
        pair = () if twin is None else (2,)
        source = Source(
            entry=entry,
            row_ranges=(place,),
            row_shape=(*pair, num_lines),
            row_offset=first_line * line_bytes,
            row_bytes=num_lines * (line_bytes // entry.shape[2]) * math.prod(pair),
            row_stride=line_bytes,
            base=base,
            num_lines=num_lines,
        )
        return FusedPiece(param, twin, slot, source)

    if tensor.is_interleaved:
        ((start, stop),), (twin,) = places, tensor.also_fills
        yield piece(tensor.param, (start // 2, stop // 2), twin)
        return
    for param, place in zip((tensor.param, *tensor.also_fills), places, strict=True):
        yield piece(param, place)


def _rows(
    entry: TensorEntry, shape: tuple[int, ...], ranges: tuple[Ranges, ...], base: int = 0, *, tile: int = 1
) -> Source:
    """Rows along dim 0, of which dim 1 alone may be cut."""
    item = DTYPE_BITS[entry.dtype] // 8
    columns = ranges[1] if len(shape) > 1 else ((0, 1),)  # a vector has rows of one element
    assert len(columns) == 1, f"{entry.name}: columns in several pieces"
    assert all(r == ((0, size),) for r, size in zip(ranges[2:], shape[2:], strict=True)), f"{entry.name}: {ranges}"
    start, stop = columns[0]
    unit = item * math.prod(shape[2:])
    return Source(
        entry=entry,
        row_ranges=ranges[0],
        row_shape=() if len(shape) == 1 else (stop - start, *shape[2:]),
        row_offset=start * unit,
        row_bytes=(stop - start) * unit,
        row_stride=item * math.prod(shape[1:]),
        base=base,
        tile=tile,
    )
