"""Whether one more copy of what a deployment holds has room beside it: each rank tells what it has and what is free."""

from __future__ import annotations

import contextlib
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from workbench.base import NoRoomError, human

if TYPE_CHECKING:
    from workbench.deployment.commands import RankCommands
    from workbench.deployment.handle import Deployment

__all__ = ["RankRoom", "check_room", "measure_room", "require_room"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRoom:
    """`needs` has bytes that a rank like this one takes, by place, and `free` what that place has now, None where
    nobody says. Places are the memory of a host and that of a device."""

    rank: int
    needs: Mapping[str, int]
    free: Mapping[str, int | None]


def check_room(deployment: Deployment, num_more: int) -> None:
    """Raises NoRoomError where `num_more` copies of this deployment have no room on its hosts and devices now."""
    require_room(cast(list[RankRoom], deployment.call(f"{__name__}:measure_room")), num_more)


def require_room(ranks: Sequence[RankRoom], num_more: int) -> None:
    """Raises NoRoomError, with the numbers of every place that is too small for `num_more` times these ranks."""
    needs: defaultdict[str, int] = defaultdict(int)
    free: dict[str, int] = {}
    for rank in ranks:
        for place, size in rank.needs.items():
            needs[place] += size
            if (now := rank.free.get(place)) is not None:
                free[place] = min(free.get(place, now), now)  # ranks looked one after another
    short = [place for place in needs if place in free and num_more * needs[place] > free[place]]
    if not short:
        return
    copies = "one more copy" if num_more == 1 else f"{num_more} more copies"
    raise NoRoomError(
        f"there is no room for {copies} of the model",
        found="; ".join(f"{place} has {human(free[place], 'B')} free" for place in short),
        expected="; ".join(
            f"{human(num_more * needs[place], 'B')} ({num_more} x {human(needs[place], 'B')})" for place in short
        ),
        next_step="Free memory there, or ask for fewer copies",
    )


def measure_room(commands: RankCommands) -> RankRoom:
    """Runs on a rank, between two steps.

    A host gives memory only when it is touched, so what the rank had right after loading and the whole of its caches
    count, not what it has by now; and so does the window that its load takes for a while.
    """
    import torch

    from workbench.cluster import host_device

    device, stats = commands.loaded.ctx.device, commands.loaded.stats
    cache = commands.runner.cache.num_bytes
    host = f"the memory of {socket.gethostname()}"
    here = host_device().memory_free
    on_host = commands.private_bytes + stats.window_bytes
    free: dict[str, int | None] = {host: None if here is None else int(here.value)}
    if device.type == "cpu":
        return RankRoom(rank=commands.rank, needs={host: on_host + cache}, free=free)
    place = f"{device} of {socket.gethostname()}"
    free[place] = None
    with contextlib.suppress(AttributeError, RuntimeError, NotImplementedError):  # not every backend tells
        free[place] = int(torch.accelerator.get_memory_info(device)[0])
    on_device = max(stats.resident_bytes + cache, torch.accelerator.max_memory_allocated(device))
    return RankRoom(rank=commands.rank, needs={host: on_host, place: on_device}, free=free)
