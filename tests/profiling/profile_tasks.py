"""What a rank does in the tests of profiling."""

from __future__ import annotations

import time

import torch

from workbench.parallel import make_context
from workbench.placement import Layout
from workbench.profiling.communication import CollectiveTime


def timed_reductions(late: int, seconds: float, count: int) -> list[CollectiveTime]:
    """Reductions that rank `late` enters `seconds` late, as the log of collectives tells of them."""
    ctx = make_context(Layout(tp=torch.distributed.get_world_size()))
    entered, times = [0.0], []
    ctx.tp.all_reduce(torch.ones(10))  # everybody is there before it counts
    ctx.log.listener = lambda _: entered.__setitem__(0, time.monotonic())
    ctx.log.finished = lambda record: times.append(
        CollectiveTime(
            name=record.name,
            group=record.group,
            ranks=record.ranks,
            place=len(times),
            num_bytes=record.num_bytes,
            entered_s=entered[0],
            left_s=time.monotonic(),
        )
    )
    for _ in range(count):
        if ctx.rank == late:
            time.sleep(seconds)
        ctx.tp.all_reduce(torch.ones(1000))
    ctx.close()
    return times
