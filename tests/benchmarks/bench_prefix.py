"""What kept beginnings of prompts save, and how many tokens a pool holds in one byte a value.

    python tests/benchmarks/bench_prefix.py [--model data/k3-nano] [--rounds 5] [--prefix-tokens 4096]

First token: in each round a new beginning of `--prefix-tokens` tokens is drawn, with two questions behind it. A service
that keeps nothing answers the second one; a service that keeps pages answers the first, reading the beginning, and then
the second, which finds it. Times run from submission to the first token; the ratio is of the medians of the same
question with and without. Once with one slot, which has its own rows (the kept pages lie in them), and once with two
slots on a pool (`--cache-tokens`) of fewer rows than two such sequences need, where kept pages give way. Both services
must say the same tokens (fp32), and the ratio must be at least `--at-least`; else the run ends with 1.

Tokens: the rows of a cache as served (bf16 activations, `--slots` sequences of `--pool-tokens`) are allocated, and
then, in fp8 and int8, the longest sequences whose allocation is no larger. A prompt is then read into every slot up to
its last row, which the rows as computed refuse. The same of one pool that the slots share (`--cache-tokens` of that
many rows): prompts enter all slots at once and are read, whose pages are all there are but the one that each who runs
is left to grow into; the pool as computed has no room for them. Recurrent states have one size in every format and
stand apart.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from long_context import long_context

from workbench.base import RequestError, Table, human
from workbench.cluster import default_device
from workbench.nn.cache import StateCache
from workbench.serving import LocalRunner, MultimodalInferenceService, RankRunner, SamplingParams, open_service
from workbench.serving.engine import Engine
from workbench.serving.inputs import PromptTokens
from workbench.serving.replica_cache import POOL_PAGE_TOKENS
from workbench.serving.requests import GenerationRequest
from workbench.spec import KV_DTYPES

ROOT = Path(__file__).resolve().parents[2]
PAGE = 256
WAYS = ("nothing kept", "kept, not there yet", "kept and there")
OWN, POOL = PLACES = ("each slot its own rows", "slots on one pool")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "data" / "k3-nano")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefix-tokens", type=int, default=4096)
    parser.add_argument("--question-tokens", type=int, default=32)
    parser.add_argument("--answer-tokens", type=int, default=8)
    parser.add_argument("--slots", type=int, default=2, help="of the pool")
    parser.add_argument("--pool-tokens", type=int, default=2048, help="a slot, as computed")
    parser.add_argument("--at-least", type=float, default=5.0, help="times sooner the first token")
    args = parser.parse_args()
    device = default_device()
    longest = max(args.prefix_tokens + args.question_tokens + args.answer_tokens, 2 * args.pool_tokens)
    with tempfile.TemporaryDirectory() as scratch:
        model = long_context(args.model, Path(scratch) / "model", longest)
        is_good, record = True, {}
        for place in PLACES:
            times, is_same = measure_first_tokens(args, model, device, place)
            medians = {way: statistics.median(each) for way, each in times.items()}
            first = medians[WAYS[0]] / medians[WAYS[2]]
            is_good &= is_same and first >= args.at_least
            rows = tuple((way, human(medians[way], "s"), f"{medians[WAYS[0]] / medians[way]:.2f}") for way in WAYS)
            title = f"{args.model}, {args.prefix_tokens} shared tokens, {place}, {args.rounds} rounds, fp32, {device}"
            note = f"same tokens with and without: {'yes' if is_same else 'NO'}"
            columns = ("first token", "median", "times faster")
            print(Table(title=title, columns=columns, rows=rows, note=note).render(), flush=True)
            record[place] = {"first_token_s": times, "first_token_ratio": first, "same_tokens": is_same}
        for place in PLACES:
            pools, states = measure_pools(args, model, device, place)
            ratios = {name: each["tokens"] / pools["auto"]["tokens"] for name, each in pools.items()}
            lines = tuple((name, each["bytes"], each["tokens"], f"{ratios[name]:.3f}") for name, each in pools.items())
            columns = ("cache", "bytes of rows", "tokens held", "times as many")
            note = f"beside them {states:,} bytes of recurrent states; all of these tokens were read"
            table = Table(title=f"{args.slots} slots, {place}", columns=columns, rows=lines, note=note)
            print(table.render(), flush=True)
            record[place] |= {"pools": pools, "ratios": ratios}
    print(json.dumps({"benchmark": "prefix", "places": record, "device": device, "torch": torch.__version__}))
    sys.exit(0 if is_good else 1)


def measure_first_tokens(
    args: argparse.Namespace, model: Path, device: str, place: str
) -> tuple[dict[str, list[float]], bool]:
    """Seconds to the first token by way, and whether answers are the same with and without kept pages."""
    longest = args.prefix_tokens + args.question_tokens + args.answer_tokens
    pages = -(-longest // PAGE)
    rng, times, is_same = random.Random(1), {way: [] for way in WAYS}, True
    sizes = {"num_slots": 1} if place == OWN else {"num_slots": 2, "cache_tokens": longest + PAGE + PAGE // 2}

    def load() -> LocalRunner:
        return LocalRunner.load(model, precision="fp32", device=device, max_tokens=longest, **sizes)

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


def measure_pools(
    args: argparse.Namespace, model: Path, device: str, place: str
) -> tuple[dict[str, dict[str, int]], int]:
    """Bytes and tokens of the rows in each format, and the bytes of states beside them."""
    loaded = LocalRunner.load(
        model, precision="mxfp4", dtype=torch.bfloat16, device=device, num_slots=1, max_tokens=PAGE
    ).rank

    def runner(kv_dtype: str, rows_of_slot: int) -> RankRunner:
        longest, pool = (rows_of_slot, None) if place == OWN else (2 * args.pool_tokens, args.slots * rows_of_slot)
        sizes = {"num_slots": args.slots, "max_tokens": longest, "cache_tokens": pool}
        return RankRunner(loaded.model, loaded.ctx, kv_dtype=kv_dtype, **sizes)

    whole = runner("auto", args.pool_tokens).cache
    limit = bytes_of_rows(whole)
    pools: dict[str, dict[str, int]] = {}
    for name in KV_DTYPES:
        low, high = args.pool_tokens, 2 * args.pool_tokens
        while low < high:  # the longest slots whose allocation stays within that
            middle = (low + high + 1) // 2
            low, high = (middle, high) if bytes_of_rows(runner(name, middle).cache) <= limit else (low, middle - 1)
        largest = runner(name, low)
        lengths = (low,) * args.slots if place == OWN else shared_lengths(args.slots, low)
        assert read_at_once(LocalRunner(largest), lengths) == len(lengths), f"{name}: no room for {lengths}"
        pools[name] = {"bytes": bytes_of_rows(largest.cache), "tokens": sum(lengths)}
        if low > args.pool_tokens:
            at_once = read_at_once(LocalRunner(runner("auto", args.pool_tokens)), lengths, ends=False)
            assert at_once < len(lengths), "the rows as computed have room for them too"
    return pools, whole.num_bytes - limit


def shared_lengths(num_slots: int, rows_of_slot: int) -> tuple[int, ...]:
    """Prompts that take all pages of a pool but one for each that runs when the last one comes, left to grow into."""
    share, more = divmod(num_slots * rows_of_slot // POOL_PAGE_TOKENS - (num_slots - 1), num_slots)
    return tuple(POOL_PAGE_TOKENS * (share + (slot < more)) for slot in range(num_slots))


def bytes_of_rows(cache: StateCache) -> int:
    """What is allocated for rows of tokens, scales among them."""
    tables = (cache.latent, cache.keys, cache.values, cache.index)
    return sum(part.untyped_storage().nbytes() for table in tables for rows in table.values() for part in rows.parts)


def read_at_once(runner: LocalRunner, lengths: Sequence[int], *, ends: bool = True) -> int:
    """How many of prompts of these lengths find room side by side, which are read to their `ends` then."""
    engine = Engine(runner)
    try:
        generations = [
            engine.submit(GenerationRequest(token_ids=(1 + i,) * length, sampling=SamplingParams(max_tokens=1)))
            for i, length in enumerate(lengths)
        ]
    except RequestError:
        return 0
    engine.step_once()
    num_running = engine.stats().num_running
    if not ends:
        return num_running
    while engine.step_once():
        pass
    assert all(len(list(each)) == 1 for each in generations)
    return num_running


if __name__ == "__main__":
    main()
