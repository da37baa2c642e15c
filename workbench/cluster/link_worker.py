"""One rank of a link measurement: `python -m workbench.cluster.link_worker`, told on standard input what to do next.

The first line says who it is ({"rank", "world_size", "device", "init_method", "timeout_s"}), each further line is one
step for `link_operations.run_step`, given to every rank; ranks outside the step's group only help to make the group. It
answers on standard output with one line per event, led by MARK: "start", "enter" and "joined" for the group, then for
each step "start", "enter" (the operation comes next) and "done".
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta

from workbench.cluster.child import MARK

__all__ = ["main"]


def main() -> int:
    who = json.loads(sys.stdin.readline())
    _say({"event": "start", "step": None})
    import torch
    import torch.distributed as dist

    from workbench.cluster.link_operations import run_step

    device = torch.device(who["device"])
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
    _say({"event": "enter", "step": None})
    dist.init_process_group(
        dist.get_default_backend_for_device(device.type),
        init_method=who["init_method"],
        rank=who["rank"],
        world_size=who["world_size"],
        timeout=timedelta(seconds=who["timeout_s"]),
    )
    # With some backends the group is only a promise until the first operation; this one tells.
    ready = torch.ones(1, device=device)
    dist.all_reduce(ready)
    if int(ready.item()) != who["world_size"]:
        raise ArithmeticError(f"{int(ready.item())} ranks counted, expected {who['world_size']}")
    _say({"event": "joined", "backend": dist.get_backend()})
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for line in sys.stdin:
        step = json.loads(line)
        _say({"event": "start", "step": step["step"]})
        done: dict[str, object] = {"event": "done", "step": step["step"], "error": ""}
        ranks = tuple(step["ranks"])
        try:
            if ranks not in groups:
                groups[ranks] = dist.new_group(list(ranks))
            if who["rank"] in ranks:
                entered = {"event": "enter", "step": step["step"]}
                done |= run_step(step, groups[ranks], device, lambda event=entered: _say(event))  # type: ignore[misc]
        except Exception as caught:  # the backend's answer, whatever it is, is the result
            done["error"] = f"{type(caught).__name__}: {caught}"
        _say(done)
    return 0


def _say(event: dict[str, object]) -> None:
    print(MARK + json.dumps(event), flush=True)


if __name__ == "__main__":
    sys.exit(main())
