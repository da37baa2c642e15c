"""Where the bytes of one rank's piece of a stored tensor lie: whole tensors, slices, and experts of a fused one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from workbench.base import DTYPE_BITS, LoadError
from workbench.checkpoint.header import TensorEntry
from workbench.loading.transform import DTYPES
from workbench.placement import Shard
from workbench.spec import SCHEMES, TensorSpec

__all__ = ["Extent", "FusedPiece", "Source", "fused_pieces", "is_shared", "source_of"]

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
    stands for, 1 but for the scales of tiles and for codes packed along rows. `is_shared`: all local rows need all of
    it. `num_lines`: of a matrix stored (columns, rows), how many such lines this rank holds; a local row is then one
    place of every line, and the other fields speak of lines:

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
    is_shared: bool = False

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
        if self.is_shared:
            return 0, self.num_rows
        return first // self.tile, -(-last // self.tile)

    def extents(self, first: int, last: int) -> Iterator[Extent]:
        """Bytes of own rows [first, last), in file order; rows that are whole in the file make one segment."""
        base = 0
        for start, stop in self.row_ranges:
            low, high = max(first - base, 0), min(last - base, stop - start)
            if low < high and self.num_lines:
                yield self._across(start + low, start + high)
            elif low < high:
                offset = self.entry.begin + self.base + (start + low) * self.row_stride + self.row_offset
                count, length = high - low, self.row_bytes
                if length == self.row_stride:
                    count, length = 1, length * count
                yield Extent(self.entry.file, offset, length, self.row_stride, count)
            base += stop - start

    def _across(self, first: int, last: int) -> Extent:
        """Stored places [first, last) of every line."""
        unit = self.row_bytes // self.num_lines
        offset = self.entry.begin + self.base + self.row_offset + first * unit
        count, length = self.num_lines, (last - first) * unit
        if length == self.row_stride:
            count, length = 1, length * count
        return Extent(self.entry.file, offset, length, self.row_stride, count)


def source_of(entry: TensorEntry, shard: Shard) -> Source:
    """The piece of a tensor that fills one parameter, or one slot of a stacked one."""
    shape, ranges = entry.shape, shard.ranges
    if is_shared(shard.tensor):
        return replace(_rows(entry, shape or (1,), ranges or (((0, 1),),)), is_shared=True)
    if shard.tensor.is_transposed:
        (line,), places = ranges
        return _lines(entry, line, places, shape[1], tile=_tile(shard.tensor))
    if shard.tensor.param.endswith("A_log") and len(shape) > 1:  # a vector, stored by some with dimensions of one
        place = max(range(len(shape)), key=lambda d: shape[d])
        assert math.prod(shape) == shape[place], f"{entry.name}: {shape} is no vector"
        shape, ranges = (shape[place],), (ranges[place],)
    return _rows(entry, shape, ranges, tile=_tile(shard.tensor))


def is_shared(tensor: TensorSpec) -> bool:
    """Whether every row of a quantised matrix needs all of this piece: the scale of the whole, the order of columns."""
    return tensor.part == "g_idx" or (tensor.scheme is not None and math.prod(tensor.shape) == 1)


def _tile(tensor: TensorSpec) -> int:
    """Rows of the matrix that one stored row of a piece stands for."""
    if tensor.scheme is None:
        return 1
    scheme = SCHEMES[tensor.scheme]
    if scheme.is_transposed:  # zero points are packed along rows in both orders
        return 8 if tensor.part == "qzeros" else scheme.per_item[0] if tensor.part == "qweight" else 1
    return 1 if tensor.weights else scheme.unit(0, tensor.group_size)


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
            if _tile(tensor) > 1:
                raise LoadError(f"{tensor.name}: rows that take turns cannot share the scale of a tile")
            source = _rows(entry, (shape[0] // 2, 2, *shape[1:]), (pairs, ((0, 2),), *ranges[1:]), base)
            yield FusedPiece(tensor.param, twin, slot, source)
            continue
        params = (tensor.param, *tensor.also_fills)
        own = [ranges[0]] if len(params) == 1 else [(part,) for part in ranges[0]]
        for param, rows in zip(params, own, strict=True):
            yield FusedPiece(param, None, slot, _rows(entry, shape, (rows, *ranges[1:]), base, tile=_tile(tensor)))


def _transposed_pieces(entry: TensorEntry, shard: Shard, slot: int, base: int) -> Iterator[FusedPiece]:
    """The same of one matrix stored (columns, rows)."""
    tensor = shard.tensor
    (line,), places = shard.ranges[1:]

    def piece(param: str, place: tuple[int, int], twin: str | None = None) -> FusedPiece:
        pair = () if twin is None else (2,)
        return FusedPiece(param, twin, slot, _lines(entry, line, (place,), entry.shape[2], pair=pair, base=base))

    if tensor.is_interleaved:
        ((start, stop),), (twin,) = places, tensor.also_fills
        yield piece(tensor.param, (start // 2, stop // 2), twin)
        return
    for param, place in zip((tensor.param, *tensor.also_fills), places, strict=True):
        yield piece(param, place)


def _lines(
    entry: TensorEntry,
    line: tuple[int, int],
    places: Ranges,
    line_length: int,
    *,
    pair: tuple[int, ...] = (),
    base: int = 0,
    tile: int = 1,
) -> Source:
    """Lines [start, stop) of a matrix stored (columns, rows), and places in each of them."""
    first, last = line
    item = DTYPE_BITS[entry.dtype] // 8
    return Source(
        entry=entry,
        row_ranges=places,
        row_shape=(*pair, last - first),
        row_offset=first * line_length * item,
        row_bytes=(last - first) * item * math.prod(pair),
        row_stride=line_length * item,
        base=base,
        tile=tile,
        num_lines=last - first,
    )


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
