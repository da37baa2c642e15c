"""Run alone: load one rank's part of a folder and print what the kernel says of this process's memory, as JSON.

python memory_probe.py FOLDER PRECISION WINDOW_BYTES LAYOUT_TP LAYOUT_EP HOW

HOW: stream, drain, limit or limit-drain; the kernel holds the last two to what they have, the weights and the window.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
from pathlib import Path

import torch
from safetensors.torch import load_file

from workbench.checkpoint import Checkpoint
from workbench.loading import load_rank, prepare_load
from workbench.placement import Layout

LIMIT_SLACK = 8 << 20  # plan, ledger, stacks of threads


def status(key: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024


def main(root: Path, warm_root: Path, precision: str, window: int, layout: Layout, how: str) -> None:
    # Threads, allocator arenas and kernels of every operator that a load uses, before anything is measured.
    load_rank(Checkpoint.open(warm_root), Layout(), 0, precision=precision, window_bytes=1 << 16)
    checkpoint = Checkpoint.open(root)
    before = status("VmRSS")
    if how.startswith("limit"):
        threading.stack_size(1 << 20)  # of the reading threads: address space that counts here, and is no memory
        resident = prepare_load(checkpoint, layout, 0, precision=precision).resident_bytes
        limit = status("VmData") + resident + window + LIMIT_SLACK
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    drained = [load_file(path) for path in sorted(root.glob("*.safetensors"))] if how.endswith("drain") else []
    drained = [{name: tensor.clone() for name, tensor in file.items()} for file in drained]
    _, _, stats = load_rank(checkpoint, layout, 0, precision=precision, window_bytes=window)
    # Not ru_maxrss: a process inherits its parent's, which here is the whole test run.
    print(json.dumps({"growth": status("VmHWM") - before, "drained": len(drained), **stats.to_dict()}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, warm, name, window_bytes, tp, ep, how = sys.argv[1:]
    main(Path(folder), Path(warm), name, int(window_bytes), Layout(tp=int(tp), ep=int(ep)), how)
