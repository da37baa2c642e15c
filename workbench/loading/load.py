"""Weights from a checkpoint folder onto one rank: build on meta, plan, read through a window, write, account."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from workbench.checkpoint.checkpoint import Checkpoint
from workbench.loading.expert_source import ExpertMemory, page_experts
from workbench.loading.host_memory import HostMemory
from workbench.loading.ledger import Ledger
from workbench.loading.plan import LoadPlan, plan_load
from workbench.loading.reader import ReadPolicy, ShardReader
from workbench.loading.schedule import Window
from workbench.loading.stages import StageTimes
from workbench.loading.strategy import choose_strategy, file_system_of, is_network
from workbench.loading.stream import LoadProgress, ProgressCallback, Throttle, Writer, staging_slots, stream
from workbench.nn.model import Model
from workbench.parallel import RankContext, allocate, attach, build_stage, layout_of, make_context
from workbench.placement import Layout
from workbench.spec import ModelSpec, require_runnable

__all__ = ["LoadProgress", "LoadStats", "LoadedModel", "load_rank", "load_sharded_weights"]

WINDOW_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadStats:
    """What one load cost. Bytes and seconds are measured on this rank.

    `bytes_assigned` comes from the placement table, `bytes_read` from the read calls; `bytes_direct` of them went past
    the page cache. `peak_host_bytes` is how far the
    process grew beyond its size when reading began, the weights themselves included where they lie in host memory;
    pages of program files, which come and go with the first use of an operator, are not counted.
    """

    bytes_read: int
    bytes_assigned: int
    bytes_read_through: int
    bytes_direct: int
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
    stages: StageTimes


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
    expert_memory: ExpertMemory | None = None,
) -> LoadedModel:
    """Load this rank's share of a checkpoint; every rank of the process group calls it.

    `device_mesh` has dimensions named out of pp, dp, tp; `layout` adds expert parallelism and stage cuts, or stands
    alone to have the mesh made. Without either, one process loads the whole model and needs no process group.
    `precision`: "fp32", "bf16", "fp8", "int8", "int4" or "mxfp4"; `dtype` is that of activations and plain weights.
    `device`: where the weights go; by default the mesh's device, else the accelerator if there is one, else the CPU.
    `window_bytes` bounds everything in host memory beyond the weights: staged bytes and temporaries of a transform.
    `check=False` leaves out content checks (norms, zeros); what is written where is accounted for either way.
    `expert_memory`: hold only so much of the routed experts and fetch the rest when they are used (see
    `nn.expert_pool`); they are then no part of the ledger, and a second window of host memory is taken.

    A ghost (see `workbench.checkpoint`) is loaded like weights: its zeros are expected, its ledger says what it is, and
    a value that is not zero is an error.

    Reads no data unless names, shapes and dtypes of the whole checkpoint fit the model. Raises CheckpointError or
    ConfigError for files that make no sense, LoadError for a misfit, a short read or a failed check, LayoutError for a
    layout that the model or the process group cannot have, UnsupportedModelError for a model with blocks not computed
    here.
    """
    checkpoint = Checkpoint.open(model_path)
    require_runnable(checkpoint.spec)
    if device_mesh is not None:
        layout = layout_of(device_mesh, layout)
    layout = layout or Layout()
    if device is None:
        device = _default_device(device_mesh)
    ctx = make_context(layout, mesh=device_mesh, device=device)
    stages = StageTimes(rank=ctx.rank)
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
            expert_memory=expert_memory,
            stages=stages,
        )
    except BaseException:
        ctx.close()
        raise
    attach(model, ctx)
    return LoadedModel(
        model=model, spec=checkpoint.spec, layout=layout, ctx=ctx, ledger=ledger, stats=stats, stages=stages
    )


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
    expert_memory: ExpertMemory | None = None,
    stages: StageTimes | None = None,
) -> tuple[Model, Ledger, LoadStats]:
    """The part of the model that `rank` of `layout` holds, filled but not connected to any group.

    Needs no process group, so one process can look at every rank's part in turn. `stages` is filled with the times of
    the load, which begin once it is planned. Errors as `load_sharded_weights`.
    """
    began = time.perf_counter()
    model = build_stage(checkpoint.spec, layout, rank, precision=precision, dtype=dtype)
    plan, pool = plan_load(checkpoint, model, layout, rank), None
    if expert_memory is not None:
        plan, pool = page_experts(
            checkpoint.root, model, plan, memory=expert_memory, window_bytes=window_bytes, device=torch.device(device)
        )
    window = Window.of(window_bytes)
    if reader is None:
        reader = reader_of(checkpoint.root, plan, window, device)
    planned = time.perf_counter()
    stages = StageTimes(rank=rank) if stages is None else stages
    stages.start()
    memory = HostMemory()
    allocate(model, device)
    ledger = Ledger(model, rank=rank, check=check, device=device, is_ghost=checkpoint.ghost is not None)
    ledger.warnings.extend([*plan.notes, *place_notes(checkpoint.root)])
    writer = Writer(tensors_of(model), ledger, torch.device(device), stages)
    report = Throttle(progress, rank, sum(extent.num_bytes for extent in plan.extents()), stages)
    try:
        stream(plan, window, staging_slots(window), reader, writer, memory, report)
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
        resident_bytes=sum(x.nbytes for x in tensors_of(model).values()) + (pool.num_bytes if pool else 0),
        window_bytes=window_bytes,
        peak_host_bytes=memory.growth,
        num_reads=reader.num_reads,
        seconds=stages.seconds,
        read_seconds=reader.seconds,
        plan_seconds=planned - began,
    )
    return model, ledger, stats


def tensors_of(model: Model) -> dict[str, Tensor]:
    """Everything a load fills, by name."""
    return dict([*model.named_parameters(), *model.named_buffers()])


def reader_of(root: Path, plan: LoadPlan, window: Window, device: torch.device | str) -> ShardReader:
    """A reader for the bytes of a plan that go to `device`, with as many threads as the window has room for."""
    return ShardReader(
        root,
        rank=plan.rank,
        scratch_bytes=window.scratch,
        policy=ReadPolicy(),
        num_threads=window.num_readers,
        strategy=choose_strategy(root, plan.extents(), is_held_on_host=torch.device(device).type == "cpu"),
    )


def place_notes(root: Path) -> list[str]:
    """What the folder lies on, where that is another machine's."""
    file_system = file_system_of(root)
    if not is_network(file_system):
        return []
    return [f"{root} lies on {file_system}, which another machine serves: every rank's reads cross the network"]


def _default_device(mesh: DeviceMesh | None) -> torch.device | None:
    """Where weights go unless told; None where the mesh says so. Ranks that talk over the CPU's backend stay on it."""
    if mesh is not None:
        return None
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    is_cpu_group = dist.is_initialized() and dist.get_backend() == dist.get_default_backend_for_device("cpu")
    if accelerator is None or is_cpu_group:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
