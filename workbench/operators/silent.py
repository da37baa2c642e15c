"""One rank of any layout without the others: groups whose collectives are counted and move nothing.

The groups are those of `parallel`, with a process group behind them that answers at once. Tensors on the meta device
have no contents to exchange. Index tables, which are kept on the CPU with their values, get the answer of ranks that
hold the same: a gather repeats the own piece, and row counts of an all-to-all come from the routing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from workbench.parallel.collectives import CollectiveLog, Group
from workbench.parallel.mesh import RankContext, group_members
from workbench.placement import Layout

__all__ = ["silent_context"]

# What this rank sends to each member -> what it receives from each
Answer = Callable[[Tensor], Tensor]


class _Done:
    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _SilentProcessGroup(dist.ProcessGroup):
    """Takes part in every collective of `torch.distributed` as if all members had the same values as this one.

    Two operations have two names: torch 2.13 calls them by new ones.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stub leaves this constructor out
        self.exchange_counts: Answer | None = None

    def allreduce(self, *_: Any, **__: Any) -> Any:
        return _Done()

    broadcast = send = recv = allreduce

    def all_gather_single(self, *tensors: Any, **_: Any) -> Any:
        out, x, *_options = tensors
        if out.device.type != "meta":
            with _disable_current_modes():
                out.view(self.size(), -1).copy_(x.view(1, -1))
        return _Done()

    def all_to_all_single(self, *tensors: Any, **_: Any) -> Any:
        out, x, *_options = tensors
        if out.device.type != "meta":
            with _disable_current_modes():
                out.copy_(x if self.exchange_counts is None else self.exchange_counts(x))
        return _Done()

    _allgather_base, alltoall_base = all_gather_single, all_to_all_single


class _SilentGroup(Group):
    def row_counts(self, count: int, device: torch.device) -> tuple[int, ...]:
        # Counts decide shapes, so they stay where values are.
        return super().row_counts(count, torch.device("cpu"))

    # torch.distributed looks the neighbour up in a table of groups in which a silent one does not stand.
    def send(self, x: Tensor, to: int) -> None:
        with self.log.record("send", self, x.contiguous()):
            pass

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, source: int) -> Tensor:
        out = torch.empty(tuple(shape), dtype=dtype, device=device)
        with self.log.record("receive", self, out):
            pass
        return out


def silent_context(layout: Layout, rank: int, *, exchange_counts: Answer | None = None) -> RankContext:
    """Context of one rank on the meta device. `exchange_counts` answers the all-to-all of row counts among experts.

    Raises LayoutError for a rank outside the layout.
    """
    log = CollectiveLog()
    groups: dict[str, Any] = {}
    for purpose, ranks in group_members(layout, rank).items():
        place = ranks.index(rank)
        handle = _SilentProcessGroup(place, len(ranks)) if len(ranks) > 1 else None
        if handle is not None and purpose == "experts":
            handle.exchange_counts = exchange_counts
        groups[purpose] = _SilentGroup(purpose, ranks=ranks, rank=place, handle=handle, log=log)
    coords, device = layout.coords(rank), torch.device("meta")
    return RankContext(layout=layout, coords=coords, device=device, log=log, mesh=None, token_counts=None, **groups)
