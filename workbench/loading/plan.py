"""Dry run: from headers alone, every stored tensor gets its destination, its transform and its bytes on this rank.

The whole checkpoint is held against the model before the first byte of data is read, and every rank checks all of it,
so that all ranks of a deployment refuse the same checkpoint for the same reasons.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

from workbench.base import LoadError
from workbench.checkpoint.checkpoint import Checkpoint
from workbench.checkpoint.names import as_stored
from workbench.loading.source import Extent, Source, fused_pieces, source_of
from workbench.loading.transform import StoredForm, Transform, choose_transform
from workbench.nn.linear import MatrixStore
from workbench.placement import Layout, place
from workbench.spec import SCHEMES, UNREAD_PARTS, TensorSpec, draft_tensors, published_tensors

__all__ = ["Assignment", "Extent", "LoadPlan", "Source", "piece_of", "plan_load"]

_PIECE = re.compile(r"layers\.\d+|\w+")
SHOWN = 6  # names listed per kind of problem; the rest is counted
MANY_SEGMENTS = 20_000_000  # some 20 seconds of calls; a K3 rank under tp=16, ep=16 has two million


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """What fills one parameter (one slot of a stacked one): its sources by part, and what happens on the way.

    `padding` are the extents of stored rows beyond those in use, which must be zero. Where rows of two parameters take
    turns in the files, one assignment fills both (`transform.twin_targets`).
    """

    param: str
    slot: int | None
    sources: Mapping[str, Source]
    transform: Transform
    num_rows: int
    num_columns: int
    padding: tuple[Extent, ...] = ()

    @property
    def piece(self) -> str:
        return piece_of(self.param)

    @property
    def position(self) -> tuple[str, int]:
        first = next(iter(self.sources.values()))
        return first.entry.file, first.entry.begin

    @property
    def source_row_bytes(self) -> int:
        return sum(source.row_bytes for source in self.sources.values() if not source.is_shared)

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
    found = checkpoint.entries
    wanted = {
        tensor.name: as_stored(found[tensor.name], tensor) if tensor.name in found else tensor
        for tensor in published_tensors(checkpoint.spec)
    }
    drafts = {tensor.name for tensor in draft_tensors(checkpoint.spec)}
    problems = _Problems(checkpoint)
    for name in checkpoint.entries:
        if name not in wanted and name not in drafts:
            problems.add("no place in the model for", name)
    for tensor in wanted.values():
        problems.check_stored(tensor)
    problems.raise_if_any()

    coords = layout.coords(rank)
    pieces: dict[tuple[str, int | None], _Pieces] = {}
    bytes_assigned = 0
    for tensor in wanted.values():
        if tensor.part == "weight_shape" or tensor.part in UNREAD_PARTS:  # the shape repeats what the others say
            continue
        shard = place(checkpoint.spec, layout, coords, tensor)
        if shard is None:
            continue
        bytes_assigned += shard.num_bytes
        entry = checkpoint.tensor(tensor.name)
        if tensor.num_stacked is None:
            own = pieces.setdefault((shard.tensor.param, shard.slot), _Pieces())
            own.add(tensor, source_of(entry, shard))
            continue
        for piece in fused_pieces(entry, shard):
            pieces.setdefault((piece.param, piece.slot), _Pieces(twin=piece.twin)).add(tensor, piece.source)
    problems.raise_if_any()
    modules = dict(model.named_modules())
    assignments = []
    for (param, slot), own in pieces.items():
        assignment = _assign(checkpoint, modules, param, slot, own, problems)
        if assignment is not None:
            assignments.append(assignment)
    problems.check_filled(model, assignments)
    problems.raise_if_any()
    assignments.sort(key=lambda x: x.position)
    notes = [*_stray_notes(checkpoint), *_draft_notes(checkpoint, drafts), *_segment_notes(assignments)]
    return LoadPlan(rank=rank, assignments=tuple(assignments), bytes_assigned=bytes_assigned, notes=tuple(notes))


def piece_of(param: str) -> str:
    """ "layers.7", "vision", "embed": the part of the model that a parameter belongs to."""
    match = _PIECE.match(param)
    assert match is not None, param
    return match[0]


@dataclass(slots=True)
class _Pieces:
    """Stored tensors of one parameter (one slot of a stacked one) with their sources; `twin` is filled by them too."""

    tensors: list[TensorSpec] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    twin: str | None = None

    def add(self, tensor: TensorSpec, source: Source) -> None:
        self.tensors.append(tensor)
        self.sources.append(source)

    @property
    def by_part(self) -> dict[str, Source]:
        """A bias is a plain vector, as a norm is."""
        names = ("weight" if tensor.part == "bias" else tensor.part for tensor in self.tensors)
        return dict(zip(names, self.sources, strict=True))


def _assign(
    checkpoint: Checkpoint,
    modules: dict[str, nn.Module],
    param: str,
    slot: int | None,
    pieces: _Pieces,
    problems: _Problems,
) -> Assignment | None:
    prefix, _, leaf = param.rpartition(".")
    module = modules.get(prefix)
    is_matrix = isinstance(module, MatrixStore) and leaf == "weight"
    if module is None or not (is_matrix or isinstance(getattr(module, leaf, None), nn.Parameter)):
        problems.add("the model has no parameter for", f"{pieces.tensors[0].name} ({param})")
        return None
    parts = pieces.by_part
    if len(parts) != len(pieces.tensors):
        problems.add("filled more than once", param)
        return None
    first = pieces.tensors[0]
    dtypes = {part: source.dtype for part, source in parts.items()}
    stored = StoredForm(dtypes=dtypes, scheme=first.scheme, group_size=first.group_size)
    if is_matrix:
        assert isinstance(module, MatrixStore)
        transform = choose_transform(stored, module.scheme, prefix, module.parts)
        local = module.logical_shape if slot is None else module.logical_shape[1:]
    else:
        parameter = getattr(module, leaf)
        transform = choose_transform(stored, None, prefix, {leaf: parameter})
        local = tuple(parameter.shape) if slot is None else tuple(parameter.shape[1:])
    if transform is None:
        problems.add("no way to turn what is stored into what the model holds", f"{param} from {sorted(parts)}")
        return None
    if pieces.twin is not None:
        transform = transform.with_twin(prefix, pieces.twin.rpartition(".")[0])
    padded = [x for x in pieces.tensors if x.used_rows is not None and _stored_rows(checkpoint, x) != x.used_rows]
    assignment = Assignment(
        param=param,
        slot=slot,
        sources=parts,
        transform=transform.trimmed() if padded else transform,
        num_rows=local[0],
        num_columns=math.prod(local[1:]) * (1 if pieces.twin is None else 2),
        padding=tuple(_padding(checkpoint, tensor) for tensor in padded),
    )
    for tensor, source in zip(pieces.tensors, pieces.sources, strict=True):
        if not _fits(tensor, source, assignment):
            problems.add(
                "local shape differs", f"{param}: {source.num_rows} rows of {source.row_shape} for {tuple(local)}"
            )
            return None
    return assignment


SCALES = ("weight_scale", "weight_scale_inv", "scales")  # fewer numbers than weights


def _fits(tensor: TensorSpec, source: Source, assignment: Assignment) -> bool:
    """Whether a piece has as many rows, and values hold as many weights, as the parameter on this rank."""
    if source.is_shared:
        return True
    if source.num_rows != -(-assignment.num_rows // source.tile):
        return False
    if tensor.scheme is None:
        return math.prod(source.row_shape) == assignment.num_columns
    if not tensor.weights:
        return True
    return math.prod(source.row_shape) * SCHEMES[tensor.scheme].per_item[1] == assignment.num_columns


def _padding(checkpoint: Checkpoint, tensor: TensorSpec) -> Extent:
    entry = checkpoint.tensor(tensor.name)
    row_bytes = entry.num_bytes // entry.shape[0]
    assert tensor.used_rows is not None
    begin = entry.begin + tensor.used_rows * row_bytes
    return Extent(entry.file, begin, entry.end - begin, entry.end - begin, 1)


def _stored_rows(checkpoint: Checkpoint, tensor: TensorSpec) -> int:
    return checkpoint.tensor(tensor.name).shape[0]


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


def _draft_notes(checkpoint: Checkpoint, drafts: set[str]) -> Iterator[str]:
    num = sum(name in drafts for name in checkpoint.entries)
    if num:
        yield f"{num} tensors of the multi-token-prediction layers are kept apart and not read"


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
        filled = {target for x in assignments for target in x.transform.all_targets}
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
