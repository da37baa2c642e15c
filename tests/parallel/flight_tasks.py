"""What a rank does in the tests of the flight recorder: many steps, one of them with a planted fault."""

from __future__ import annotations

from pathlib import Path

import torch

from workbench.parallel import FlightRecorder, make_context
from workbench.placement import Layout


def steps_with_a_fault(folder: str, fault: str, skipped: int, num_steps: int) -> list[float]:
    """Per step an all-reduce, then an all-gather; rank 1 plays `fault` at step `skipped`. First number of each sum."""
    ctx = make_context(Layout(tp=torch.distributed.get_world_size()))
    recorder = FlightRecorder(Path(folder) / f"rank{ctx.rank}.flight", ctx.log)
    sums = []
    for step in range(num_steps):
        recorder.step = step
        is_struck = ctx.rank == 1 and step == skipped
        x = torch.full((3,), float(step + 1))
        if fault == "other operation" and is_struck:
            ctx.tp.broadcast(x, 0)
        elif not (fault == "skip" and is_struck):
            sums.append(float(ctx.tp.all_reduce(x)[0]))
        if fault == "leave" and is_struck:
            return sums
    ctx.close()
    return sums
