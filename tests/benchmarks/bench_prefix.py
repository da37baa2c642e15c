"""What kept beginnings of prompts save, and how many tokens a pool holds in one byte a value.

    python tests/benchmarks/bench_prefix.py [--model data/k3-nano] [--rounds 5] [--prefix-tokens 4096]

First token: in each round a new beginning of `--prefix-tokens` tokens is drawn, with two questions behind it. A service
that keeps nothing answers the second one; a service that keeps pages answers the first, reading the beginning, and then
the second, which finds it. Times run from submission to the first token; the ratio is of the medians of the same
question with and without. Both services must say the same tokens (fp32); a difference ends the run with 1.

Pool: the rows of a cache as served (bf16 activations, `--slots` sequences of `--pool-tokens`) are allocated, and then,
in fp8 and int8, the longest sequences whose allocation is no larger. A prompt is then read into every slot up to its
last row, which the pool as computed refuses. Recurrent states have one size in every format and stand apart.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from long_context import long_context

from workbench.base import PromptTooLongError, Table, human
from workbench.cluster import default_device
from workbench.nn.cache import StateCache
from workbench.serving import LocalRunner, MultimodalInferenceService, RankRunner, SamplingParams, open_service
from workbench.serving.inputs import PromptTokens
from workbench.spec import KV_DTYPES

ROOT = Path(__file__).resolve().parents[2]
PAGE = 256
WAYS = ("nothing kept", "kept, not there yet", "kept and there")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "data" / "k3-nano")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefix-tokens", type=int, default=4096)
    parser.add_argument("--question-tokens", type=int, default=32)
    parser.add_argument("--answer-tokens", type=int, default=8)
    parser.add_argument("--slots", type=int, default=2, help="of the pool")
    parser.add_argument("--pool-tokens", type=int, default=2048, help="a slot, as computed")
    args = parser.parse_args()
    device = default_device()
    longest = max(args.prefix_tokens + args.question_tokens + args.answer_tokens, 2 * args.pool_tokens)
    with tempfile.TemporaryDirectory() as scratch:
        model = long_context(args.model, Path(scratch) / "model", longest)
        times, is_same = measure_first_tokens(args, model, device)
        pools, states = measure_pools(args, model, device)
    medians = {way: statistics.median(each) for way, each in times.items()}
    first = medians[WAYS[0]] / medians[WAYS[2]]
    rows = tuple((way, human(medians[way], "s"), f"{medians[WAYS[0]] / medians[way]:.2f}") for way in WAYS)
    title = f"{args.model}, {args.prefix_tokens} shared tokens, {args.rounds} rounds, fp32, {device}"
    note = f"same tokens with and without: {'yes' if is_same else 'NO'}"
    print(Table(title=title, columns=("first token", "median", "times faster"), rows=rows, note=note).render())
    base = pools["auto"]
    lines = tuple(
        (name, each["bytes"], each["tokens"], f"{each['tokens'] / base['tokens']:.3f}") for name, each in pools.items()
    )
    columns = ("cache", "bytes of rows", "tokens held", "times as many")
    note = f"beside them {states:,} bytes of recurrent states; every slot was read into up to its last row"
    print(Table(title=f"one pool, {args.slots} slots", columns=columns, rows=lines, note=note).render())
    ratios = {name: each["tokens"] / base["tokens"] for name, each in pools.items()}
    record = {
        "benchmark": "prefix",
        "first_token_s": times,
        "first_token_ratio": first,
        "pools": pools,
        "ratios": ratios,
    }
    print(json.dumps({**record, "device": device, "torch": torch.__version__, "same_tokens": is_same}))
    sys.exit(0 if is_same else 1)


def measure_first_tokens(args: argparse.Namespace, model: Path, device: str) -> tuple[dict[str, list[float]], bool]:
    """Seconds to the first token by way, and whether answers are the same with and without kept pages."""
    longest = args.prefix_tokens + args.question_tokens + args.answer_tokens
    pages = -(-longest // PAGE)
    rng, times, is_same = random.Random(1), {way: [] for way in WAYS}, True

    def load() -> LocalRunner:
        return LocalRunner.load(model, precision="fp32", device=device, num_slots=1, max_tokens=longest)

    with (
        open_service(load(), model) as plain,
        open_service(load(), model, prefix_pages=pages, page_tokens=PAGE) as keeping,
    ):
        known = [i for i in range(plain.tokenizer.vocab_size) if not plain.tokenizer.is_reserved(i)]
        for service in (plain, keeping):
            ask(service, rng.choices(known, k=PAGE), args.answer_tokens)  # the first steps load code
        for _ in range(args.rounds):
            begin = rng.choices(known, k=args.prefix_tokens)
            other, question = (begin + rng.choices(known, k=args.question_tokens) for _ in range(2))
            said = []
            for way, service, ids in zip(WAYS, (plain, keeping, keeping), (question, other, question), strict=True):
                first_s, answer, num_cached = ask(service, ids, args.answer_tokens)
                times[way].append(first_s)
                said.append(answer)
                expected = args.prefix_tokens // PAGE * PAGE if way == WAYS[2] else 0
                assert num_cached == expected, f"{way}: {num_cached} tokens were there, expected {expected}"
            is_same &= said[0] == said[2]
    return times, is_same


def ask(service: MultimodalInferenceService, ids: list[int], max_tokens: int) -> tuple[float, tuple[int, ...], int]:
    """Seconds to the first token, the answer, and the tokens that were not read again."""
    before = service.stats().num_cached_tokens
    answer = service.generate(PromptTokens(tuple(ids)), [], SamplingParams(max_tokens=max_tokens)).result()
    assert answer.timings.first_token_s is not None
    return answer.timings.first_token_s, answer.token_ids, service.stats().num_cached_tokens - before


def measure_pools(args: argparse.Namespace, model: Path, device: str) -> tuple[dict[str, dict[str, int]], int]:
    """Bytes and tokens of the pool in each format, and the bytes of states beside it."""
    loaded = LocalRunner.load(
        model, precision="mxfp4", dtype=torch.bfloat16, device=device, num_slots=1, max_tokens=PAGE
    ).rank

    def runner(kv_dtype: str, max_tokens: int) -> RankRunner:
        return RankRunner(loaded.model, loaded.ctx, num_slots=args.slots, max_tokens=max_tokens, kv_dtype=kv_dtype)

    whole = runner("auto", args.pool_tokens).cache
    limit = bytes_of_rows(whole)
    pools: dict[str, dict[str, int]] = {}
    for name in KV_DTYPES:
        low, high = args.pool_tokens, 2 * args.pool_tokens
        while low < high:  # the longest slots whose allocation stays within the pool
            middle = (low + high + 1) // 2
            low, high = (middle, high) if bytes_of_rows(runner(name, middle).cache) <= limit else (low, middle - 1)
        largest = runner(name, low)
        fill(LocalRunner(largest), model, low)
        pools[name] = {"bytes": bytes_of_rows(largest.cache), "tokens": args.slots * low}
        if low > args.pool_tokens:
            assert refuses(LocalRunner(runner("auto", args.pool_tokens)), model, low), (
                "the pool as computed takes it too"
            )
    return pools, whole.num_bytes - limit


def bytes_of_rows(cache: StateCache) -> int:
    """What is allocated for rows of tokens, scales among them."""
    tables = (cache.latent, cache.keys, cache.values, cache.index)
    return sum(part.untyped_storage().nbytes() for table in tables for rows in table.values() for part in rows.parts)


def fill(runner: LocalRunner, model: Path, max_tokens: int) -> None:
    """Read a prompt into every slot up to its last row."""
    with open_service(runner, model) as service:
        replies = [
            service.generate(PromptTokens((1 + slot,) * max_tokens), [], SamplingParams(max_tokens=1))
            for slot in range(runner.info.num_slots)
        ]
        assert all(len(reply.result().logprobs) == 1 for reply in replies)


def refuses(runner: LocalRunner, model: Path, num_tokens: int) -> bool:
    with open_service(runner, model) as service:
        try:
            service.generate(PromptTokens((1,) * num_tokens), [], SamplingParams(max_tokens=1))
        except PromptTooLongError:
            return True
    return False


if __name__ == "__main__":
    main()
