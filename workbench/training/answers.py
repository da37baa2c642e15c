"""Greedy answers to many questions at once: one ragged prefill, then all sequences step together until all have ended.

Works under every layout a model can be trained in: the ranks of a replica advance in step, and replicas whose experts
are spread over several of them go on with empty batches until the slowest has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from workbench.nn.batch import TokenBatch
from workbench.nn.cache import StateCache
from workbench.nn.model import Model
from workbench.parallel import Pipeline, RankContext, encode_images
from workbench.serving.inputs import ImageInput, ImageProcessor, Tokenizer, normalise, parse_answer, render_chat
from workbench.training.config import MAX_NEW_TOKENS
from workbench.training.data.exam import ExamItem
from workbench.training.data.scenes import scene_image

__all__ = ["MAX_NEW_TOKENS", "answer_items", "answered_batches"]


def answer_items(
    model: Model,
    ctx: RankContext,
    tokenizer: Tokenizer,
    items: Sequence[ExamItem],
    *,
    thinking: bool = False,
    max_new_tokens: int = MAX_NEW_TOKENS,
    batch_size: int = 64,
) -> list[str]:
    """The replies to `items`, which are this replica's: the same on all its ranks, as many as they like on others.

    With `thinking` the model thinks before each reply; what it thinks is no part of it.
    """
    replies: list[str] = []
    num_batches = -(-len(items) // batch_size)
    for start in range(0, int(_most(ctx, num_batches)) * batch_size, batch_size):
        replies += _Exam(model, ctx, tokenizer, items[start : start + batch_size], thinking, max_new_tokens).run()
    return replies


def answered_batches(
    model: Model,
    ctx: RankContext,
    tokenizer: Tokenizer,
    items: Sequence[ExamItem],
    *,
    thinking: bool = False,
    max_new_tokens: int = MAX_NEW_TOKENS,
    batch_size: int = 64,
) -> list[TokenBatch]:
    """The items with the model's own greedy answers behind them, as whole sequences: read again, a batch gives the
    logits from which each token of the answers was taken. For one pipeline stage."""
    batches = []
    for start in range(0, len(items), batch_size):
        exam = _Exam(model, ctx, tokenizer, items[start : start + batch_size], thinking, max_new_tokens)
        exam.run()
        batches.append(exam.answered())
    return batches


class _Exam:
    """One batch of questions."""

    def __init__(
        self,
        model: Model,
        ctx: RankContext,
        tokenizer: Tokenizer,
        items: Sequence[ExamItem],
        thinking: bool,
        max_new_tokens: int,
    ) -> None:
        self.model, self.ctx, self.tokenizer = model, ctx, tokenizer
        self.thinking, self.max_new_tokens = thinking, max_new_tokens
        assert model.spec.image is not None
        processor = ImageProcessor(model.spec.image)
        self.images = [[processor.process(scene_image(item.scene))] if item.scene else [] for item in items]
        self.prompts = [
            render_chat(item.messages, tokenizer, images, thinking=thinking)
            for item, images in zip(items, self.images, strict=True)
        ]
        self.new: list[list[int]] = [[] for _ in items]
        longest = max((len(prompt.token_ids) for prompt in self.prompts), default=1)
        self.cache = StateCache(
            model.spec,
            model.layer_range,
            num_slots=max(1, len(items)),
            max_tokens=longest + max_new_tokens,
            dtype=model.dtype,
            device=ctx.device,
            tp_size=ctx.layout.tp,
        )
        self.pipeline = Pipeline(model.spec, ctx, model.dtype)

    @torch.inference_mode()
    def run(self) -> list[str]:
        active = list(range(len(self.prompts)))
        batch = self._prefill()
        while True:
            for idx, token in zip(active, self._advance(batch), strict=True):
                self.new[idx].append(token)
            stops = self.tokenizer.stop_ids
            active = [i for i in active if self.new[i][-1] not in stops and len(self.new[i]) < self.max_new_tokens]
            if not _most(self.ctx, len(active)):
                break
            batch = self._decode(active)
        return [parse_answer(ids, self.tokenizer, thinking=self.thinking).response for ids in self.new]

    def _advance(self, batch: TokenBatch) -> list[int]:
        """One pass; the likeliest next token of each sequence, the same on all ranks of the replica."""
        out = self.model(batch, self.pipeline.receive(batch.num_tokens), self.cache)
        chosen = torch.zeros(len(batch.lengths), dtype=torch.int64, device=self.ctx.device)
        if self.ctx.is_last_stage:
            chosen = out.argmax(-1)
        else:
            self.pipeline.send(out)
        if not len(batch.lengths):
            return []
        tokens: list[int] = self.ctx.pp.broadcast(chosen, self.ctx.pp.size - 1).tolist()
        return tokens

    def answered(self) -> TokenBatch:
        """After `run`: every prompt and what was answered, the last token aside, which nothing follows."""
        rows: list[int] = []
        offset = 0
        sequences = [[*p.token_ids, *new[:-1]] for p, new in zip(self.prompts, self.new, strict=True)]
        for prompt, sequence in zip(self.prompts, sequences, strict=True):
            rows += range(offset + len(prompt.token_ids) - 1, offset + len(sequence))
            offset += len(sequence)
        batch = self._with_images(TokenBatch.whole(sequences, device=self.ctx.device))
        return replace(batch, logit_rows=torch.tensor(rows, device=self.ctx.device))

    def _prefill(self) -> TokenBatch:
        whole = TokenBatch.whole([list(p.token_ids) for p in self.prompts], device=self.ctx.device)
        return self._with_images(whole) if self.ctx.is_first_stage else whole

    @torch.inference_mode()
    def _with_images(self, batch: TokenBatch) -> TokenBatch:
        images = [image for group in self.images for image in group]
        if not images:
            return batch
        rows, offset = [], 0
        for prompt, length in zip(self.prompts, batch.lengths, strict=True):
            rows += [offset + r for span in prompt.image_spans for r in range(span.start, span.start + span.count)]
            offset += length
        image_rows = torch.tensor(rows, device=self.ctx.device)
        return replace(batch, image_rows=image_rows, image_features=self._features(images))

    def _features(self, images: Sequence[ImageInput]) -> Tensor:
        assert self.model.spec.image is not None
        patches = normalise(np.concatenate([image.patches for image in images]), self.model.spec.image)
        grids = [image.grid for image in images]
        return encode_images(self.model, self.ctx, torch.from_numpy(patches).to(self.ctx.device), grids)

    def _decode(self, active: Sequence[int]) -> TokenBatch:
        lengths = [len(self.prompts[i].token_ids) + len(self.new[i]) for i in active]
        return TokenBatch(
            token_ids=torch.tensor([self.new[i][-1] for i in active], dtype=torch.int64, device=self.ctx.device),
            lengths=(1,) * len(active),
            starts=tuple(length - 1 for length in lengths),
            slots=tuple(active),
            logit_rows=torch.arange(len(active), device=self.ctx.device),
        )


def _most(ctx: RankContext, count: int) -> int:
    """The largest count among the replicas that must stay in step with this one."""
    return max(ctx.expert_gather.row_counts(count, ctx.device))
