"""A rehearsal from end to end: ghost where there are no weights yet, audit, read plan, and one rank's load."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from workbench.base import CheckpointError, Quantity, WorkbenchError, human
from workbench.checkpoint import Checkpoint, audit, read_origin, write_ghost
from workbench.cluster import measure_disk_read
from workbench.loading import LoadProgress, load_in_pieces, prepare_load
from workbench.placement import Layout, check_layout
from workbench.rehearsal.read_plan import all_ranks_bytes, read_plan
from workbench.rehearsal.report import LoadFigures, RehearsalReport
from workbench.rehearsal.shares import StageShare, stage_shares
from workbench.spec import ModelSpec, read_spec

__all__ = ["rehearse"]

DISK_SAMPLE_BYTES = 256 << 20


def rehearse(
    path: Path | str,
    layout: Layout,
    *,
    rank: int = 0,
    precision: str = "mxfp4",
    index: Path | None = None,
    out: Path | str | None = None,
    keep: bool = False,
    plan_only: bool = False,
    ranks_per_host: int = 8,
    window_bytes: int = 64 << 20,
    measure_disk: bool = True,
    progress: Callable[[LoadProgress], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> RehearsalReport:
    """Rehearse the load of one rank of `layout`.

    `path`: a checkpoint folder, of weights or a ghost, or a folder or file with only a config; then a ghost is written
    to `out`, or to a folder that is removed afterwards. `index` gives the ghost its published names. The share is
    loaded piece by piece in bounded memory; with `keep` it is held whole, where this host can; with `plan_only` nothing
    is read, and the shares, ledgers and collectives of all ranks are planned instead. `ranks_per_host` only enters the
    estimate of the cluster's start.

    Findings of the audit end the rehearsal early and are in the report. Raises LayoutError for a layout that does not
    fit the model, LoadError for a share that cannot be loaded, CheckpointError where no ghost can be written.
    """
    began = time.perf_counter()
    tell = say or (lambda _: None)
    spec = read_spec(path)
    check_layout(spec, layout)
    layout.coords(rank)
    with _checkpoint_folder(Path(path), index, out, tell) as root:
        report = audit(root, deep=None if read_origin(root).is_ghost else False)
        tell(report.summary())
        plan = load = None
        shares: tuple[StageShare, ...] = ()
        if report.ok:
            checkpoint = Checkpoint.open(root)
            prepared = prepare_load(checkpoint, layout, rank, precision=precision, window_bytes=window_bytes)
            plan = read_plan(prepared, precision)
            tell(f"rank {rank} reads {human(plan.num_bytes, 'B')} in {plan.num_reads:,} calls")
        if report.ok and plan_only:
            shares = stage_shares(checkpoint, layout, precision=precision)
        elif report.ok:
            predicted = prepared.peak_bytes(keep=keep)
            done = load_in_pieces(prepared, keep=keep, progress=progress)
            load = LoadFigures(
                stats=done.stats,
                predicted_peak_bytes=predicted,
                kept=keep,
                ledger=done.ledger.summary(),
                pieces=done.pieces,
                kinds=_kinds(spec),
            )
        total = all_ranks_bytes(spec, layout)
        disk = _disk_rate(root) if measure_disk else None
        return RehearsalReport(
            root=str(root),
            origin=read_origin(root),
            layout=str(layout),
            num_ranks=layout.world_size,
            audit=report,
            plan=plan,
            load=load,
            all_ranks_bytes=total,
            shares=shares,
            estimates={} if plan is None else _estimates(plan.num_bytes, total, disk, load, layout, ranks_per_host),
            seconds=time.perf_counter() - began,
        )


@contextlib.contextmanager
def _checkpoint_folder(
    path: Path, index: Path | None, out: Path | str | None, tell: Callable[[str], None]
) -> Iterator[Path]:
    """The folder to rehearse with: `path` where files of tensors lie there, else a ghost of it."""
    if path.is_dir() and any(path.glob("*.safetensors")):
        if out is not None or index is not None:
            raise CheckpointError(
                "this folder holds files of tensors: no ghost is written",
                where=path,
                next_step="Leave out the index and the folder of a ghost, or give the config alone",
            )
        yield path
        return
    with contextlib.ExitStack() as stack:
        if out is None:
            out = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="workbench-ghost-"))) / "ghost"
        ghost = write_ghost(path, out, index=index)
        tell(
            f"ghost: {ghost.mark.num_tensors:,} tensors, {human(ghost.mark.tensor_bytes, 'B')} "
            f"on {human(ghost.disk_bytes, 'B')} of disk"
        )
        yield ghost.root


def _kinds(spec: ModelSpec) -> dict[str, str]:
    return {f"layers.{layer.layer_idx}": f"layer {layer.kind}" for layer in spec.layers}


def _disk_rate(root: Path) -> Quantity | None:
    """How fast the disk under `root` is read: holes are not on it, so a file is written there for this and removed."""
    try:
        with tempfile.TemporaryDirectory(dir=root.parent, prefix=".disk-sample-") as folder:
            with open(Path(folder) / "sample", "wb") as file:
                block = os.urandom(8 << 20)  # random: a file system that compresses must not flatter itself
                for _ in range(DISK_SAMPLE_BYTES // len(block)):
                    file.write(block)
                file.flush()
                os.fsync(file.fileno())
            measured = measure_disk_read(folder)
    except (OSError, WorkbenchError):
        return None
    source = f"{DISK_SAMPLE_BYTES >> 20} MiB written to {root.parent}, evicted and read, 1 thread"
    return Quantity(measured.value, measured.unit, measured.basis, source)


def _estimates(
    share_bytes: int,
    all_bytes: int,
    disk: Quantity | None,
    load: LoadFigures | None,
    layout: Layout,
    ranks_per_host: int,
) -> dict[str, Quantity]:
    """What loading the weights will take with disks like this one. Shares of one stage are equally large."""
    found: dict[str, Quantity] = {}
    share = Quantity(share_bytes, "B", "exact", "read plan")
    everything = Quantity(all_bytes, "B", "exact", "placement table, every rank")
    found["one rank reads"], found["all ranks read"] = share, everything
    if load is not None:
        rate = Quantity(load.stats.bytes_per_s, "B/s", "measured", "this rehearsal, one rank")
        found["rate of the loader here"] = rate
    if disk is not None:
        per_host = min(ranks_per_host, layout.world_size)
        found["rate of this disk"] = disk
        found["load of one rank alone on such a disk"] = _modelled(share, disk)
        found[f"start of the cluster, hosts of {per_host} with such a disk each"] = _modelled(share * per_host, disk)
        found["start of the cluster, one such disk for all"] = _modelled(everything, disk)
    return found


def _modelled(size: Quantity, rate: Quantity) -> Quantity:
    return Quantity((size / rate).value, "s", "modelled", "bytes over the measured rate of this disk, nothing cached")
