"""Dry run: from headers alone, every stored tensor gets its destination, its transform and its bytes on this rank.

The whole checkpoint is held against the model before the first byte of data is read, and every rank checks all of it,
so that all ranks of a deployment refuse the same checkpoint for the same reasons.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from workbench.base import DTYPE_BITS, LoadError
from workbench.checkpoint.checkpoint import Checkpoint
from workbench.checkpoint.header import TensorEntry
from workbench.loading.transform import DTYPES, Transform, choose_transform
from workbench.nn.linear import MatrixStore
from workbench.placement import Layout, Shard, place
from workbench.spec import TensorSpec, published_tensors

__all__ = ["Assignment", "Extent", "LoadPlan", "Source", "plan_load"]

SHOWN = 6  # names listed per kind of problem; the rest is counted
MANY_SEGMENTS = 20_000_000  # some 20 seconds of calls; a K3 rank under tp=16, ep=16 has two million


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
    """

    entry: TensorEntry
    row_ranges: tuple[tuple[int, int], ...]
    row_shape: tuple[int, ...]  # local shape of one row
    row_offset: int
    row_bytes: int
    row_stride: int

    @property
    def num_rows(self) -> int:
        return sum(stop - start for start, stop in self.row_ranges)

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.entry.dtype]

    def extents(self, first: int, last: int) -> Iterator[Extent]:
        """Bytes of local rows [first, last), in file order; rows that are whole in the file make one segment."""
        base = 0
        for start, stop in self.row_ranges:
            low, high = max(first - base, 0), min(last - base, stop - start)
            if low < high:
                offset = self.entry.begin + (start + low) * self.row_stride + self.row_offset
                count, length = high - low, self.row_bytes
                if length == self.row_stride:
                    count, length = 1, length * count
                yield Extent(self.entry.file, offset, length, self.row_stride, count)
            base += stop - start


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """What fills one parameter (one slot of a stacked one): its sources by part, and what happens on the way.

    `padding` are the extents of stored rows beyond those in use, which must be zero.
    """

    param: str
    slot: int | None
    sources: Mapping[str, Source]
    transform: Transform
    num_rows: int
    num_columns: int
    padding: tuple[Extent, ...] = ()

    @property
    def position(self) -> tuple[str, int]:
        first = next(iter(self.sources.values()))
        return first.entry.file, first.entry.begin

    @property
    def source_row_bytes(self) -> int:
        return sum(source.row_bytes for source in self.sources.values())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(source.entry.name for source in self.sources.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadPlan:
    """Everything one rank reads, in file order. `bytes_assigned` is what the placement table gives this rank."""

    rank: int
    assignments: tuple[Assignment, ...]
    bytes_assigned: int
    notes: tuple[str, ...] = ()

    @property
    def num_tensors(self) -> int:
        return sum(len(x.sources) for x in self.assignments)

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(source.entry.file for x in self.assignments for source in x.sources.values()))

    def extents(self) -> Iterator[Extent]:
        """Every byte range of this rank."""
        for x in self.assignments:
            for source in x.sources.values():
                yield from source.extents(0, source.num_rows)
            yield from x.padding


def plan_load(checkpoint: Checkpoint, model: nn.Module, layout: Layout, rank: int) -> LoadPlan:
    """Plan of one rank, whose narrowed `model` lies on any device (meta is enough). Reads no tensor data.

    Raises LoadError that lists, by name, tensors that are missing, that nothing asks for, or that have another dtype or
    shape than the model needs, and parameters that nothing fills.
    """
    wanted = {tensor.name: tensor for tensor in published_tensors(checkpoint.spec)}
    problems = _Problems(checkpoint)
    for name in checkpoint.entries:
        if name not in wanted:
            problems.add("no place in the model for", name)
    for tensor in wanted.values():
        problems.check_stored(tensor)
    problems.raise_if_any()

    coords = layout.coords(rank)
    pieces: dict[tuple[str, int | None], list[Shard]] = {}
    bytes_assigned = 0
    for tensor in wanted.values():
        if tensor.part == "weight_shape":  # repeats what the other parts say
            continue
        shard = place(checkpoint.spec, layout, coords, tensor)
        if shard is not None:
            pieces.setdefault((tensor.param, shard.slot), []).append(shard)
            bytes_assigned += shard.num_bytes
    modules = dict(model.named_modules())
    assignments = []
    for (param, slot), shards in pieces.items():
        assignment = _assign(checkpoint, modules, param, slot, shards, problems)
        if assignment is not None:
            assignments.append(assignment)
    problems.check_filled(model, assignments)
    problems.raise_if_any()
    assignments.sort(key=lambda x: x.position)
    notes = [*_stray_notes(checkpoint), *_segment_notes(assignments)]
    return LoadPlan(rank=rank, assignments=tuple(assignments), bytes_assigned=bytes_assigned, notes=tuple(notes))


