"""One rank's share loaded piece by piece, each let go before the next: a full load in the memory of its largest layer.

For rehearsals, and to look at every value of a share that this machine cannot hold. Reads, transforms, ledger and
checks are those of an ordinary load; only what is held at one time differs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.base import LoadError, host_memory, human
from workbench.checkpoint.checkpoint import Checkpoint
from workbench.loading.host_memory import HostMemory, return_freed_memory
from workbench.loading.ledger import Ledger
from workbench.loading.load import WINDOW_BYTES, LoadStats, place_notes, reader_of, tensors_of
from workbench.loading.plan import Assignment, LoadPlan, piece_of, plan_load
from workbench.loading.schedule import Window
from workbench.loading.stages import StageTimes
from workbench.loading.stream import ProgressCallback, Throttle, Writer, staging_slots, stream
from workbench.nn.model import Model
from workbench.parallel import allocate, build_stage
from workbench.placement import Layout

__all__ = ["Piece", "PiecewiseLoad", "PreparedLoad", "load_in_pieces", "prepare_load"]

HOST_SHARE = 0.9  # of the memory that is free now, used at most


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of the share that was loaded as one: a decoder layer, the embedding, the vision tower."""

    name: str
    num_params: int  # parameters of the model, a slot of a stacked one counting for itself
    bytes_read: int
    resident_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedLoad:
    """What stands before the first byte is read: an empty model on meta and the plan that fills it."""

    checkpoint: Checkpoint
    layout: Layout
    model: Model
    plan: LoadPlan
    window: Window
    window_bytes: int
    seconds: float

    @property
    def resident_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in tensors_of(self.model).values())

    def pieces(self) -> dict[str, LoadPlan]:
        """The plan cut by piece, in file order of their first bytes."""
        parts: dict[str, list[Assignment]] = {}
        for assignment in self.plan.assignments:
            parts.setdefault(assignment.piece, []).append(assignment)
        return {
            name: LoadPlan(rank=self.plan.rank, assignments=tuple(part), bytes_assigned=0)
            for name, part in parts.items()
        }

    def piece_bytes(self) -> dict[str, int]:
        """Bytes of the model's tensors by piece."""
        held: dict[str, int] = {}
        for name, tensor in tensors_of(self.model).items():
            held[piece_of(name)] = held.get(piece_of(name), 0) + tensor.nbytes
        return held

    def peak_bytes(self, *, keep: bool) -> int:
        """Host memory a load here will need: what is held at one time, and the staging window."""
        held = self.resident_bytes if keep else max(self.piece_bytes().values())
        return held + self.window_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class PiecewiseLoad:
    """Outcome of `load_in_pieces`; `model` is None unless everything was kept."""

    model: Model | None
    ledger: Ledger
    stats: LoadStats
    stages: StageTimes
    pieces: tuple[Piece, ...]


def prepare_load(
    checkpoint: Checkpoint,
    layout: Layout,
    rank: int,
    *,
    precision: str = "bf16",
    dtype: torch.dtype | None = None,
    window_bytes: int = WINDOW_BYTES,
) -> PreparedLoad:
    """The dry run of one rank. Raises LayoutError and LoadError as `plan_load` does."""
    began = time.perf_counter()
    model = build_stage(checkpoint.spec, layout, rank, precision=precision, dtype=dtype)
    return PreparedLoad(
        checkpoint=checkpoint,
        layout=layout,
        model=model,
        plan=plan_load(checkpoint, model, layout, rank),
        window=Window.of(window_bytes),
        window_bytes=window_bytes,
        seconds=time.perf_counter() - began,
    )


def load_in_pieces(
    prepared: PreparedLoad,
    *,
    keep: bool = False,
    check: bool = True,
    progress: ProgressCallback | None = None,
    device: torch.device | str = "cpu",
) -> PiecewiseLoad:
    """Load a prepared share. Without `keep` each piece is let go as soon as the ledger has seen it.

    Raises LoadError as `load_rank` does, and before anything is read where the host has no memory for what is held.
    """
    plan, model, device = prepared.plan, prepared.model, torch.device(device)
    if device.type == "cpu":
        _check_memory(prepared.peak_bytes(keep=keep), keep)
    reader = reader_of(prepared.checkpoint.root, plan, prepared.window, device)
    resident = prepared.resident_bytes
    stages = StageTimes(rank=plan.rank)
    memory = HostMemory()
    ledger = Ledger(model, rank=plan.rank, check=check, device=device, is_ghost=prepared.checkpoint.ghost is not None)
    ledger.warnings.extend([*plan.notes, *place_notes(prepared.checkpoint.root)])
    report = Throttle(progress, plan.rank, sum(extent.num_bytes for extent in plan.extents()), stages)
    empty = tensors_of(model)
    if keep:
        allocate(model, device)
    filled = tensors_of(model) if keep else {}
    pieces: list[Piece] = []
    slots = staging_slots(prepared.window)
    try:
        for name, part in prepared.pieces().items():
            wanted = list(dict.fromkeys(target for x in part.assignments for target in x.transform.all_targets))
            targets = {target: _tensor_for(target, filled, empty, device) for target in wanted}
            started, before = time.perf_counter(), reader.bytes_read
            stream(part, prepared.window, slots, reader, Writer(targets, ledger, device, stages), memory, report)
            pieces.append(
                Piece(
                    name=name,
                    num_params=len(part.assignments),
                    bytes_read=reader.bytes_read - before,
                    resident_bytes=sum(tensor.nbytes for tensor in targets.values()),
                    seconds=time.perf_counter() - started,
                )
            )
            del targets
            if not keep:
                return_freed_memory()
        reader.check_unchanged()
    finally:
        reader.close()
    ledger.close(name for x in plan.assignments for name in x.names)
    memory.sample()
    stages.finish()
    report.finish(reader.bytes_read)
    stats = LoadStats(
        bytes_read=reader.bytes_read,
        bytes_assigned=plan.bytes_assigned,
        bytes_read_through=reader.bytes_through,
        bytes_direct=reader.bytes_direct,
        resident_bytes=resident,
        window_bytes=prepared.window_bytes,
        peak_host_bytes=memory.growth,
        num_reads=reader.num_reads,
        seconds=stages.seconds,
        read_seconds=reader.seconds,
        plan_seconds=prepared.seconds,
    )
    return PiecewiseLoad(model=model if keep else None, ledger=ledger, stats=stats, stages=stages, pieces=tuple(pieces))


def _tensor_for(name: str, filled: dict[str, Tensor], empty: dict[str, Tensor], device: torch.device) -> Tensor:
    return filled[name] if name in filled else torch.empty(empty[name].shape, dtype=empty[name].dtype, device=device)


def _check_memory(needed: int, keep: bool) -> None:
    available = host_memory().available
    if available is not None and needed > HOST_SHARE * available:
        raise LoadError(
            "this host has no memory for the share" if keep else "this host has no memory for the largest piece",
            found=f"{human(available, 'B')} available",
            expected=f"{human(needed, 'B')} and a tenth to spare",
            next_step="Load it in pieces, without keeping them" if keep else "Use a larger tp or pp",
        )
