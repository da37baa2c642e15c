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

from workbench.base import LoadError, human
from workbench.checkpoint.checkpoint import Checkpoint
from workbench.loading.source import Extent, Source, source_of
from workbench.loading.transform import Transform, choose_transform
from workbench.nn.linear import MatrixStore
from workbench.placement import Layout, Shard, place
from workbench.placement.tiles import tile_unit
from workbench.spec import TensorSpec, draft_tensors, published_tensors

__all__ = ["Assignment", "Extent", "LoadPlan", "Source", "plan_load"]

SHOWN = 6  # names listed per kind of problem; the rest is counted
# Columns that one stored element stands for, where it is not one; and parts that hold none.
CODES = {("weight_packed", torch.uint8): 2, ("weight_packed", torch.int32): 8, ("blocks", torch.uint8): 2}
SCALES = ("weight_scale", "weight_scale_inv", "scales")
MANY_SEGMENTS = 20_000_000  # some 20 seconds of calls; a K3 rank under tp=16, ep=16 has two million


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """What fills one parameter (one slot of a stacked one): its sources by part, and what happens on the way.

    Where the rows of two parameters alternate in the file, one assignment fills both; `param` is then the first.

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
                yield from source.whole()
            yield from x.padding


def plan_load(checkpoint: Checkpoint, model: nn.Module, layout: Layout, rank: int) -> LoadPlan:
    """Plan of one rank, whose narrowed `model` lies on any device (meta is enough). Reads no tensor data.

    Raises LoadError that lists, by name, tensors that are missing, that nothing asks for, or that have another dtype or
    shape than the model needs, and parameters that nothing fills.
    """
    wanted = {tensor.name: tensor for tensor in published_tensors(checkpoint.spec)}
    problems = _Problems(checkpoint)
    drafts = {tensor.name for tensor in draft_tensors(checkpoint.spec)}
    for name in checkpoint.entries:
        if name not in wanted and name not in drafts:
            problems.add("no place in the model for", name)
    for tensor in wanted.values():
        problems.check_stored(tensor)
    problems.raise_if_any()

    coords = layout.coords(rank)
    pieces: dict[tuple[tuple[str, ...], int | None], list[_Piece]] = {}
    bytes_assigned = 0
    for tensor in wanted.values():
        if tensor.part == "weight_shape":  # repeats what the other parts say
            continue
        shard = place(checkpoint.spec, layout, coords, tensor)
        if shard is not None:
            for piece in _pieces(shard):
                pieces.setdefault((piece.params, piece.slot), []).append(piece)
            bytes_assigned += shard.num_bytes
    modules = dict(model.named_modules())
    assignments = []
    for (params, slot), own in pieces.items():
        assignment = _assign(checkpoint, modules, params, slot, own, problems)
        if assignment is not None:
            assignments.append(assignment)
    problems.check_filled(model, assignments)
    problems.raise_if_any()
    assignments.sort(key=lambda x: x.position)
    notes = [*_stray_notes(checkpoint), *_draft_notes(checkpoint, drafts), *_segment_notes(assignments)]
    return LoadPlan(rank=rank, assignments=tuple(assignments), bytes_assigned=bytes_assigned, notes=tuple(notes))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """One parameter's share of a shard: all of it, or one expert of a fused tensor, or one part of that.

    `params` are several where their rows alternate. `expert` counts as the file does, `part` the runs of rows.
    """

    shard: Shard
    params: tuple[str, ...]
    slot: int | None
    expert: int | None = None
    part: int | None = None


def _pieces(shard: Shard) -> Iterator[_Piece]:
    tensor = shard.tensor
    params = (shard.param, *tensor.also_fills)
    if tensor.num_stacked is None:
        yield _Piece(shard=shard, params=params, slot=shard.slot)
        return
    ((first, last),) = shard.ranges[0]
    for expert in range(first, last):
        slot = expert - first
        if tensor.is_interleaved or len(params) == 1:
            yield _Piece(shard=shard, params=params, slot=slot, expert=expert)
        else:
            for part, param in enumerate(params):
                yield _Piece(shard=shard, params=(param,), slot=slot, expert=expert, part=part)


def _assign(
    checkpoint: Checkpoint,
    modules: dict[str, nn.Module],
    params: tuple[str, ...],
    slot: int | None,
    pieces: list[_Piece],
    problems: _Problems,
) -> Assignment | None:
    param, tile = params[0], tile_unit(checkpoint.spec)
    sources: dict[str, Source] = {
        piece.shard.tensor.part: source_of(
            checkpoint.tensor(piece.shard.tensor.name), piece.shard, expert=piece.expert, part=piece.part, tile=tile
        )
        for piece in pieces
    }
    if len(sources) != len(pieces):
        problems.add("filled more than once", param)
        return None
    dtypes: dict[str, torch.dtype] = {part: source.dtype for part, source in sources.items()}
    transforms: list[Transform] = []
    local: tuple[int, ...] = ()
    for name in params:
        prefix, _, leaf = name.rpartition(".")
        module = modules.get(prefix)
        if isinstance(module, MatrixStore) and leaf == "weight":
            transform = choose_transform(dtypes, module.scheme, prefix, module.parts, tile=tile)
            local = module.logical_shape if slot is None else module.logical_shape[1:]
        elif isinstance(parameter := getattr(module, leaf, None), nn.Parameter):
            transform = choose_transform(dtypes, None, prefix, {leaf: parameter}, tile=tile)
            local = tuple(parameter.shape if slot is None else parameter.shape[1:])
        else:
            problems.add("the model has no parameter for", f"{pieces[0].shard.tensor.name} ({name})")
            return None
        if transform is None:
            problems.add("no way to turn what is stored into what the model holds", f"{name} from {sorted(sources)}")
            return None
        transforms.append(transform)
    transform = transforms[0].in_turns(transforms[1:]) if len(transforms) > 1 else transforms[0]
    padded = [p.shard for p in pieces if _stored_rows(checkpoint, p.shard.tensor) != _used_rows(p.shard.tensor)]
    num_columns = math.prod(local[1:])
    for part, source in sources.items():
        logical = math.prod(source.row_shape) // source.turns * CODES.get((part, source.dtype), 1)
        if not source.covers(local[0]) or (part not in SCALES and logical != num_columns):
            problems.add(
                "local shape differs", f"{param}: {source.stored_rows} rows of {source.row_shape} for {tuple(local)}"
            )
            return None
    return Assignment(
        param=param,
        slot=slot,
        sources=sources,
        transform=transform.trimmed() if padded else transform,
        num_rows=local[0],
        num_columns=num_columns * len(params),
        padding=tuple(_padding(checkpoint, shard) for shard in padded),
    )


def _padding(checkpoint: Checkpoint, shard: Shard) -> Extent:
    """Stored rows beyond those in use."""
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
    cut = [s for x in assignments for s in x.sources.values() if s.is_cut]
    segments = sum(source.stored_rows for source in cut)
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


def _draft_notes(checkpoint: Checkpoint, drafts: set[str]) -> Iterator[str]:
    held = [entry for name, entry in checkpoint.entries.items() if name in drafts]
    if held:
        size = human(sum(entry.num_bytes for entry in held), "B")
        yield (
            f"{len(held)} tensors ({size}) of multi-token-prediction layers are kept apart and not read, from "
            f"{held[0].name} on: the model is whole without them"
        )


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
