"""The process groups of one rank, made from a layout; one process alone needs none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from workbench.base import LayoutError
from workbench.parallel.collectives import CollectiveLog, Group
from workbench.placement import Layout, RankCoords

__all__ = [
    "RankContext",
    "group_members",
    "join_processes",
    "layout_of",
    "make_context",
    "make_mesh",
    "single_context",
]

AXES = ("pp", "dp", "tp")
PURPOSES = ("pp", "dp", "tp", "experts", "expert_gather", "expert_replicas")


def group_members(layout: Layout, rank: int) -> dict[str, tuple[int, ...]]:
    """Ranks that `rank` talks to, by purpose; each includes `rank` itself and is ascending.

    pp               same dp and tp on every stage, in order
    dp               same stage and tp: replicas that see different tokens
    tp               same stage and dp: one replica
    experts          ranks whose partial expert results are summed: the tp group, or the whole expert group if wider
    expert_gather    same stage and tp, the neighbouring dp ranks that an expert group spans
    expert_replicas  ranks that hold the same pieces of the same experts
    """
    at = layout.coords(rank)
    first_dp = at.dp - at.dp % layout.expert_dp
    spanned = range(first_dp, first_dp + layout.expert_dp)
    return {
        "pp": tuple(layout.rank_at(pp=pp, dp=at.dp, tp=at.tp) for pp in range(layout.pp)),
        "dp": tuple(layout.rank_at(pp=at.pp, dp=dp, tp=at.tp) for dp in range(layout.dp)),
        "tp": tuple(layout.rank_at(pp=at.pp, dp=at.dp, tp=tp) for tp in range(layout.tp)),
        "experts": tuple(layout.rank_at(pp=at.pp, dp=dp, tp=tp) for dp in spanned for tp in range(layout.tp)),
        "expert_gather": tuple(layout.rank_at(pp=at.pp, dp=dp, tp=at.tp) for dp in spanned),
        "expert_replicas": tuple(
            layout.rank_at(pp=at.pp, dp=dp, tp=at.tp)
            for dp in range(at.dp % layout.expert_dp, layout.dp, layout.expert_dp)
        ),
    }


@dataclass(kw_only=True, eq=False)
class RankContext:
    """One rank's place in a layout and the groups it talks in. `close` ends the groups that were made for it."""

    layout: Layout
    coords: RankCoords
    device: torch.device
    pp: Group
    dp: Group
    tp: Group
    experts: Group
    expert_gather: Group
    expert_replicas: Group
    log: CollectiveLog
    mesh: DeviceMesh | None = None
    token_counts: tuple[int, ...] | None = None  # rows of each replica of `expert_gather` during one forward
    _owned: list[dist.ProcessGroup] = field(default_factory=list, repr=False)

    @property
    def rank(self) -> int:
        return self.coords.rank

    @property
    def is_first_stage(self) -> bool:
        return self.coords.pp == 0

    @property
    def is_last_stage(self) -> bool:
        return self.coords.pp == self.layout.pp - 1

    @contextmanager
    def tokens(self, count: int) -> Iterator[None]:
        """Within this block every expert layer sees `count` tokens of this replica.

        The replicas that an expert group spans tell each other their counts once here instead of once per layer, so
        all of them enter, also with no token. Costs nothing where no expert group spans replicas.
        """
        outer, self.token_counts = self.token_counts, self.expert_gather.row_counts(count, self.device)
        try:
            yield
        finally:
            self.token_counts = outer

    def close(self) -> None:
        """Destroy the process groups that were made for this context; the default group stays."""
        while self._owned:
            dist.destroy_process_group(self._owned.pop())

    def __str__(self) -> str:
        at = self.coords
        return f"rank {at.rank} of {self.layout.world_size} (pp{at.pp} dp{at.dp} tp{at.tp} ep{at.ep}) on {self.device}"


