"""A plan carried out: read into place or through staging slots, transform, write, account."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workbench.base import LoadError
from workbench.loading.host_memory import HostMemory, return_freed_memory
from workbench.loading.ledger import Ledger, SourceRef, Sums, content_sums
from workbench.loading.plan import SCALES, Assignment, LoadPlan
from workbench.loading.reader import ShardReader
from workbench.loading.schedule import LONG, PAGE, Batch, Chunk, Window, schedule
from workbench.loading.stages import StageTimes

__all__ = ["LoadProgress", "ProgressCallback", "Throttle", "Writer", "staged_parts", "staging_slots", "stream"]

PROGRESS_INTERVAL_S = 0.1
SAMPLE_INTERVAL_S = 0.02


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


@dataclass(frozen=True, slots=True)
class Filled:
    """What reading left of one chunk: by part, rows that lie in their place in the model already, and their sums."""

    rows: Mapping[str, Tensor] = field(default_factory=dict)
    sums: Mapping[str, Sums] = field(default_factory=dict)


NOTHING = Filled()


def staging_slots(window: Window) -> tuple[Tensor, ...]:
    """The staging buffers of a load, taken once: buffers taken and freed piece by piece leave holes in the heap. Those
    that take long reads begin at a page."""
    shift = PAGE if window.slot > LONG else 0
    whole = [torch.empty(window.slot + shift, dtype=torch.uint8) for _ in range(window.num_slots)]
    return tuple(x[-x.data_ptr() % PAGE if shift else 0 :][: window.slot] for x in whole)


def stream(
    plan: LoadPlan,
    window: Window,
    slots: tuple[Tensor, ...],
    reader: ShardReader,
    writer: Writer,
    memory: HostMemory,
    report: Throttle,
) -> None:
    """Write batch k while those after it are read, each into a slot of its own. Raises LoadError as the reader does."""
    batches, stages, num_readers = schedule(plan, window), writer.stages, len(slots) - 1

    @torch.no_grad()
    def fill(batch: Batch, slot: Tensor) -> list[Filled]:
        began = stages.now()
        places = [writer.places(chunk) for chunk in batch.chunks]
        pairs = zip(batch.chunks, places, strict=True)
        direct = {chunk.staged[part]: _bytes_of(x) for chunk, rows in pairs for part, x in rows.items()}
        reader.fill(batch, slot.numpy().data, direct)
        sums = [{part: _sums(x) for part, x in rows.items()} if writer.ledger.check else {} for rows in places]
        stages.add("read", began, batch.bytes_by_piece(), num_readers)
        return [Filled(*each) for each in zip(places, sums, strict=True)]

    free, pending = deque(slots), deque[tuple[Batch, Tensor, Future[list[Filled]]]]()
    with ThreadPoolExecutor(num_readers, thread_name_prefix="read-shards") as pool:
        try:
            while True:
                while free and (batch := next(batches, None)) is not None:
                    slot = free.popleft()
                    pending.append((batch, slot, pool.submit(fill, batch, slot)))
                if not pending:
                    return
                batch, slot, future = pending.popleft()
                began = stages.now()
                filled = future.result()
                stages.add("wait", began, batch.bytes_by_piece())
                writer.write(batch, slot, filled)
                free.append(slot)
                memory.sample(at_most_every_s=SAMPLE_INTERVAL_S)
                if any(len(own.rows) < len(chunk.extents) for own, chunk in zip(filled, batch.chunks, strict=True)):
                    # Of temporaries that were let go, the C library keeps what lies between others, a different share
                    # in every process: seen to double what a small window should hold.
                    return_freed_memory()
                report(reader.bytes_read, batch.chunks[-1].assignment.names[0])
        finally:
            for _, _, future in pending:
                future.cancel()


class Writer:
    """Transforms staged rows and stores them in `targets`, by name; each write is announced to the ledger first."""

    def __init__(self, targets: Mapping[str, Tensor], ledger: Ledger, device: torch.device, stages: StageTimes) -> None:
        self.targets, self.ledger, self.device, self.stages = targets, ledger, device, stages

    def places(self, chunk: Chunk) -> dict[str, Tensor]:
        """By part, the rows of its target that bytes of the files fill as they are."""
        found: dict[str, Tensor] = {}
        x = chunk.assignment
        if self.device.type != "cpu" or chunk.is_padding:
            return found
        for name, part in x.transform.direct_targets.items():
            rows, source = self._rows(name, chunk), x.sources[part]
            is_same = rows.dtype == source.dtype and rows.nbytes == chunk.extents[part].num_bytes
            if is_same and rows.is_contiguous() and not source.num_lines:
                found[part] = rows
        return found

    @torch.no_grad()
    def write(self, batch: Batch, slot: Tensor, filled: Sequence[Filled]) -> None:
        # One transfer per batch; on the CPU this is the slot itself, which the next read will overwrite, so nothing
        # below may keep a view of it.
        began = self.stages.now()
        staged = slot[: batch.used_bytes].to(self.device)
        self.stages.add("transfer", began, batch.bytes_by_piece())
        for chunk, own in zip(batch.chunks, filled, strict=True):
            if chunk.is_padding:
                self._check_padding(chunk, staged)
            else:
                self._write_chunk(chunk, staged, own)

    def _rows(self, name: str, chunk: Chunk) -> Tensor:
        slot = chunk.assignment.slot
        target = self.targets[name] if slot is None else self.targets[name][slot]
        return target[chunk.first : chunk.last]

    def _write_chunk(self, chunk: Chunk, staged: Tensor, filled: Filled) -> None:
        x, rows = chunk.assignment, (chunk.first, chunk.last)
        stages, piece = self.stages, x.piece
        at = stages.now()
        parts = staged_parts(chunk, staged, filled.rows)
        outputs = x.transform.apply(parts)
        at = stages.add("transform", at, {piece: chunk.num_bytes})
        for name, (output, values) in outputs.items():
            part = x.transform.all_targets[name]
            names = [part] if values is None and part in x.sources else list(x.sources)
            self.ledger.record(name, x.slot, rows, sources=_refs(x, names), transform=x.transform.name)
            target = self._rows(name, chunk)
            if part not in filled.rows:
                target.copy_(output.reshape(target.shape))
            at = stages.add("bind", at, {piece: target.nbytes})
            # Codes say little about the values they stand for; where those were at hand, they are what is checked.
            shows_values = values is not None and part in ("weight", "weight_packed")
            seen = values if shows_values and values is not None else target
            self.ledger.observe(name, x.slot, seen, filled.sums.get(part))
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


def staged_parts(chunk: Chunk, staged: Tensor, placed: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The rows of a chunk as they were read, by part: views of `staged` wherever its bytes are aligned, and those in
    `placed`, which never lay there."""
    parts = {}
    for part, source in chunk.assignment.sources.items():
        if placed and part in placed:
            parts[part] = placed[part]
            continue
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


def _bytes_of(rows: Tensor) -> memoryview:
    return rows.flatten().view(torch.uint8).numpy().data


def _sums(rows: Tensor) -> Sums:
    square, zero_rows = content_sums(rows).tolist()
    return square, zero_rows


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
