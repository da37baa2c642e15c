"""What it costs that rows lie in pages: steps of decoding with slots, from gathered pages, and from pages in place.

    python tests/benchmarks/bench_pages.py [--sequences 8] [--longest 2048] [--steps 15] [--only latents]
    WORKBENCH_NATIVE=0 python tests/benchmarks/bench_pages.py             the same by torch alone, which always gathers

Two models on the processor: k3-nano, whose attention reads latents, and one with grouped-query attention, drawn at
random (512 wide, 6 layers). Sequences of `--longest` tokens and evenly fewer are made
up in three caches, the same rows in each:

    slots               each sequence has its rows side by side
    pool, gathered      pages of `--page-tokens` in random order; a layer copies what it reads, as without kernels
    pool, in place      the same pages, read by the kernel through the tables

Each step is taken in all three, in an order drawn anew, before the next one; all logits must be the same to the bit, so
that all three generate the same tokens, and a difference ends the run with 1. Times are medians of whole steps.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from long_context import long_context
from qwen3_moe_files import qwen3_moe_config, write_qwen3_moe
from torch import Tensor

from workbench.base import Table, human
from workbench.nn import StateCache, TokenBatch, native
from workbench.nn.model import Model
from workbench.nn.rows import RowTable
from workbench.serving import LocalRunner

ROOT = Path(__file__).resolve().parents[2]
LATENTS, KEYS = "latents", "keys and values"
SLOTS, GATHERED, IN_PLACE = "slots", "pool, gathered", "pool, in place"


class GatheringCache(StateCache):
    """Pages whose rows are copied wherever they are read."""

    def kv_in_place(self, layer_idx: int) -> None:  # type: ignore[override]
        return None

    def latents_in_place(self, layer_idx: int) -> None:  # type: ignore[override]
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "data" / "k3-nano", help="the one with latents")
    parser.add_argument("--only", nargs="+", choices=(LATENTS, KEYS), default=(LATENTS, KEYS))
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--longest", type=int, default=2048, help="tokens")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--page-tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    dtype, has_kernels = getattr(torch, args.dtype), native.kernels() is not None
    kinds: dict[str, Any] = {}
    rows = []
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        for kind in args.only:
            model = loaded(args, kind, Path(scratch), dtype)
            times, is_same = measure(args, model)
            medians = {way: statistics.median(each) for way, each in times.items()}
            kinds[kind] = {"step_s": times, "median_s": medians, "same_logits": is_same}
            for way in times:
                ratio = medians[way] / medians[SLOTS]
                rows.append((kind, way, human(medians[way], "s"), f"{ratio:.2f}", "yes" if is_same else "NO"))
    title = (
        f"{args.sequences} sequences of up to {args.longest:,} tokens, {args.steps} steps each, {args.dtype}, cpu, "
        f"{torch.get_num_threads()} threads, {'native kernels' if has_kernels else 'torch alone'}"
    )
    columns = ("rows", "where they lie", "a step", "of that with slots", "same logits")
    print(Table(title=title, columns=columns, rows=tuple(rows)).render())
    print(json.dumps({"benchmark": "pages", "device": "cpu", "native": has_kernels, "kinds": kinds}))
    sys.exit(0 if all(each["same_logits"] for each in kinds.values()) else 1)


def loaded(args: argparse.Namespace, kind: str, scratch: Path, dtype: torch.dtype) -> Model:
    if kind == LATENTS:
        path = long_context(args.model, scratch / "latents", args.longest + args.steps)
    else:
        path = scratch / "keys"
        config = qwen3_moe_config(
            hidden=512, layers=6, experts=8, expert_width=256, heads=8, kv_heads=2, vocab=2048, top_k=2, head_dim=64
        )
        write_qwen3_moe(path, config, deviation=0.03)
    precision = "fp32" if dtype is torch.float32 else "bf16"
    return LocalRunner.load(path, precision=precision, dtype=dtype, num_slots=1, max_tokens=8).rank.model


def measure(args: argparse.Namespace, model: Model) -> tuple[dict[str, list[float]], bool]:
    """Seconds of each step by way, and whether all logits were the same."""
    lengths = [max(1, args.longest * (s + 1) // args.sequences) for s in range(args.sequences)]
    caches = made_up(args, model, lengths)
    times: dict[str, list[float]] = {way: [] for way in caches}
    tokens, is_same = [7] * len(lengths), True
    for step in range(-2, args.steps):  # the first ones load code
        batch = next_tokens(tokens, [length + 2 + step for length in lengths])
        found: list[Tensor] = []
        for way in random.Random(step).sample(list(caches), len(caches)):
            began = time.perf_counter()
            found.append(model(batch, cache=caches[way]))
            if step >= 0:
                times[way].append(time.perf_counter() - began)
        is_same &= all(torch.equal(found[0], each) for each in found[1:])
        tokens = found[0].argmax(-1).tolist()
    return times, is_same


def made_up(args: argparse.Namespace, model: Model, lengths: list[int]) -> dict[str, StateCache]:
    """The three caches, with the same rows of every sequence and states of zeros."""
    size, room = args.page_tokens, args.steps + 2
    pages_of = [-(-(length + room) // size) for length in lengths]
    most = max(lengths) + room
    options: dict[str, Any] = {"num_slots": len(lengths), "max_tokens": most, "dtype": model.dtype}
    pool: dict[str, Any] = {**options, "cache_tokens": sum(pages_of) * size}
    caches = {
        SLOTS: StateCache(model.spec, model.layer_range, **options),
        GATHERED: GatheringCache(model.spec, model.layer_range, **pool),
        IN_PLACE: StateCache(model.spec, model.layer_range, **pool),
    }
    order = random.Random(3).sample(range(sum(pages_of)), sum(pages_of))
    for way in (GATHERED, IN_PLACE):
        caches[way].use_pages(size)
        for slot, count in enumerate(pages_of):
            caches[way].extend(slot, 0, order[sum(pages_of[:slot]) :][:count])
    generator = torch.Generator().manual_seed(1)
    for tables in zip(*(tables_of(cache) for cache in caches.values()), strict=True):
        for slot, length in enumerate(lengths):
            shape = (length, *tables[0].parts[0].shape[2:])
            rows = torch.randn(shape, generator=generator).to(model.dtype)
            for table in tables:
                table.write(torch.full((length,), slot), torch.arange(length), rows)
    return caches


def tables_of(cache: StateCache) -> list[RowTable]:
    return [table for tables in (cache.latent, cache.keys, cache.values) for table in tables.values()]


def next_tokens(tokens: list[int], starts: list[int]) -> TokenBatch:
    num = len(tokens)
    return TokenBatch(
        token_ids=torch.tensor(tokens),
        lengths=(1,) * num,
        starts=tuple(starts),
        slots=tuple(range(num)),
        logit_rows=torch.arange(num),
    )


if __name__ == "__main__":
    main()
