"""Where the processor's time goes when k3-nano reads a chunk deep in a text, on one thread.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_long_context.py [--depth 65536] [--chunks 512 2048]

The cache is filled with random rows up to `--depth`, one chunk is read as a warm-up and one to be measured, within the
workspace (`nn/workspace.py`) and with everything done at once. Seconds are of the processor, so that a busy machine
disturbs less; shares are of the torch functions that the model calls.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS / "nn"))

from test_long_context import LongSequence  # noqa: E402

from workbench.base import Table  # noqa: E402
from workbench.nn import workspace  # noqa: E402

SHOWN = 5


class ProcessorTime(TorchFunctionMode):
    """Seconds of the processor by torch function, calls within calls counted once."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: Counter[str] = Counter()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        began = time.process_time()
        out = func(*args, **(kwargs or {}))
        self.seconds[func.__name__] += time.process_time() - began
        return out


def measured(depth: int, chunk: int) -> tuple[float, Counter[str]]:
    sequence = LongSequence(depth + chunk)
    generator = torch.Generator().manual_seed(7)
    for table in sequence.cache.latent.values():
        table.parts[0][:, :depth].normal_(generator=generator)
    for _ in range(2):
        sequence.seen = depth
        began = time.process_time()
        with ProcessorTime() as mode:
            sequence.read(chunk)
        seconds = time.process_time() - began
    return seconds, mode.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=65_536)
    parser.add_argument("--chunks", type=int, nargs="+", default=[512, 2048])
    args = parser.parse_args()
    torch.set_num_threads(1)
    limit, rows = workspace.WORKSPACE_BYTES, []
    for chunk in args.chunks:
        for name, workspace.WORKSPACE_BYTES in (("at once", 1 << 60), ("within", limit)):
            seconds, parts = measured(args.depth, chunk)
            shares = ", ".join(f"{what} {part / seconds:.0%}" for what, part in parts.most_common(SHOWN))
            rows.append((chunk, name, round(seconds, 2), round(1e6 * seconds / chunk), shares))
    columns = ("tokens", "workspace", "cpu s", "us a token", "shares")
    print(Table(title=f"k3-nano, one chunk behind {args.depth:,} tokens", columns=columns, rows=tuple(rows)).render())
    print(json.dumps([dict(zip(columns, row, strict=True)) for row in rows]))


if __name__ == "__main__":
    main()
