"""Weights from a checkpoint folder onto one rank: build on meta, plan, read through a window, write, account."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from workbench.base import LoadError
from workbench.checkpoint.checkpoint import Checkpoint
from workbench.loading.ledger import Ledger, SourceRef
from workbench.loading.plan import Assignment, LoadPlan, plan_load
from workbench.loading.reader import ReadPolicy, ShardReader
from workbench.loading.schedule import Batch, Chunk, Window, schedule
from workbench.nn.model import Model
from workbench.parallel import RankContext, attach, build_stage, layout_of, make_context
from workbench.placement import Layout
from workbench.spec import ModelSpec

__all__ = ["LoadProgress", "LoadStats", "LoadedModel", "load_rank", "load_sharded_weights"]

WINDOW_BYTES = 64 << 20
PROGRESS_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """`bytes_total` is what this rank will read; `tensor` is the last one that was written."""

    rank: int
    bytes_read: int
    bytes_total: int
    seconds: float
    tensor: str

    @property
    def fraction(self) -> float:
        return self.bytes_read / self.bytes_total if self.bytes_total else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadStats:
    """What one load cost. Bytes and seconds are measured on this rank.

    `bytes_assigned` comes from the placement table, `bytes_read` from the read calls. `peak_host_bytes` is how far the
    process grew beyond its size when reading began, the weights themselves included where they lie in host memory;
    pages of program files, which come and go with the first use of an operator, are not counted.
    """

    bytes_read: int
    bytes_assigned: int
    bytes_read_through: int
    resident_bytes: int
    window_bytes: int
    peak_host_bytes: int
    num_reads: int
    seconds: float
    read_seconds: float
    plan_seconds: float

    @property
    def bytes_per_s(self) -> float:
        return self.bytes_read / self.seconds if self.seconds else 0.0

    @property
    def read_ratio(self) -> float:
        """Bytes read over bytes assigned; 1 where nothing but this rank's own bytes was read."""
        return self.bytes_read / self.bytes_assigned if self.bytes_assigned else 1.0

    def to_dict(self) -> dict[str, float]:
        return {**asdict(self), "bytes_per_s": self.bytes_per_s, "read_ratio": self.read_ratio}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """One rank's part of the model, filled and connected to its groups."""

    model: Model
    spec: ModelSpec
    layout: Layout
    ctx: RankContext
    ledger: Ledger
    stats: LoadStats


ProgressCallback = Callable[[LoadProgress], None]


def load_sharded_weights(
    model_path: Path | str,
    device_mesh: DeviceMesh | None = None,
    precision: str = "bf16",
    *,
    layout: Layout | None = None,
    dtype: torch.dtype | None = None,
    window_bytes: int = WINDOW_BYTES,
    progress: ProgressCallback | None = None,
    device: torch.device | str | None = None,
    check: bool = True,
) -> LoadedModel:
    """Load this rank's share of a checkpoint; every rank of the process group calls it.

    `device_mesh` has dimensions named out of pp, dp, tp; `layout` adds expert parallelism and stage cuts, or stands
    alone to have the mesh made. Without either, one process loads the whole model and needs no process group.
    `precision`: "fp32", "bf16", "fp8", "int8", "int4" or "mxfp4"; `dtype` is that of activations and plain weights.
    `device`: where the weights go; by default the mesh's device, else the accelerator if there is one, else the CPU.
    `window_bytes` bounds everything in host memory beyond the weights: staged bytes and temporaries of a transform.
    `check=False` leaves out content checks (norms, zeros); what is written where is accounted for either way.

    Reads no data unless names, shapes and dtypes of the whole checkpoint fit the model. Raises CheckpointError or
    ConfigError for files that make no sense, LoadError for a misfit, a short read or a failed check, LayoutError for a
    layout that the model or the process group cannot have.
    """
    checkpoint = Checkpoint.open(model_path)
    if device_mesh is not None:
        layout = layout_of(device_mesh, layout)
    layout = layout or Layout()
    if device is None:
        device = _default_device(device_mesh)
    ctx = make_context(layout, mesh=device_mesh, device=device)
    try:
        model, ledger, stats = load_rank(
            checkpoint,
            layout,
            ctx.rank,
            precision=precision,
            dtype=dtype,
            window_bytes=window_bytes,
            progress=progress,
            device=ctx.device,
            check=check,
        )
    except BaseException:
        ctx.close()
        raise
    attach(model, ctx)
    return LoadedModel(model=model, spec=checkpoint.spec, layout=layout, ctx=ctx, ledger=ledger, stats=stats)


