"""Chats as token ids: K3's message form, which ids are to be learnt, the pictures' patches, and packing.

Only what the assistant says is learnt: the ids after an opened response up to and with the end of the message. In a
chat with thinking the think channel is opened instead, and thought and response are learnt.

    given    <|open|>message role="assistant"<|sep|><|open|>response<|sep|>
    learnt   A circle.<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>

Packs are made from (seed, step, micro step) alone, so a resumed run and every rank see the stream of an unbroken one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from workbench.base import ConfigError
from workbench.serving.inputs import ImageInput, ImageProcessor, Tokenizer, render_chat
from workbench.spec import ImageSpec
from workbench.training.data.chats import Chat, ChatKind, Mixture, make_chat
from workbench.training.data.domain import Fact
from workbench.training.data.scenes import scene_image

__all__ = ["PackedBatch", "Sample", "SampleStream", "pack_samples", "tokenise_chat"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """One chat as ids. `learnt` marks the ids to be predicted, each from all ids before it; the first is never one."""

    kind: ChatKind
    token_ids: NDArray[np.int64]  # (T,)
    learnt: NDArray[np.bool_]  # (T,)
    image_rows: NDArray[np.int64]  # (M,) rows whose embeddings are image features, image after image
    images: tuple[ImageInput, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedBatch:
    """Whole samples one behind another, in the shape of `nn.TokenBatch`, plus what training needs; numpy only.

    `logit_rows` are the rows whose next id is learnt and `targets` those ids: the loss is the mean of
    cross_entropy(logits[r], targets[r]). `image_rows` are in the order of the features of `patches`, grid after grid.
    """

    token_ids: NDArray[np.int64]  # (T,)
    lengths: tuple[int, ...]  # of the S samples; their sum is T
    logit_rows: NDArray[np.int64]  # (R,)
    targets: NDArray[np.int64]  # (R,)
    image_rows: NDArray[np.int64]  # (M,)
    patches: NDArray[np.uint8]  # (N, 3, p, p)
    grids: tuple[tuple[int, int, int], ...]  # (frames, rows, columns) of patches of each image
    kinds: tuple[ChatKind, ...]  # of the S samples

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class SampleStream:
    """Endless training packs. `pack(step, micro)` depends on nothing but the arguments and what is given here."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        facts: Sequence[Fact],
        *,
        seed: int,
        image_spec: ImageSpec | None = None,
        mixture: Mixture | None = None,
    ) -> None:
        self.seed = seed
        self.mixture = mixture or Mixture()
        self._facts = tuple(facts)
        self._tokenizer = _RememberingTokenizer(tokenizer)
        self._processor = ImageProcessor(image_spec or ImageSpec())

    def sample(self, rng: np.random.Generator) -> Sample:
        return tokenise_chat(make_chat(rng, self._facts, self.mixture), self._tokenizer, self._processor)

    def pack(self, step: int, micro: int = 0, *, token_budget: int) -> PackedBatch:
        """As many whole samples as fit in front of the first that does not. Raises ConfigError if not even one fits."""
        rng = np.random.default_rng((self.seed, step, micro))
        samples: list[Sample] = []
        left = token_budget
        while True:
            sample = self.sample(rng)
            left -= len(sample.token_ids)
            if left < 0:
                break
            samples.append(sample)
        if not samples:
            raise ConfigError(
                "a training sample is longer than the token budget",
                found=f"{len(sample.token_ids)} tokens",
                expected=f"at most {token_budget}",
                next_step="Raise the token budget of a pack; 1,024 holds any sample",
            )
        return pack_samples(samples)


def tokenise_chat(chat: Chat, tokenizer: Tokenizer, processor: ImageProcessor) -> Sample:
    """Ids of a chat that ends with an assistant's message, exactly as serving renders its history."""
    images = [processor.process(scene_image(scene)) for scene in chat.scenes]
    prompt = render_chat(chat.messages, tokenizer, images, thinking=chat.thinking)
    opening = render_chat([], tokenizer, thinking=chat.thinking).token_ids  # every prompt ends with it
    ids = prompt.token_ids[: -len(opening)]
    learnt = np.zeros(len(ids), np.bool_)
    start = 0
    while (start := _find(ids, opening, start)) >= 0:
        start += len(opening)
        end = ids.index(tokenizer.markers.end_of_msg, start) + 1
        learnt[start:end] = True
    rows = [row for span in prompt.image_spans for row in range(span.start, span.start + span.count)]
    return Sample(
        kind=chat.kind,
        token_ids=np.asarray(ids, np.int64),
        learnt=learnt,
        image_rows=np.asarray(rows, np.int64),
        images=tuple(images),
    )


def pack_samples(samples: Sequence[Sample]) -> PackedBatch:
    """One batch of all samples, in order. No id of one sample is ever predicted from another."""
    lengths = tuple(len(sample.token_ids) for sample in samples)
    offsets = np.cumsum((0, *lengths[:-1]))
    token_ids = np.concatenate([sample.token_ids for sample in samples])
    learnt_rows = np.concatenate([np.flatnonzero(s.learnt) + o for s, o in zip(samples, offsets, strict=True)])
    images = [image for sample in samples for image in sample.images]
    patch_shape = images[0].patches.shape[1:] if images else (3, 0, 0)
    return PackedBatch(
        token_ids=token_ids,
        lengths=lengths,
        logit_rows=learnt_rows - 1,  # never in the sample before: its own opening stands in front of an answer
        targets=token_ids[learnt_rows],
        image_rows=np.concatenate([s.image_rows + o for s, o in zip(samples, offsets, strict=True)]),
        patches=np.concatenate([i.patches for i in images]) if images else np.empty((0, *patch_shape), np.uint8),
        grids=tuple(image.grid for image in images),
        kinds=tuple(sample.kind for sample in samples),
    )


def _find(ids: Sequence[int], wanted: Sequence[int], start: int) -> int:
    for place in range(start, len(ids) - len(wanted) + 1):
        if ids[place] == wanted[0] and tuple(ids[place : place + len(wanted)]) == tuple(wanted):
            return place
    return -1


class _RememberingTokenizer(Tokenizer):
    """The same tokenizer with its recent encodings kept: the language is small and the message form repeats."""

    def __init__(self, inner: Tokenizer) -> None:
        self.__dict__.update(inner.__dict__)
        self._remembered = lru_cache(maxsize=1 << 15)(inner.encode)

    def encode(self, text: str) -> list[int]:
        return list(self._remembered(text))
