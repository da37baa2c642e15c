"""What a rank does in the parity tests: load its part, run prompts whole and token by token, report the outcome."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from workbench.loading import LoadedModel, load_sharded_weights
from workbench.nn.batch import TokenBatch
from workbench.nn.cache import StateCache
from workbench.parallel import Pipeline, encode_images
from workbench.placement import Layout

__all__ = ["Outcome", "Prompt", "answer_prompts", "run_layout"]


@dataclass(frozen=True)
class Prompt:
    """Token ids, with `media_id` at the rows of images; `pixels` (N, 3, p, p) and `grids` of the images in order."""

    name: str
    token_ids: tuple[int, ...]
    pixels: Tensor | None = None
    grids: tuple[tuple[int, int, int], ...] = ()
    media_id: int = -1
    pad_id: int = -1


@dataclass(frozen=True)
class Outcome:
    """`logits` (T, V) of the whole prompt, `tokens` chosen greedily with a cache."""

    logits: Tensor
    tokens: tuple[int, ...]


def run_layout(
    root: Path,
    layout: Layout,
    precision: str,
    dtype: torch.dtype,
    rounds: list[list[list[Prompt]]],
    num_tokens: int,
) -> dict[str, object]:
    """Per round and replica a list of prompts; returns this rank's outcomes by prompt name, and what it cost.

    Outcomes come from the last stage only.
    """
    loaded = load_sharded_weights(root, precision=precision, dtype=dtype, layout=layout, device="cpu")
    try:
        outcomes: list[dict[str, Outcome]] = []
        for by_replica in rounds:
            outcomes.append(answer_prompts(loaded, by_replica[loaded.ctx.coords.dp], num_tokens))
        log = loaded.ctx.log
        return {
            "coords": loaded.ctx.coords,
            "outcomes": outcomes,
            "bytes_read": loaded.stats.bytes_read,
            "bytes_assigned": loaded.stats.bytes_assigned,
            "collectives": {key: total.count for key, total in log.totals.items()},
        }
    finally:
        loaded.ctx.close()


@torch.no_grad()
def answer_prompts(loaded: LoadedModel, prompts: list[Prompt], num_tokens: int) -> dict[str, Outcome]:
    """Whole prompts as one ragged batch, then `num_tokens` greedy tokens of each with a cache.

    A replica without prompts runs the same number of passes with no token.
    """
    model, ctx, spec = loaded.model, loaded.ctx, loaded.spec
    pipeline = Pipeline(spec, ctx, model.dtype)
    longest = max((len(p.token_ids) for p in prompts), default=1) + num_tokens
    cache = StateCache(
        spec,
        model.layer_range,
        num_slots=max(1, len(prompts)),
        max_tokens=longest,
        dtype=model.dtype,
        tp_size=loaded.layout.tp,
    )

    def step(batch: TokenBatch) -> Tensor | None:
        out = model(batch, pipeline.receive(batch.num_tokens), cache)
        if ctx.is_last_stage:
            return out
        pipeline.send(out)
        return None

    def choose(rows: Tensor | None) -> list[int]:
        ids = torch.zeros(len(prompts), dtype=torch.int64) if rows is None else rows.argmax(-1)
        return ctx.pp.broadcast(ids, ctx.pp.size - 1).tolist() if prompts else []

    logits = step(_whole_batch(loaded, prompts))
    lengths = [len(p.token_ids) for p in prompts]
    pieces = None if logits is None else logits.split(lengths)
    tokens = [choose(None if pieces is None else torch.stack([x[-1] for x in pieces]) if prompts else None)]
    for done in range(num_tokens - 1):
        batch = TokenBatch(
            token_ids=torch.tensor(tokens[-1], dtype=torch.int64),
            lengths=(1,) * len(prompts),
            starts=tuple(length + done for length in lengths),
            slots=tuple(range(len(prompts))),
            logit_rows=torch.arange(len(prompts)),
        )
        tokens.append(choose(step(batch)))
    if pieces is None:
        return {}
    return {
        prompt.name: Outcome(piece, tuple(step_tokens[i] for step_tokens in tokens))
        for i, (prompt, piece) in enumerate(zip(prompts, pieces, strict=True))
    }


def _whole_batch(loaded: LoadedModel, prompts: list[Prompt]) -> TokenBatch:
    batch = TokenBatch.whole([list(p.token_ids) for p in prompts], all_logits=True)
    with_images = [p for p in prompts if p.pixels is not None]
    if not with_images or not loaded.ctx.is_first_stage:
        return batch
    pixels = torch.cat([p.pixels for p in with_images if p.pixels is not None])
    features = encode_images(loaded.model, loaded.ctx, pixels, [grid for p in with_images for grid in p.grids])
    image_rows, zero_rows, at = [], [], 0
    for prompt in prompts:
        if prompt.pixels is not None:
            image_rows += [at + i for i, token in enumerate(prompt.token_ids) if token == prompt.media_id]
            zero_rows += [at + i for i, token in enumerate(prompt.token_ids) if token == prompt.pad_id]
        at += len(prompt.token_ids)
    return TokenBatch(
        token_ids=batch.token_ids,
        lengths=batch.lengths,
        starts=batch.starts,
        slots=batch.slots,
        logit_rows=batch.logit_rows,
        image_rows=torch.tensor(image_rows, dtype=torch.int64),
        image_features=features,
        zero_rows=torch.tensor(zero_rows, dtype=torch.int64),
    )