def _assign(
    checkpoint: Checkpoint,
    modules: dict[str, nn.Module],
    param: str,
    slot: int | None,
    shards: list[Shard],
    problems: _Problems,
) -> Assignment | None:
    prefix, _, leaf = param.rpartition(".")
    module = modules.get(prefix)
    if module is None or not (isinstance(module, MatrixStore) or isinstance(getattr(module, leaf, None), nn.Parameter)):
        problems.add("the model has no parameter for", f"{shards[0].tensor.name} ({param})")
        return None
    parts: dict[str, Source] = {shard.tensor.part: _source(checkpoint, shard) for shard in shards}
    if len(parts) != len(shards):
        problems.add("filled more than once", param)
        return None
    dtypes: dict[str, torch.dtype] = {part: source.dtype for part, source in parts.items()}
    if isinstance(module, MatrixStore):
        transform = choose_transform(dtypes, module.scheme, prefix, module.parts)
        local = module.logical_shape if slot is None else module.logical_shape[1:]
    else:
        parameter = getattr(module, leaf)
        transform = choose_transform(dtypes, None, prefix, {leaf: parameter})
        local = tuple(parameter.shape)
    if transform is None:
        problems.add("no way to turn what is stored into what the model holds", f"{param} from {sorted(parts)}")
        return None
    padded = [shard for shard in shards if _stored_rows(checkpoint, shard.tensor) != _used_rows(shard.tensor)]
    assignment = Assignment(
        param=param,
        slot=slot,
        sources=parts,
        transform=transform.trimmed() if padded else transform,
        num_rows=local[0],
        num_columns=math.prod(local[1:]),
        padding=tuple(_padding(checkpoint, shard) for shard in padded),
    )
    for part, source in parts.items():
        codes = {torch.uint8: 2, torch.int32: 8}.get(source.dtype, 1) if part == "weight_packed" else 1
        logical = math.prod(source.row_shape) * codes
        if source.num_rows != local[0] or (part != "weight_scale" and logical != assignment.num_columns):
            problems.add(
                "local shape differs", f"{param}: {source.num_rows} rows of {source.row_shape} for {tuple(local)}"
            )
            return None
    return assignment


def _source(checkpoint: Checkpoint, shard: Shard) -> Source:
    entry = checkpoint.tensor(shard.tensor.name)
    item = DTYPE_BITS[entry.dtype] // 8
    columns = shard.ranges[1] if len(shard.ranges) > 1 else ((0, 1),)  # a vector has rows of one element
    assert len(columns) == 1, f"{entry.name}: columns in several pieces"
    assert all(ranges == ((0, size),) for ranges, size in zip(shard.ranges[2:], entry.shape[2:], strict=True))
    start, stop = columns[0]
    unit = item * math.prod(entry.shape[2:])
    return Source(
        entry=entry,
        row_ranges=shard.ranges[0],
        row_shape=shard.shape[1:],
        row_offset=start * unit,
        row_bytes=(stop - start) * unit,
        row_stride=item * math.prod(entry.shape[1:]),
    )


def _padding(checkpoint: Checkpoint, shard: Shard) -> Extent:
    entry = checkpoint.tensor(shard.tensor.name)
    row_bytes = entry.num_bytes // entry.shape[0]
    begin = entry.begin + _used_rows(shard.tensor) * row_bytes
    return Extent(entry.file, begin, entry.end - begin, entry.end - begin, 1)


def _stored_rows(checkpoint: Checkpoint, tensor: TensorSpec) -> int:
    return checkpoint.tensor(tensor.name).shape[0]


def _used_rows(tensor: TensorSpec) -> int:
    return tensor.shape[0] if tensor.used_rows is None else tensor.used_rows


def _segment_notes(assignments: list[Assignment]) -> Iterator[str]:
    """A warning where columns are cut so finely that the number of reads, not their bytes, sets the loading time."""
    cut = [s for x in assignments for s in x.sources.values() if s.row_bytes < s.row_stride]
    segments = sum(source.num_rows for source in cut)
    if segments > MANY_SEGMENTS:
        mean = sum(source.num_bytes for source in cut) // segments
        yield f"column slices are read in {segments:,} segments of {mean} bytes on average; a larger ep would join them"


def _stray_notes(checkpoint: Checkpoint) -> Iterator[str]:
    """What a header holds and the index does not count: it is not read, and that is worth saying."""
    for file, header in checkpoint.headers.items():
        strays = [name for name in header.entries if checkpoint.entries.get(name) != header.entries[name]]
        if strays:
            shown = ", ".join(strays[:SHOWN]) + (", ..." if len(strays) > SHOWN else "")
            yield f"{file} holds {len(strays)} tensors that the index does not count there, not read: {shown}"


class _Problems:
    """Findings of a dry run by kind, raised together."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.found: dict[str, list[str]] = {}

    def add(self, kind: str, name: str) -> None:
        self.found.setdefault(kind, []).append(name)

    def check_stored(self, tensor: TensorSpec) -> None:
        entry = self.checkpoint.entries.get(tensor.name)
        if entry is None:
            self.add("missing", tensor.name)
            return
        if entry.dtype != tensor.dtype:
            self.add("wrong dtype", f"{tensor.name} is {entry.dtype} in {entry.file}, not {tensor.dtype}")
        shape, expected = entry.shape, tensor.shape
        if tensor.used_rows is not None and len(shape) == len(expected) and shape[0] >= tensor.used_rows:
            shape, expected = shape[1:], expected[1:]
        if shape != expected:
            self.add("wrong shape", f"{tensor.name} is {entry.shape} in {entry.file}, not {tensor.shape}")

    def check_filled(self, model: nn.Module, assignments: list[Assignment]) -> None:
        filled = {target for x in assignments for target in x.transform.targets}
        for name, _ in [*model.named_parameters(), *model.named_buffers()]:
            if name not in filled:
                self.add("nothing fills", name)

    def raise_if_any(self) -> None:
        if not self.found:
            return
        lines = []
        for kind, names in self.found.items():
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            lines.append(f"{kind} ({len(names)}): {', '.join(names[:SHOWN])}{more}")
        raise LoadError(
            "checkpoint and model do not fit, nothing was read: " + "; ".join(lines),
            where=self.checkpoint.root,
            next_step="Run `workbench audit` on the folder for the whole picture",
        )