def join_processes(
    rank: int, world_size: int, *, init_method: str = "env://", device_type: str = "cpu", timeout_s: float = 600.0
) -> None:
    """Make the default process group with torch's backend for `device_type` (gloo for cpu); waits for the others."""
    dist.init_process_group(
        dist.get_default_backend_for_device(device_type),
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def single_context(device: torch.device | str = "cpu", layout: Layout | None = None) -> RankContext:
    """Context of a process that talks to nobody. Raises LayoutError for a layout of several ranks."""
    layout = layout or Layout()
    if layout.world_size != 1:
        raise LayoutError(
            f"layout {layout} needs {layout.world_size} ranks, and this process has no process group",
            next_step="Start the ranks with torchrun or Deployment.start, or use Layout()",
        )
    log = CollectiveLog()
    groups = {purpose: Group(purpose, log=log) for purpose in PURPOSES}
    return _assemble(layout, 0, torch.device(device), groups, log)


def make_mesh(layout: Layout, device_type: str = "cpu") -> DeviceMesh:
    """DeviceMesh of shape (pp, dp, tp) over the ranks of the default process group, which must number world_size."""
    _check_world(layout)
    return init_device_mesh(device_type, (layout.pp, layout.dp, layout.tp), mesh_dim_names=AXES)


def layout_of(mesh: DeviceMesh, layout: Layout | None = None) -> Layout:
    """Layout of a mesh whose dimensions are named pp, dp, tp in that order (any of them may be left out).

    `layout` adds what a mesh cannot say (ep, dispatch, stage cuts). Raises LayoutError where the two disagree.
    """
    names = mesh.mesh_dim_names or ()
    if not names or [axis for axis in AXES if axis in names] != list(names):
        raise LayoutError(f"mesh dimensions {names}", expected="names out of pp, dp, tp, in this order")
    ranks = mesh.mesh.flatten().tolist()
    if ranks != list(range(len(ranks))):
        raise LayoutError("a mesh counts its ranks in order", found=ranks, expected=list(range(len(ranks))))
    degrees = {axis: mesh.size(names.index(axis)) if axis in names else 1 for axis in AXES}
    if layout is None:
        return Layout(pp=degrees["pp"], dp=degrees["dp"], tp=degrees["tp"])
    if degrees != {axis: getattr(layout, axis) for axis in AXES}:
        raise LayoutError(f"mesh {degrees} and layout {layout} disagree")
    return layout


def make_context(
    layout: Layout, *, mesh: DeviceMesh | None = None, device: torch.device | str | None = None
) -> RankContext:
    """Context of this process in `layout`; every rank of the default process group calls it.

    Makes the mesh unless one is given, and the expert groups that a mesh has no dimension for. Raises LayoutError
    where the default process group does not have `layout.world_size` ranks.
    """
    if mesh is None and not dist.is_initialized():
        return single_context(device or "cpu", layout)
    _check_world(layout)
    owned: list[dist.ProcessGroup] = []
    if mesh is None:
        mesh = make_mesh(layout, torch.device(device or "cpu").type)
        owned += [group for group in mesh.get_all_groups() if group is not dist.group.WORLD]
    rank = dist.get_rank()
    members = [group_members(layout, r) for r in range(layout.world_size)]
    handles = {members[rank][axis]: mesh.get_group(axis) for axis in mesh.mesh_dim_names or ()}
    existing = {m[axis] for m in members for axis in mesh.mesh_dim_names or ()}
    for purpose in PURPOSES:
        # new_group is collective: every rank makes every group, also those it is not in, in one order.
        for ranks in dict.fromkeys(m[purpose] for m in members):
            if len(ranks) > 1 and ranks not in existing:
                existing.add(ranks)
                handle = dist.new_group(list(ranks))
                if rank in ranks:
                    handles[ranks] = handle
                    owned.append(handle)
    log = CollectiveLog()
    groups = {
        purpose: Group(purpose, ranks=ranks, rank=ranks.index(rank), handle=handles.get(ranks), log=log)
        for purpose, ranks in members[rank].items()
    }
    return _assemble(layout, rank, _device(mesh.device_type, device), groups, log, mesh, owned)


def _assemble(
    layout: Layout,
    rank: int,
    device: torch.device,
    groups: Mapping[str, Group],
    log: CollectiveLog,
    mesh: DeviceMesh | None = None,
    owned: Sequence[dist.ProcessGroup] = (),
) -> RankContext:
    return RankContext(
        layout=layout,
        coords=layout.coords(rank),
        device=device,
        pp=groups["pp"],
        dp=groups["dp"],
        tp=groups["tp"],
        experts=groups["experts"],
        expert_gather=groups["expert_gather"],
        expert_replicas=groups["expert_replicas"],
        log=log,
        mesh=mesh,
        _owned=list(owned),
    )


def _check_world(layout: Layout) -> None:
    if not dist.is_initialized():
        raise LayoutError(
            f"layout {layout} needs {layout.world_size} ranks, and this process has no process group",
            next_step="Call join_processes first, or start the ranks with torchrun",
        )
    if dist.get_world_size() != layout.world_size:
        raise LayoutError(
            f"layout {layout} has {layout.world_size} ranks", found=f"{dist.get_world_size()} in the process group"
        )


def _device(device_type: str, device: torch.device | str | None) -> torch.device:
    """The device of this rank: the one given, else the current accelerator where the mesh is on one."""
    if device is not None:
        return torch.device(device)
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.accelerator.current_device_index())
