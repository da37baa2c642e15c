"""One rank of two under torchrun: steps of a pause and a reduction, timed as the profiler times collectives.

python shaped_steps.py FOLDER STEPS PAUSE_S NUM_BYTES LATE_S      rank 1 enters LATE_S later; writes FOLDER/rank-N.json
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from workbench.parallel import make_context
from workbench.placement import Layout
from workbench.profiling.communication import CollectiveTime


def main(folder: Path, steps: int, pause_s: float, num_bytes: int, late_s: float) -> None:
    dist.init_process_group("gloo")
    ctx = make_context(Layout(tp=2))
    data = torch.ones(num_bytes // 4)
    for _ in range(2):
        ctx.tp.all_reduce(data)  # connections are opened by their first use
    entered, times = [0.0], []
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
    began = time.monotonic()
    for _ in range(steps):
        time.sleep(pause_s + (late_s if ctx.rank == 1 else 0.0))
        ctx.tp.all_reduce(data)
    seconds = time.monotonic() - began
    record = {"seconds": seconds, "collectives": [asdict(each) for each in times]}
    (folder / f"rank-{ctx.rank}.json").write_text(json.dumps(record))
    ctx.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
