"""One tiny model of a family under a layout: loaded by the loader, run on the prompts it was recorded for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from workbench.loading import load_sharded_weights
from workbench.loading.load import LoadedModel
from workbench.nn import Segments, StateCache, TokenBatch
from workbench.nn.model import DecoderLayer
from workbench.nn.rotary import image_positions
from workbench.nn.router import Router
from workbench.parallel import Pipeline, encode_images
from workbench.placement import Layout

__all__ = ["FAMILIES", "batch_logits", "expected_of", "load", "results_of", "run_all"]

FAMILIES = Path(__file__).parent / "families"
CHUNK = 4  # of a prefill in pieces
Result = dict[str, Tensor]


def expected_of(name: str) -> Result:
    return load_file(FAMILIES / name / "golden" / "expected.safetensors")


def prompts_of(expected: Result) -> list[list[int]]:
    return [part.tolist() for part in expected["prompts"].split(expected["lengths"].tolist())]


def load(name: str, layout: Layout | None = None, precision: str = "fp32") -> LoadedModel:
    return load_sharded_weights(FAMILIES / name, layout=layout or Layout(), precision=precision, device="cpu")


class _Run:
    """Forward passes of one rank's stage, with what its layers and routers gave."""

    def __init__(self, loaded: LoadedModel):
        self.loaded, self.model = loaded, loaded.model
        self.pipeline = Pipeline(loaded.spec, loaded.ctx, self.model.dtype)
        self.seen: dict[str, Tensor] = {}
        self.images: tuple[Tensor, Tensor | None, Tensor] | None = None
        for name, module in self.model.named_modules():
            if isinstance(module, DecoderLayer):
                module.register_forward_hook(self._keep(f"hidden.{name.split('.')[1]}", lambda out: out.running))
            elif isinstance(module, Router):
                module.register_forward_hook(self._keep(f"choice.{name.split('.')[1]}", lambda out: out[0]))

    def _keep(self, key, pick):  # type: ignore[no-untyped-def]
        return lambda _module, _args, out: self.seen.update({key: pick(out)})

    def cache(self, num_slots: int) -> StateCache:
        layers, tp = self.model.layer_range, self.loaded.layout.tp
        cache = StateCache(
            self.loaded.spec, layers, num_slots=num_slots, max_tokens=40, dtype=self.model.dtype, tp_size=tp
        )
        for values in cache.tensors:
            values.fill_(float("nan"))  # whatever is read before it was written shows
        return cache

    def show(self, expected: Result, prompt: list[int]) -> None:
        """Encode the images that `prompt` holds, and place its tokens; for a model with a tower."""
        spec = self.loaded.spec
        if spec.vision is None:
            return
        patches, grids, features = expected["patches"], expected["grids"].tolist(), None
        if spec.vision.temporal_patch > 1:
            patches = torch.stack([patches] * spec.vision.temporal_patch, 2)
        if self.loaded.ctx.is_first_stage:
            with torch.no_grad():
                features = encode_images(self.model, self.loaded.ctx, patches, [(1, *grid) for grid in grids])
        merge, is_image = spec.vision.merge_size, [token == spec.tokens.media for token in prompt]
        places = image_positions(is_image, [(rows // merge, columns // merge) for rows, columns in grids])
        after = (places.max() + 1 + torch.arange(len(expected["greedy"]))).expand(3, -1)
        self.images = torch.tensor(is_image), features, torch.cat([places, after], 1)

    def with_images(self, batch: TokenBatch, slot_shown: int) -> TokenBatch:
        """The same batch with features at the image tokens in `slot_shown`, and the places of all tokens."""
        if self.images is None:
            return batch
        is_image, features, known = self.images
        segments, axes, rows, taken = Segments(batch), [], [], []
        for s, (slot, start, length) in enumerate(zip(batch.slots, batch.starts, batch.lengths, strict=True)):
            if slot != slot_shown:
                axes.append(torch.arange(start, start + length).expand(3, -1))
                continue
            axes.append(known[:, start : start + length])
            here = is_image[start : start + length].nonzero()[:, 0]
            rows.append(segments.offsets[s] + here)
            taken.append(is_image[:start].sum() + torch.arange(len(here)))
        batch = replace(batch, rope_positions=torch.cat(axes, 1))
        if not rows or not len(rows[0]) or features is None:
            return batch
        return replace(batch, image_rows=torch.cat(rows), image_features=features[torch.cat(taken)])

    def __call__(self, batch: TokenBatch, cache: StateCache | None = None, *, shown: int) -> Tensor | None:
        """Logits on the last stage, None on the others. `shown`: the slot of the prompt with the images."""
        batch = self.with_images(batch, shown)
        payload = self.pipeline.receive(batch.num_tokens)
        with torch.no_grad():
            out = self.model(batch, payload, cache)
        if self.loaded.ctx.is_last_stage:
            return out
        self.pipeline.send(out)
        return None


def batch_of(pieces: Sequence[tuple[int, int, Sequence[int]]], *, rows: Sequence[int] | None = None) -> TokenBatch:
    """Pieces of sequences as (slot, start, tokens); logits of every row unless told."""
    ids = [token for _, _, tokens in pieces for token in tokens]
    return TokenBatch(
        token_ids=torch.tensor(ids, dtype=torch.int64),
        lengths=tuple(len(tokens) for _, _, tokens in pieces),
        starts=tuple(start for _, start, _ in pieces),
        slots=tuple(slot for slot, _, _ in pieces),
        logit_rows=torch.tensor(range(len(ids)) if rows is None else rows, dtype=torch.int64),
    )


def batch_logits(loaded: LoadedModel, expected: Result) -> Result:
    """The "batch.logits" of `results_of` alone, on one rank."""
    run, prompts = _Run(loaded), prompts_of(expected)
    longest = max(prompts, key=len)
    run.show(expected, longest)
    logits = run(TokenBatch.whole(prompts, all_logits=True), shown=prompts.index(longest))
    assert logits is not None
    return {"batch.logits": logits}


def results_of(loaded: LoadedModel, expected: Result) -> Result:
    """Prefill of the longest prompt, a ragged batch without and with a cache, chunked prefill, decode, greedy tokens.

    Logits and choices appear on the ranks that have them. Keys: "batch.logits", "batch.choice.1", "cached.logits",
    "chunked.logits", "decoded.logits", "hidden.0", "greedy".
    """
    run, prompts, out = _Run(loaded), prompts_of(expected), {}
    longest = max(prompts, key=len)
    run.show(expected, longest)
    slot = prompts.index(longest)

    def keep(key: str, value: Tensor | None) -> None:
        if value is not None:
            out[key] = value

    batch = TokenBatch.whole(prompts, all_logits=True)
    keep("batch.logits", run(batch, shown=slot))
    out |= {f"batch.{key}": value for key, value in run.seen.items() if key.startswith("choice")}
    run(TokenBatch.whole([longest], all_logits=True), shown=0)
    out |= {key: value for key, value in run.seen.items() if key.startswith("hidden")}

    cache = run.cache(len(prompts) + 1)
    keep("cached.logits", run(batch, cache, shown=slot))
    # The longest again, in chunks and a slot of its own.
    parts = [run(batch_of([(4, i, longest[i : i + CHUNK])]), cache, shown=4) for i in range(0, len(longest), CHUNK)]
    if parts[0] is not None:
        out["chunked.logits"] = torch.cat([part for part in parts if part is not None])
    cache = run.cache(len(prompts))
    steps: list[Tensor] = []
    for i in range(max(len(ids) for ids in prompts)):  # all prompts side by side, one token each
        pieces = [(s, i, ids[i : i + 1]) for s, ids in enumerate(prompts) if i < len(ids)]
        logits = run(batch_of(pieces), cache, shown=slot)
        if logits is not None:
            steps.append(logits)
    if steps:
        by_prompt: list[list[Tensor]] = [[] for _ in prompts]
        for i, logits in enumerate(steps):
            for row, s in zip(logits, [s for s, ids in enumerate(prompts) if i < len(ids)], strict=True):
                by_prompt[s].append(row)
        out["decoded.logits"] = torch.stack([row for rows in by_prompt for row in rows])
    # Greedy from the recorded tokens, so that every stage knows the next one: each must be the most likely.
    greedy = expected["greedy"].tolist()
    found: list[int] = []
    logits = run(batch_of([(slot, 0, longest)], rows=[len(longest) - 1]), cache, shown=slot)
    for i, token in enumerate(greedy):
        if logits is not None:
            found.append(int(logits[0].argmax()))
        logits = run(batch_of([(slot, len(longest) + i, [token])]), cache, shown=slot)
    if found:
        out["greedy"] = torch.tensor(found)
    return out


def run_all(names: Sequence[str], layout: Layout) -> dict[str, Result]:
    """Results of every model on this rank, and what its ledger says, one process for all of them."""
    results = {}
    for name in names:
        loaded = load(name, layout)
        results[name] = results_of(loaded, expected_of(name))
        results[name]["bytes_read"] = torch.tensor(loaded.stats.bytes_read)
        results[name]["bytes_assigned"] = torch.tensor(loaded.stats.bytes_assigned)
        loaded.ctx.close()
    return results