def load_rank(
    checkpoint: Checkpoint,
    layout: Layout,
    rank: int,
    *,
    precision: str = "bf16",
    dtype: torch.dtype | None = None,
    window_bytes: int = WINDOW_BYTES,
    progress: ProgressCallback | None = None,
    device: torch.device | str = "cpu",
    check: bool = True,
    reader: ShardReader | None = None,
) -> tuple[Model, Ledger, LoadStats]:
    """The part of the model that `rank` of `layout` holds, filled but not connected to any group.

    Needs no process group, so one process can look at every rank's part in turn. Errors as `load_sharded_weights`.
    """
    began = time.perf_counter()
    model = build_stage(checkpoint.spec, layout, rank, precision=precision, dtype=dtype)
    plan = plan_load(checkpoint, model, layout, rank)
    window = Window.of(window_bytes)
    if reader is None:
        reader = ShardReader(checkpoint.root, rank=rank, scratch_bytes=window.scratch, policy=ReadPolicy())
    planned = time.perf_counter()
    memory = _HostMemory()
    model.to_empty(device=device)
    ledger = Ledger(model, rank=rank, check=check, device=device)
    ledger.warnings.extend(plan.notes)
    writer = _Writer(model, ledger, torch.device(device))
    report = _Throttle(progress, rank, sum(extent.num_bytes for extent in plan.extents()))
    try:
        _stream(plan, window, reader, writer, memory, report)
    finally:
        reader.close()
    ledger.close(name for x in plan.assignments for name in x.names)
    memory.sample()
    seconds = time.perf_counter() - planned
    report.finish(reader.bytes_read, seconds)
    stats = LoadStats(
        bytes_read=reader.bytes_read,
        bytes_assigned=plan.bytes_assigned,
        bytes_read_through=reader.bytes_through,
        resident_bytes=sum(x.nbytes for x in [*model.parameters(), *model.buffers()]),
        window_bytes=window_bytes,
        peak_host_bytes=memory.growth,
        num_reads=reader.num_reads,
        seconds=seconds,
        read_seconds=reader.seconds,
        plan_seconds=planned - began,
    )
    return model, ledger, stats


def _stream(
    plan: LoadPlan, window: Window, reader: ShardReader, writer: _Writer, memory: _HostMemory, report: _Throttle
) -> None:
    """Read batch k + 1 into one slot while batch k is written from the other."""
    slots = [torch.empty(window.slot, dtype=torch.uint8) for _ in range(2)]
    views = [slot.numpy().data for slot in slots]
    started = time.perf_counter()
    batches = schedule(plan, window)
    with ThreadPoolExecutor(1, thread_name_prefix="read-shards") as pool:
        batch, turn = next(batches, None), 0
        pending = pool.submit(reader.fill, batch, views[0]) if batch is not None else None
        while batch is not None and pending is not None:
            pending.result()
            upcoming = next(batches, None)
            pending = pool.submit(reader.fill, upcoming, views[1 - turn]) if upcoming is not None else None
            writer.write(batch, slots[turn])
            memory.sample()
            report(reader.bytes_read, time.perf_counter() - started, batch.chunks[-1].assignment.names[0])
            batch, turn = upcoming, 1 - turn


