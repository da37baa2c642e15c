"""Computing steps: `RankRunner` is one rank's part, `LocalRunner` a whole model in this process."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from workbench.base import LayoutError, RequestError, WorkbenchError
from workbench.loading import ExpertMemory, load_sharded_weights
from workbench.nn import native
from workbench.nn.batch import TokenBatch
from workbench.nn.cache import Cache, StateCache
from workbench.nn.model import Model
from workbench.nn.snapshots import Snapshot
from workbench.nn.vision_rows import ImageRows
from workbench.parallel.mesh import RankContext
from workbench.parallel.pipeline import Pipeline
from workbench.parallel.vision import advance_image, begin_image, encode_images
from workbench.serving.inputs.images import normalise
from workbench.serving.sampler import sample_steps
from workbench.serving.steps import EncodeImage, RunnerInfo, SampledToken, SequenceStep, StepInput, runner_info
from workbench.spec import ModelSpec, check_kv_dtype

__all__ = ["LocalRunner", "RankRunner", "build_batch"]

# T new tokens of all sequences of this replica, D model width


class RankRunner:
    """One rank's share of every step of its replica: its pipeline stage, its cache, its images.

    All ranks of a replica get the same input. Sampling happens on the last stage, on the first rank of its tp group;
    `is_sampler` says whether this is it.
    """

    def __init__(
        self,
        model: Model,
        ctx: RankContext,
        *,
        num_slots: int,
        max_tokens: int,
        kv_dtype: str = "auto",
        cache_tokens: int | None = None,
        num_snapshots: int = 0,
    ) -> None:
        self.model, self.ctx, self.spec = model, ctx, model.spec
        self.info = runner_info(
            model.spec,
            ctx.layout,
            num_slots=num_slots,
            max_tokens=max_tokens,
            kv_dtype=kv_dtype,
            cache_tokens=cache_tokens,
            num_snapshots=num_snapshots,
        )
        self.cache = self.new_cache(
            num_slots, self.info.max_tokens, cache_tokens=cache_tokens, num_snapshots=num_snapshots
        )
        self.pipeline = Pipeline(model.spec, ctx, model.dtype)
        self.features: dict[str, Tensor] = {}  # image key -> (tokens, D), on the first stage
        self.begun: dict[str, ImageRows | None] = {}  # those that are half encoded; None where another rank does it
        self.pages: dict[str, Snapshot] = {}  # states behind kept beginnings of prompts, of this stage
        self.is_sampler = ctx.is_last_stage and ctx.coords.tp == 0

    def new_cache(
        self, num_slots: int, max_tokens: int, *, cache_tokens: int | None = None, num_snapshots: int = 0
    ) -> StateCache:
        return StateCache(
            self.spec,
            self.model.layer_range,
            num_slots=num_slots,
            max_tokens=max_tokens,
            dtype=self.model.dtype,
            device=self.ctx.device,
            tp_size=self.ctx.layout.tp,
            kv_dtype=self.info.kv_dtype,
            cache_tokens=cache_tokens,
            num_snapshots=num_snapshots,
        )

    @torch.inference_mode()
    def encode_images(self, images: Sequence[EncodeImage], rows: tuple[int, int] | None = None) -> None:
        """Features of images of this replica, kept under their keys; nothing to do on later stages.

        With `rows` (first, stop) those rows of the way of one image through the tower, whose features are kept with the
        last of them. Raises RequestError where the rows before were not computed.
        """
        if not images or not self.ctx.is_first_stage:
            return
        if rows is not None:
            (image,) = images
            self._encode_rows(image, *rows)
            return
        assert self.spec.image is not None
        pixels = self._pixels(np.concatenate([patches for _, patches, _ in images]))
        features = encode_images(self.model, self.ctx, pixels, [grid for _, _, grid in images])
        merge = self.spec.vision.merge_size if self.spec.vision is not None else 1
        counts = [grid[1] * grid[2] // merge**2 for _, _, grid in images]
        for (key, _, _), own in zip(images, features.split(counts), strict=True):
            self.features[key] = own

    def _encode_rows(self, image: EncodeImage, first: int, stop: int) -> None:
        key, patches, grid = image
        if first == 0:
            self.begun[key] = begin_image(self.model, self.ctx, self._pixels(patches), grid)
        rows = self.begun.get(key)
        if key not in self.begun or (rows is not None and rows.num_done != first):
            found = "not begun" if rows is None else f"{rows.num_done} rows"
            raise RequestError(f"image {key[:12]} cannot go on from row {first}", found=found)
        features = advance_image(self.model, self.ctx, rows, grid, stop)
        if features is not None:
            self.features[key] = features
            del self.begun[key]

    def _pixels(self, patches: np.ndarray) -> Tensor:
        assert self.spec.image is not None
        return torch.from_numpy(normalise(patches, self.spec.image)).to(self.ctx.device)

    def drop_images(self, keys: Collection[str]) -> None:
        for key in keys:
            self.features.pop(key, None)
            self.begun.pop(key, None)
            self._drop_page(key)

    def _drop_page(self, key: str) -> None:
        if (snapshot := self.pages.pop(key, None)) is not None:
            self.cache.snapshots.give_back(snapshot)

    def reset_slot(self, slot: int) -> None:
        self.cache.reset(slot)

    @torch.inference_mode()
    def step(self, steps: StepInput) -> list[SampledToken | WorkbenchError]:
        """Advance this replica. Tokens of the sequences that sample, in order, on the sampler; [] on other ranks.

        Raises RequestError for a chunk that does not fit its slot or would write rows of others, for pages that do not
        continue the slot's table, and for one that names an image that was not encoded or a page that is not kept.
        """
        self._deal(steps)
        self.cache.settle({step.slot: step.start for step in steps})
        for step in steps:
            if step.restore:
                self._restore(step)
        batch = build_batch(self.spec, steps, self._features(), device=self.ctx.device)
        self.cache.check(batch)  # on every stage before any of them waits for another
        logits = self.run(batch, self.cache)
        for step in steps:
            if step.save:
                stop = step.start + len(step.token_ids)
                self.cache.pages.seal(step.slot, stop - step.page_tokens, stop)
                self._drop_page(step.save)  # where two sequences came to the end of equal pages in one step
                self.pages[step.save] = self.cache.keep(step.slot)
        sampling = [step for step in steps if step.sample is not None]
        if logits is None or not self.is_sampler:
            return []
        return sample_steps(logits, sampling)

    def _deal(self, steps: StepInput) -> None:
        """Bring the slots' tables up to date."""
        if not steps:
            return
        page_tokens = steps[0].pool_page_tokens
        self.cache.use_pages(page_tokens)
        for step in steps:
            if step.pool_page_tokens != page_tokens:
                raise RequestError("pages of two sizes in one step", found=(page_tokens, step.pool_page_tokens))
            if step.pages:
                num_shared = max(0, step.start // page_tokens - step.first_page)
                self.cache.extend(step.slot, step.first_page, step.pages, num_shared=num_shared)

    def _restore(self, step: SequenceStep) -> None:
        missing = [key for key in step.restore if key not in self.pages]
        if missing or len(step.restore) * step.page_tokens != step.start:
            raise RequestError(
                f"{len(missing)} of {len(step.restore)} pages are not kept, for a chunk that starts at {step.start}"
            )
        self.cache.restore(step.slot, self.pages[step.restore[-1]])

    @torch.inference_mode()
    def logits_of(self, steps: StepInput, *, use_cache: bool = True) -> tuple[Tensor | None, StateCache | None]:
        """Logits (T, V) of every token of whole sequences in slots 0, 1, ..., and the cache that they filled.

        For comparison with a reference; the serving cache stays as it is. None on ranks before the last stage.
        """
        batch = build_batch(self.spec, steps, self._features(), device=self.ctx.device, all_logits=True)
        longest = max((len(step.token_ids) for step in steps), default=1)
        cache = self.new_cache(max(1, len(steps)), longest) if use_cache else None
        return self.run(batch, cache), cache

    def run(self, batch: TokenBatch, cache: Cache | None) -> Tensor | None:
        """One forward pass through this stage, with the exchange of payloads; logits on the last stage, else None."""
        payload = self.pipeline.receive(batch.num_tokens)
        out = self.model(batch, payload, cache)
        if self.ctx.is_last_stage:
            return out
        self.pipeline.send(out)
        return None

    def _features(self) -> dict[str, Tensor] | None:
        return self.features if self.ctx.is_first_stage else None


def build_batch(
    spec: ModelSpec,
    steps: StepInput,
    features: dict[str, Tensor] | None,
    *,
    device: torch.device | str = "cpu",
    all_logits: bool = False,
) -> TokenBatch:
    """The packed batch of one replica's sequences. `features` by image key; None where this stage embeds nothing.

    Raises RequestError for an image that is not among the features.
    """
    ids: list[int] = []
    logit_rows: list[int] = []
    zero_rows: list[int] = []
    image_rows: list[int] = []
    pieces: list[Tensor] = []
    for step in steps:
        offset = len(ids)
        ids += step.token_ids
        if all_logits:
            logit_rows += range(offset, len(ids))
        elif step.sample is not None:
            logit_rows += range(len(ids) - 1 - len(step.drafts), len(ids))
        if features is None:
            continue
        if step.has_images:
            zero_rows += [offset + i for i, token in enumerate(step.token_ids) if token == spec.tokens.pad]
        for span in step.images:
            pieces.append(_rows_of(features, span.key, span.first, span.count))
            image_rows += range(offset + span.row, offset + span.row + span.count)

    def table(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return TokenBatch(
        token_ids=table(ids),
        lengths=tuple(len(step.token_ids) for step in steps),
        starts=tuple(step.start for step in steps),
        slots=tuple(step.slot for step in steps),
        logit_rows=table(logit_rows),
        image_rows=table(image_rows) if pieces else None,
        image_features=torch.cat(pieces) if pieces else None,
        zero_rows=table(zero_rows) if zero_rows else None,
        tentative=tuple(s for s, step in enumerate(steps) if step.drafts or step.is_tentative),
    )


def _rows_of(features: dict[str, Tensor], key: str, first: int, count: int) -> Tensor:
    rows = features.get(key)
    if rows is None:
        raise RequestError(f"image {key[:12]} was not encoded before the step that needs it")
    if not 0 <= first <= first + count <= len(rows):
        raise RequestError(
            f"image {key[:12]} has {len(rows)} feature rows", found=f"rows {first} to {first + count} wanted"
        )
    return rows[first : first + count]


@dataclass(frozen=True)
class LocalRunner:
    """A whole model in this process, without a process group. Raises LayoutError for a rank of a larger layout."""

    rank: RankRunner

    def __post_init__(self) -> None:
        if self.rank.ctx.layout.world_size != 1:
            raise LayoutError(f"layout {self.rank.ctx.layout} needs other ranks", next_step="Use a Deployment")

    @property
    def info(self) -> RunnerInfo:
        return self.rank.info

    @property
    def is_intact(self) -> bool:
        """Always: one process is never out of step with itself."""
        return True

    @property
    def failure(self) -> WorkbenchError | None:
        return None

    def encode_images(self, replica: int, images: Sequence[EncodeImage]) -> None:
        assert replica == 0, replica
        self.rank.encode_images(images)

    def encode_rows(self, replica: int, image: EncodeImage, first: int, stop: int) -> None:
        assert replica == 0, replica
        self.rank.encode_images([image], (first, stop))

    def drop_images(self, replica: int, keys: Collection[str]) -> None:
        assert replica == 0, replica
        self.rank.drop_images(keys)

    def reset_slot(self, replica: int, slot: int) -> None:
        assert replica == 0, replica
        self.rank.reset_slot(slot)

    def step(self, inputs: Sequence[StepInput]) -> list[list[SampledToken | WorkbenchError]]:
        (steps,) = inputs
        return [self.rank.step(steps)]

    def close(self) -> None:
        """Nothing to end: the weights go with the object."""

    @classmethod
    def load(
        cls,
        model_path: Path | str,
        *,
        precision: str = "bf16",
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        num_slots: int = 8,
        max_tokens: int = 4096,
        kv_dtype: str = "auto",
        cache_tokens: int | None = None,
        num_snapshots: int = 0,
        expert_memory: ExpertMemory | None = None,
    ) -> LocalRunner:
        """Load a whole checkpoint into this process. `kv_dtype`: how rows of tokens are cached, see `nn.rows`;
        `cache_tokens` and `num_snapshots`: see `nn.cache`; `expert_memory`: how much of the experts is held, see
        `load_sharded_weights`.

        Raises as `load_sharded_weights`, and ConfigError for an unknown `kv_dtype`.
        """
        check_kv_dtype(kv_dtype)
        loaded = load_sharded_weights(
            model_path, precision=precision, dtype=dtype, device=device, expert_memory=expert_memory
        )
        loaded.model.eval().requires_grad_(False)
        runner = RankRunner(
            loaded.model,
            loaded.ctx,
            num_slots=num_slots,
            max_tokens=max_tokens,
            kv_dtype=kv_dtype,
            cache_tokens=cache_tokens,
            num_snapshots=num_snapshots,
        )
        # Steps may run in another thread, an engine's; with a team of this one beside it, more threads than cores, the
        # runtime would put workers to sleep between any two products.
        native.end_team()
        return cls(runner)
