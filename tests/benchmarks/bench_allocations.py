"""What a step of decoding allocates beside the pools: operator by operator, and whether any of it stays.

    python tests/benchmarks/bench_allocations.py [--model data/k3-nano] [--sequences 8] [--cached 512]

Every slot reads a prompt of `--cached` tokens; then single steps of one token each are recorded by torch's profiler
with its memory events. The pools (cache rows and states) are made before and hold all that outlives a step; what is
listed comes from the allocator and goes back to it. "left" is allocations less frees over the recorded steps.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from workbench.base import Table, human
from workbench.serving import LocalRunner, SamplingParams, SequenceStep

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "data" / "k3-nano")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--cached", type=int, default=512)
    parser.add_argument("--rows", type=int, default=20, help="operators to list")
    args = parser.parse_args()
    runner = LocalRunner.load(args.model, num_slots=args.sequences, max_tokens=args.cached + 8 + STEPS)
    greedy = SamplingParams(max_tokens=64)

    def step(start: int, num_tokens: int) -> None:
        steps = tuple(
            SequenceStep(slot=slot, start=start, token_ids=(1 + slot,) * num_tokens, sample=greedy, step_idx=start)
            for slot in range(args.sequences)
        )
        runner.step([steps])

    step(0, args.cached)
    step(args.cached, 1)  # the first step of a kind loads code
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=False) as recorded:
        for idx in range(STEPS):
            step(args.cached + 1 + idx, 1)
    taken: dict[str, list[int]] = defaultdict(list)
    net = 0
    for event in recorded.events() or ():
        size = event.self_cpu_memory_usage
        net += size
        if size > 0:
            taken[event.name].append(size)
    whole = sum(map(sum, taken.values()))
    count = sum(map(len, taken.values()))
    ordered = sorted(taken.items(), key=lambda item: -sum(item[1]))
    rows = tuple(
        (name, f"{len(sizes) / STEPS:g}", human(sum(sizes) / STEPS, "B"), f"{sum(sizes) / whole:.1%}")
        for name, sizes in ordered[: args.rows]
    )
    pools = runner.rank.cache.num_bytes
    title = f"{args.model}: one step of {args.sequences} sequences with {args.cached} cached tokens each"
    note = (
        f"all operators: {count / STEPS:,.0f} that take memory and {human(whole / STEPS, 'B')} a step, "
        f"beside pools of {human(pools, 'B')}; left after {STEPS} steps: {net:,} bytes"
    )
    columns = ("operator", "a step", "bytes a step", "share")
    print(Table(title=title, columns=columns, rows=rows, note=note).render())
    told = {name: {"count": len(sizes) / STEPS, "bytes": sum(sizes) / STEPS} for name, sizes in ordered}
    record = {"benchmark": "allocations", "bytes": whole / STEPS, "operators": told, "pools": pools, "left": net}
    print(json.dumps({**record, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