class _Writer:
    """Transforms staged rows and stores them in the model, each write announced to the ledger first."""

    def __init__(self, model: Model, ledger: Ledger, device: torch.device) -> None:
        self.targets: dict[str, Tensor] = dict([*model.named_parameters(), *model.named_buffers()])
        self.ledger, self.device = ledger, device

    @torch.no_grad()
    def write(self, batch: Batch, slot: Tensor) -> None:
        # One transfer per batch; on the CPU this is the slot itself, which the next read will overwrite, so nothing
        # below may keep a view of it.
        staged = slot[: batch.used_bytes].to(self.device)
        for chunk in batch.chunks:
            if chunk.is_padding:
                self._check_padding(chunk, staged)
            else:
                self._write_chunk(chunk, staged)

    def _write_chunk(self, chunk: Chunk, staged: Tensor) -> None:
        x, rows = chunk.assignment, (chunk.first, chunk.last)
        parts = {part: self._view(chunk, part, staged) for part in x.sources}
        outputs, values = x.transform.apply(parts)
        for name, output in outputs.items():
            part = x.transform.targets[name]
            names = [part] if values is None and part in x.sources else list(x.sources)
            self.ledger.record(name, x.slot, rows, sources=_refs(x, names), transform=x.transform.name)
            target = self.targets[name] if x.slot is None else self.targets[name][x.slot]
            target = target[slice(*rows)]
            target.copy_(output.reshape(target.shape))
            # Codes say little about the values they stand for; where those were at hand, they are what is checked.
            shows_values = values is not None and part in ("weight", "weight_packed")
            self.ledger.observe(name, x.slot, values if shows_values and values is not None else target)
            if "weight_scale" in parts and part != "weight_scale":
                self.ledger.observe_scale(name, x.slot, parts["weight_scale"])

    def _view(self, chunk: Chunk, part: str, staged: Tensor) -> Tensor:
        source, at = chunk.assignment.sources[part], chunk.staged[part]
        num_rows = chunk.last - chunk.first
        raw = staged[at : at + num_rows * source.row_bytes]
        if at % source.dtype.itemsize:  # a file may hold tensors at any byte
            raw = raw.clone()
        return raw.view(source.dtype).view(num_rows, *source.row_shape)

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


def _refs(x: Assignment, parts: list[str]) -> tuple[SourceRef, ...]:
    refs = []
    for part in parts:
        source = x.sources[part]
        first = next(source.extents(0, source.num_rows))
        refs.append(SourceRef(source.entry.name, source.entry.file, first.offset, source.num_bytes))
    return tuple(refs)


class _Throttle:
    """Calls the progress callback at most ten times a second, and once at the end."""

    def __init__(self, callback: ProgressCallback | None, rank: int, total: int) -> None:
        self.callback, self.rank, self.total = callback, rank, total
        self.last_s, self.tensor = -1.0, ""

    def __call__(self, bytes_read: int, seconds: float, tensor: str) -> None:
        self.tensor = tensor
        if self.callback is not None and (self.last_s < 0 or seconds - self.last_s >= PROGRESS_INTERVAL_S):
            self.last_s = seconds
            self.callback(LoadProgress(self.rank, min(bytes_read, self.total), self.total, seconds, tensor))

    def finish(self, bytes_read: int, seconds: float) -> None:
        if self.callback is not None:
            self.callback(LoadProgress(self.rank, bytes_read, self.total, seconds, self.tensor))


class _HostMemory:
    """Growth of this process over its size now: by samples, or exactly where the kernel's own peak was raised."""

    def __init__(self) -> None:
        self.before, self.peak_before = _private_bytes()[0], _peak_bytes()
        self.highest = self.before

    def sample(self) -> None:
        self.highest = max(self.highest, _private_bytes()[0])

    @property
    def growth(self) -> int:
        peak = _peak_bytes()
        if peak > self.peak_before:
            self.highest = max(self.highest, peak - _private_bytes()[1])
        return self.highest - self.before


def _private_bytes() -> tuple[int, int]:
    """Resident bytes of this process without those of mapped files, and those of mapped files."""
    try:
        with open("/proc/self/statm") as file:
            _, resident, shared, *_ = (int(pages) * resource.getpagesize() for pages in file.read().split())
    except OSError:  # not Linux: only the peak is known
        return _peak_bytes(), 0
    return resident - shared, shared


def _peak_bytes() -> int:
    """Largest resident size so far. getrusage alone may tell that of the parent process, where that was larger."""
    try:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _default_device(mesh: DeviceMesh | None) -> torch.device | None:
    """Where weights go unless told; None where the mesh says so. Ranks that talk over the CPU's backend stay on it."""
    if mesh is not None:
        return None
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    is_cpu_group = dist.is_initialized() and dist.get_backend() == dist.get_default_backend_for_device("cpu")
    if accelerator is None or is_cpu_group:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
