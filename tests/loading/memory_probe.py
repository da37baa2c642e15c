"""Run alone: load one rank's part of a folder and print what the kernel says of this process's memory, as JSON.

python memory_probe.py FOLDER PRECISION WINDOW_BYTES LAYOUT_TP LAYOUT_EP HOW      HOW: stream | drain
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from workbench.checkpoint import Checkpoint
from workbench.loading import load_rank
from workbench.placement import Layout


def status(key: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024


def main(root: Path, warm_root: Path, precision: str, window: int, layout: Layout, how: str) -> None:
    # Threads, allocator arenas and kernels of every operator that a load uses, before anything is measured.
    load_rank(Checkpoint.open(warm_root), Layout(), 0, precision=precision, window_bytes=1 << 16)
    checkpoint = Checkpoint.open(root)
    before = status("VmRSS")
    drained = [load_file(path) for path in sorted(root.glob("*.safetensors"))] if how == "drain" else []
    drained = [{name: tensor.clone() for name, tensor in file.items()} for file in drained]
    _, _, stats = load_rank(checkpoint, layout, 0, precision=precision, window_bytes=window)
    # Not ru_maxrss: a process inherits its parent's, which here is the whole test run.
    print(json.dumps({"growth": status("VmHWM") - before, "drained": len(drained), **stats.to_dict()}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, warm, name, window_bytes, tp, ep, how = sys.argv[1:]
    main(Path(folder), Path(warm), name, int(window_bytes), Layout(tp=int(tp), ep=int(ep)), how)
