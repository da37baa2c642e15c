"""What a cache of one byte a value costs and loses: bytes a token, agreement with the cache as computed, time a step.

    python tests/benchmarks/bench_kv.py [--model data/k3-nano] [--per-kind 4] [--cache-tokens 65536]

The model answers held-out questions about pictures greedily, its rows cached as they are computed (fp32 activations, so
that nothing but the cache differs). Each answer is then read again token by token with the cache in each format: KL of
the next-token distributions against the cache as computed, and how often the likeliest token is the same. Bytes are
those of the rows at bf16 activations. Steps of one token of one sequence are timed, formats taking turns question by
question; the ratio is of medians.

Tokens in one pool: the rows that `--cache-tokens` allocates as computed, and in each format the largest pool whose
allocation is no larger, in whole pages. fp8 is asked to hold at least 1.9 times as many; fewer end the run with 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from workbench.base import Table
from workbench.cluster import default_device
from workbench.nn.batch import TokenBatch
from workbench.nn.cache import StateCache
from workbench.nn.model import Model
from workbench.parallel import encode_images
from workbench.serving import LocalRunner, open_service
from workbench.serving.inputs import ImageProcessor, Tokenizer, normalise, render_chat
from workbench.serving.open import thinks_first
from workbench.serving.replica_cache import POOL_PAGE_TOKENS
from workbench.spec import KV_DTYPES
from workbench.training.answers import MAX_NEW_TOKENS
from workbench.training.data import ExamItem, picture_exam, scene_image

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("shape", "colour", "count", "position", "size", "presence", "digit", "word")


class Replay:
    """A question about a picture and an answer, read through a cache: the prompt at once, then token by token."""

    @torch.inference_mode()
    def __init__(self, runner: LocalRunner, tokenizer: Tokenizer, item: ExamItem, *, thinking: bool) -> None:
        self.model, self.ctx = runner.rank.model, runner.rank.ctx
        image_spec = self.model.spec.image
        assert image_spec is not None
        assert item.scene is not None
        image = ImageProcessor(image_spec).process(scene_image(item.scene))
        prompt = render_chat(item.messages, tokenizer, [image], thinking=thinking)
        self.prompt = list(prompt.token_ids)
        self.rows = [row for span in prompt.image_spans for row in range(span.start, span.start + span.count)]
        pixels = torch.from_numpy(normalise(image.patches, image_spec)).to(self.ctx.device)
        self.features = encode_images(self.model, self.ctx, pixels, [image.grid])

    @torch.inference_mode()
    def logits(self, answer: list[int], kv_dtype: str) -> tuple[Tensor, list[float]]:
        """(answer tokens, V), each from all before it, and the seconds of each step of one token."""
        cache = new_cache(self.model, len(self.prompt) + len(answer), self.model.dtype, kv_dtype)
        out, seconds = [self._step(self.prompt, 0, cache)], []
        for idx, token in enumerate(answer[:-1]):
            began = time.perf_counter()
            out.append(self._step([token], len(self.prompt) + idx, cache))
            seconds.append(time.perf_counter() - began)
        return torch.cat(out), seconds

    def _step(self, ids: list[int], start: int, cache: StateCache) -> Tensor:
        device = self.ctx.device
        batch = TokenBatch(
            token_ids=torch.tensor(ids, device=device),
            lengths=(len(ids),),
            starts=(start,),
            slots=(0,),
            logit_rows=torch.tensor([len(ids) - 1], device=device),
            image_rows=torch.tensor(self.rows, device=device) if start == 0 else None,
            image_features=self.features if start == 0 else None,
        )
        return self.model(batch, cache=cache).double().cpu()


def new_cache(
    model: Model,
    max_tokens: int,
    dtype: torch.dtype,
    kv_dtype: str,
    device: str | None = None,
    cache_tokens: int | None = None,
) -> StateCache:
    return StateCache(
        model.spec,
        model.layer_range,
        num_slots=1,
        max_tokens=max_tokens,
        dtype=dtype,
        device=device or next(model.parameters()).device,
        kv_dtype=kv_dtype,
        cache_tokens=cache_tokens,
    )


def tokens_in_pool(model: Model, kv_dtype: str, cache_tokens: int) -> int:
    """Tokens in whole pages of the largest pool in this format that takes no more bytes than `cache_tokens` rows do."""

    def num_bytes(name: str, rows: int) -> int:
        return new_cache(model, rows, torch.bfloat16, name, "meta", cache_tokens=rows).num_bytes

    limit, low, high = num_bytes("auto", cache_tokens), 1, 4 * cache_tokens
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if num_bytes(kv_dtype, middle) <= limit else (low, middle - 1)
    return low // POOL_PAGE_TOKENS * POOL_PAGE_TOKENS


def bytes_per_token(model: Model, kv_dtype: str) -> float:
    one, two = (new_cache(model, n, torch.bfloat16, kv_dtype, "meta").num_bytes for n in (1000, 2000))
    return (two - one) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=ROOT / "data" / "k3-nano")
    parser.add_argument("--per-kind", type=int, default=4)
    parser.add_argument("--cache-tokens", type=int, default=1 << 16, help="rows of the pool, as computed")
    parser.add_argument("--at-least", type=float, default=1.9, help="times as many tokens in fp8")
    args = parser.parse_args()
    device = default_device()
    items = picture_exam(args.per_kind, seed=1, kinds=KINDS)
    runner = LocalRunner.load(args.model, precision="fp32", device=device, num_slots=1, max_tokens=1024)
    agree, divergence, seconds = ({name: [] for name in KV_DTYPES} for _ in range(3))
    with open_service(runner, args.model) as service:
        tokenizer, thinking = service.tokenizer, thinks_first(args.model)
        for item in items:
            reply = service.infer(item.text, [scene_image(item.scene)], max_tokens=MAX_NEW_TOKENS, temperature=0.0)
            replay = Replay(runner, tokenizer, item, thinking=thinking)
            exact: Tensor | None = None
            for name in KV_DTYPES:
                logits, times = replay.logits(list(reply.token_ids), name)
                exact = logits if exact is None else exact
                p, q = exact.log_softmax(-1), logits.log_softmax(-1)
                divergence[name] += (p.exp() * (p - q)).sum(-1).tolist()
                agree[name] += (exact.argmax(-1) == logits.argmax(-1)).tolist()
                seconds[name] += times
    model = runner.rank.model
    rows, record = [], {}
    for name in KV_DTYPES:
        size = bytes_per_token(model, name)
        record[name] = {
            "bytes_per_token": size,
            "ratio": size / bytes_per_token(model, "auto"),
            "kl_nat": statistics.fmean(divergence[name]),
            "top1": statistics.fmean(agree[name]),
            "step_ratio": statistics.median(seconds[name]) / statistics.median(seconds["auto"]),
            "pool_tokens": tokens_in_pool(model, name, args.cache_tokens),
        }
        record[name]["pool_ratio"] = record[name]["pool_tokens"] / record["auto"]["pool_tokens"]
        own = record[name]
        cells = (f"{size:,.0f}", f"{own['ratio']:.3f}", f"{own['kl_nat']:.2e}", f"{own['top1']:.2%}")
        pool = f"{own['pool_tokens']:,} ({own['pool_ratio']:.3f} x)"
        rows.append((name, *cells, f"{own['step_ratio']:.2f}", pool))
    columns = (
        "cache",
        "bytes a token",
        "of bf16",
        "KL, nat",
        "same likeliest token",
        "time of a step",
        "tokens in a pool",
    )
    title = f"{args.model}, {len(agree['auto']):,} tokens of {len(items)} answers, {device}"
    print(Table(title=title, columns=columns, rows=tuple(rows)).render())
    print(json.dumps({"benchmark": "kv", "model": str(args.model), "device": device, "formats": record}))
    sys.exit(0 if record["fp8"]["pool_ratio"] >= args.at_least else 1)


if __name__ == "__main__":
    main()
