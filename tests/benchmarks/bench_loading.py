"""How fast weights load: ours beside the safetensors library and beside nothing but reading the same bytes.

    python tests/benchmarks/bench_loading.py [--mb 400] [--rounds 5] [--folder DIR]

A random checkpoint of the given size is made once (or `--folder` is used). Every way runs in a process of its own, ways
interleaved over the rounds, so that a slow minute of the machine hits all of them; files are in the page cache, so this
measures the loader and the memory, not the disk. One thread each, as a rank has on a shared machine, unless
OMP_NUM_THREADS says otherwise. Ratios are of medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

MIB = 1 << 20

WAYS = {
    "raw pread": "sequential pread of all files into one 16 MiB buffer: the floor",
    "safetensors clone": "load_file of each file, then a copy of every tensor into memory of our own",
    "ours mxfp4": "load_rank, experts kept packed, contents checked",
    "ours mxfp4 unchecked": "the same with check=False",
    "ours bf16": "load_rank, experts expanded to bf16",
    "ours int8": "load_rank, everything re-encoded to int8",
    "ours tp2 rank 0": "load_rank of one of two tensor-parallel ranks, packed: half the bytes, columns in strides",
}


def raw_pread(root: Path) -> int:
    buffer, total = memoryview(bytearray(16 * MIB)), 0
    for path in sorted(root.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
    return total


def safetensors_clone(root: Path) -> int:
    from safetensors.torch import load_file

    total = 0
    kept = []
    for path in sorted(root.glob("*.safetensors")):
        for tensor in load_file(path).values():
            kept.append(tensor.clone())
            total += tensor.nbytes
    return total


def ours(root: Path, precision: str, tp: int = 1, check: bool = True) -> int:
    from workbench.checkpoint import Checkpoint
    from workbench.loading import load_rank
    from workbench.placement import Layout

    layout = Layout(tp=tp, ep=tp)
    return load_rank(Checkpoint.open(root), layout, 0, precision=precision, check=check)[2].bytes_read


def run_way(way: str, root: Path, warm: Path) -> tuple[float, int]:
    """Seconds and bytes of one way in this process, after one run on a tiny folder to load code."""
    calls = {
        "raw pread": raw_pread,
        "safetensors clone": safetensors_clone,
        "ours mxfp4": lambda folder: ours(folder, "mxfp4"),
        "ours mxfp4 unchecked": lambda folder: ours(folder, "mxfp4", check=False),
        "ours bf16": lambda folder: ours(folder, "bf16"),
        "ours int8": lambda folder: ours(folder, "int8"),
        "ours tp2 rank 0": lambda folder: ours(folder, "mxfp4", tp=2),
    }
    calls[way](warm)
    started = time.perf_counter()
    num_bytes = calls[way](root)
    return time.perf_counter() - started, num_bytes


def make_checkpoint(folder: Path, megabytes: int) -> Path:
    from workbench.checkpoint import k3_config, write_checkpoint

    layers = max(3, round(megabytes / 55))
    config = k3_config(
        num_layers=layers, full_attn_layers=(*range(4, layers, 4), layers), hidden_size=1024, vocab_size=16384,
        dense_width=4096, kda_heads=8, kda_head_dim=64, mla_heads=8, q_rank=256, kv_rank=128, num_experts=16,
        expert_width=1024, latent_dim=1024, num_shared=1,
    )  # fmt: skip
    return write_checkpoint(folder, config, seed=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--warm", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(run_way(options.way, options.folder, options.warm)))
        return

    from workbench.checkpoint import write_checkpoint

    with tempfile.TemporaryDirectory() as scratch:
        root = options.folder or make_checkpoint(Path(scratch) / "large", options.mb)
        warm = write_checkpoint(Path(scratch) / "warm")
        raw_pread(root)
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        results: dict[str, list[tuple[float, int]]] = {way: [] for way in WAYS}
        for _ in range(options.rounds):
            for way in WAYS:
                command = [sys.executable, __file__, "--way", way, "--folder", str(root), "--warm", str(warm)]
                done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
                seconds, num_bytes = json.loads(done.stdout.splitlines()[-1])
                results[way].append((seconds, num_bytes))
    medians = {way: statistics.median(seconds for seconds, _ in runs) for way, runs in results.items()}
    rates = {way: results[way][0][1] / medians[way] / 1e9 for way in WAYS}
    print(f"{'way':<22}{'median s':>9}{'best s':>8}{'MB':>7}{'GB/s':>7}{'x raw':>7}{'x safetensors':>15}")
    for way in WAYS:
        best = min(seconds for seconds, _ in results[way])
        raw, library = medians[way] / medians["raw pread"], medians[way] / medians["safetensors clone"]
        size = results[way][0][1] / 1e6
        print(f"{way:<22}{medians[way]:>9.3f}{best:>8.3f}{size:>7.0f}{rates[way]:>7.2f}{raw:>7.2f}{library:>15.2f}")
    record = {
        "benchmark": "loading",
        "seconds": medians,
        "GB_per_s": rates,
        "threads": environment["OMP_NUM_THREADS"],
        "torch": torch.__version__,
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
