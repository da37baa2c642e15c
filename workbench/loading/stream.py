"""A plan carried out: read through two staging slots, transform, write, account."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workbench.base import LoadError
from workbench.loading.host_memory import HostMemory, return_freed_memory
from workbench.loading.ledger import Ledger, SourceRef
from workbench.loading.plan import SCALES, Assignment, LoadPlan
from workbench.loading.reader import ShardReader
from workbench.loading.schedule import Batch, Chunk, Window, schedule
from workbench.loading.stages import StageTimes

__all__ = ["LoadProgress", "ProgressCallback", "Throttle", "Writer", "staged_parts", "staging_slots", "stream"]

PROGRESS_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """`bytes_total` is what this rank will read; `tensor` is the last one that was written; `stages` are seconds so far
    by stage of the load."""

    rank: int
    bytes_read: int
    bytes_total: int
    seconds: float
    tensor: str
    stages: Mapping[str, float] = field(default_factory=dict)

    @property
    def fraction(self) -> float:
        return self.bytes_read / self.bytes_total if self.bytes_total else 1.0


ProgressCallback = Callable[[LoadProgress], None]


def staging_slots(window: Window) -> tuple[Tensor, Tensor]:
    """The two staging buffers of a load, taken once: buffers taken and freed piece by piece leave holes in the heap."""
    return torch.empty(window.slot, dtype=torch.uint8), torch.empty(window.slot, dtype=torch.uint8)


def stream(
    plan: LoadPlan,
    window: Window,
    slots: tuple[Tensor, Tensor],
    reader: ShardReader,
    writer: Writer,
    memory: HostMemory,
    report: Throttle,
) -> None:
    """Read batch k + 1 into one slot while batch k is written from the other. Raises LoadError as the reader does."""
    views = [slot.numpy().data for slot in slots]
    batches = schedule(plan, window)
    stages = writer.stages

    def fill(batch: Batch, view: memoryview) -> None:
        began = stages.now()
        reader.fill(batch, view)
        stages.add("read", began, batch.bytes_by_piece())

    with ThreadPoolExecutor(1, thread_name_prefix="read-shards") as pool:
        batch, turn = next(batches, None), 0
        pending = pool.submit(fill, batch, views[0]) if batch is not None else None
        while batch is not None and pending is not None:
            began = stages.now()
            pending.result()
            stages.add("wait", began, batch.bytes_by_piece())
            upcoming = next(batches, None)
            pending = pool.submit(fill, upcoming, views[1 - turn]) if upcoming is not None else None
            writer.write(batch, slots[turn])
            memory.sample()
            # Of temporaries that were let go, the C library keeps what lies between others, a different share in every
            # process: seen to double what a small window should hold.
            return_freed_memory()
            report(reader.bytes_read, batch.chunks[-1].assignment.names[0])
            batch, turn = upcoming, 1 - turn


class Writer:
    """Transforms staged rows and stores them in `targets`, by name; each write is announced to the ledger first."""

    def __init__(self, targets: Mapping[str, Tensor], ledger: Ledger, device: torch.device, stages: StageTimes) -> None:
        self.targets, self.ledger, self.device, self.stages = targets, ledger, device, stages

    @torch.no_grad()
    def write(self, batch: Batch, slot: Tensor) -> None:
        # One transfer per batch; on the CPU this is the slot itself, which the next read will overwrite, so nothing
        # below may keep a view of it.
        began = self.stages.now()
        staged = slot[: batch.used_bytes].to(self.device)
        self.stages.add("transfer", began, batch.bytes_by_piece())
        for chunk in batch.chunks:
            if chunk.is_padding:
                self._check_padding(chunk, staged)
            else:
                self._write_chunk(chunk, staged)

    def _write_chunk(self, chunk: Chunk, staged: Tensor) -> None:
        x, rows = chunk.assignment, (chunk.first, chunk.last)
        stages, piece = self.stages, x.piece
        at = stages.now()
        parts = staged_parts(chunk, staged)
        outputs = x.transform.apply(parts)
        at = stages.add("transform", at, {piece: chunk.num_bytes})
        for name, (output, values) in outputs.items():
            part = x.transform.all_targets[name]
            names = [part] if values is None and part in x.sources else list(x.sources)
            self.ledger.record(name, x.slot, rows, sources=_refs(x, names), transform=x.transform.name)
            target = self.targets[name] if x.slot is None else self.targets[name][x.slot]
            target = target[slice(*rows)]
            target.copy_(output.reshape(target.shape))
            at = stages.add("bind", at, {piece: target.nbytes})
            # Codes say little about the values they stand for; where those were at hand, they are what is checked.
            shows_values = values is not None and part in ("weight", "weight_packed")
            self.ledger.observe(name, x.slot, values if shows_values and values is not None else target)
            scale = next((parts[key] for key in SCALES if key in parts), None)
            if scale is not None and part != "weight_scale":
                self.ledger.observe_scale(name, x.slot, scale)
            at = stages.add("check", at, {piece: target.nbytes})

    def _check_padding(self, chunk: Chunk, staged: Tensor) -> None:
        at, extent = chunk.staged["weight"], chunk.extents["weight"]
        if staged[at : at + extent.num_bytes].any():
            source = chunk.assignment.sources["weight"]
            used = (extent.offset - source.entry.begin) // source.row_stride
            raise LoadError(
                f"{source.entry.name}: the rows beyond {used} that pad it are not zero",
                where=f"{extent.file}, offset {extent.offset}",
                found=f"{extent.num_bytes} bytes with values in them",
                expected="zeros, as padding is",
            )


def staged_parts(chunk: Chunk, staged: Tensor) -> dict[str, Tensor]:
    """The rows of a chunk as they were read, by part: views of `staged` wherever its bytes are aligned."""
    parts = {}
    for part, source in chunk.assignment.sources.items():
        at = chunk.staged[part]
        first, last = source.rows_for(chunk.first, chunk.last)
        raw = staged[at : at + (last - first) * source.row_bytes]
        if at % source.dtype.itemsize:  # a file may hold tensors at any byte
            raw = raw.clone()
        values = raw.view(source.dtype)
        if source.num_lines:  # stored (inputs, outputs): a line of the file is a column here
            values = values.view(source.num_lines, last - first, *source.row_shape[:-1]).movedim(0, -1)
        parts[part] = values.view(last - first, *source.row_shape) if not source.num_lines else values
    return parts


def _refs(x: Assignment, parts: list[str]) -> tuple[SourceRef, ...]:
    refs = []
    for part in parts:
        source = x.sources[part]
        first = next(source.extents(0, source.num_rows))
        refs.append(SourceRef(source.entry.name, source.entry.file, first.offset, source.num_bytes))
    return tuple(refs)


class Throttle:
    """Calls the progress callback at most ten times a second, and once at the end, by the clock of `stages`."""

    def __init__(self, callback: ProgressCallback | None, rank: int, total: int, stages: StageTimes) -> None:
        self.callback, self.rank, self.total, self.stages = callback, rank, total, stages
        self.last_s, self.tensor = -1.0, ""

    def __call__(self, bytes_read: int, tensor: str) -> None:
        self.tensor = tensor
        seconds = self.stages.seconds
        if self.callback is not None and (self.last_s < 0 or seconds - self.last_s >= PROGRESS_INTERVAL_S):
            self.last_s = seconds
            self._call(min(bytes_read, self.total), seconds)

    def finish(self, bytes_read: int) -> None:
        self._call(bytes_read, self.stages.seconds)

    def _call(self, bytes_read: int, seconds: float) -> None:
        if self.callback is not None:
            stages = self.stages.by_stage()
            self.callback(LoadProgress(self.rank, bytes_read, self.total, seconds, self.tensor, stages))
