"""What one step of the model takes and gives, as plain data: the border between scheduling and computing.

A step carries new tokens of several sequences. The engine decides what goes in; a `Runner` computes it, in this process
or on many ranks. Nothing here needs torch, so that the process that schedules need not touch a device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from workbench.base import RequestError, WorkbenchError
from workbench.placement import Layout
from workbench.serving.requests import SamplingParams
from workbench.spec import EncodingCost, ModelSpec, ReadingCost, check_kv_dtype, encoding_cost, reading_cost

__all__ = [
    "Draft",
    "EncodeImage",
    "ImageSpan",
    "Recovering",
    "Runner",
    "RunnerInfo",
    "SampledToken",
    "SequenceStep",
    "StepInput",
    "runner_info",
]

# Key of the content, patches (N, 3, p, p) uint8, grid (frames, rows, columns) in patches.
EncodeImage = tuple[str, np.ndarray, tuple[int, int, int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSpan:
    """`count` feature rows of image `key`, from feature row `first`, replace the tokens from `row` of this chunk on."""

    key: str
    row: int
    first: int
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A guessed token. `support` has the ids and probabilities of what it was drawn from, summing to 1; empty where it
    was not drawn at all, but looked up or the likeliest."""

    token_id: int
    support: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceStep:
    """New tokens of one sequence: a chunk of its prompt, or the token it generated last.

    `start` tokens of the sequence are in `slot` already. `has_images` says that the chunk belongs to a prompt with
    images, whose pad tokens enter as zeros. With `sample` set the last row's logits give the sequence's next token,
    number `step_idx` of those it generates.

    `history` is there where `sample` needs it: int32 ids of the whole sequence, of which the last `step_idx` were
    generated. `allowed` has one bit per id, in little-endian words of 32: those that may be chosen; empty means all.

    Where rows lie in pages of a pool, of `pool_page_tokens` each (0: every slot has rows of its own), `pages` are those
    that the slot's table gets from entry `first_page` on, before the chunk is read.

    `restore` has the keys of kept pages that hold the `start` tokens before this chunk, first page first: their rows
    come with `pages`, and the state behind the last of them is copied into the slot. With `save` set, the state behind
    the chunk is kept under that key; the last `page_tokens` tokens up to there are not written again.

    With `drafts` the last tokens of the chunk are guesses, behind at least one that is certain, and each token from the
    last certain one on gives logits. A chunk with guesses, or one that `is_tentative` altogether, leaves the state of
    its slot where it was: the next chunk says by its `start` how many of these tokens came true.
    """

    slot: int
    start: int
    token_ids: tuple[int, ...]
    images: tuple[ImageSpan, ...] = ()
    has_images: bool = False
    sample: SamplingParams | None = None
    step_idx: int = 0
    history: bytes = b""
    allowed: bytes = b""
    restore: tuple[str, ...] = ()
    save: str = ""
    page_tokens: int = 0
    pages: tuple[int, ...] = ()
    first_page: int = 0
    pool_page_tokens: int = 0
    drafts: tuple[Draft, ...] = ()
    is_tentative: bool = False


StepInput = tuple[SequenceStep, ...]  # of one data-parallel replica; empty where it has nothing to do


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledToken:
    """A chosen token and its natural-log probability under the unmodified distribution.

    `top` has the likeliest ids with theirs, best first, as many as the sampling parameters ask for. `accepted` are the
    guesses before it that hold, in order.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    accepted: tuple[SampledToken, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerInfo:
    """What the engine must know of a runner. Each replica holds `num_slots` sequences of `max_tokens` cached tokens.

    `kv_dtype`: how rows of tokens are held there, one of `spec.KV_DTYPES`. `cache_tokens`: rows of a pool that all
    slots of a replica share; 0: each slot has its own. `num_snapshots`: room for states of kept prefixes. `reading`:
    what chunks of prompts cost; None where they cost by their tokens alone. `encoding`: what pictures cost, whose rows
    may come one after another; None where each is encoded whole.
    """

    dp: int
    num_slots: int
    max_tokens: int
    vocab_size: int
    has_vision: bool
    stop_ids: tuple[int, ...] = ()  # tokens with which the model ends its answer
    kv_dtype: str = "auto"
    cache_tokens: int = 0
    num_snapshots: int = 0
    reading: ReadingCost | None = None
    encoding: EncodingCost | None = None

    @property
    def num_rows(self) -> int:
        """Tokens that the cache of a replica holds."""
        return self.cache_tokens or self.num_slots * self.max_tokens


@runtime_checkable
class Recovering(Protocol):
    """A runner that can replace what has broken."""

    def recover(self, is_wanted: Callable[[], bool]) -> None:
        """Begin anew, with empty slots, no images and no pages; takes as long as loading does.

        Raises DeploymentError where that is given up, and soon after `is_wanted` says no.
        """


def runner_info(
    spec: ModelSpec,
    layout: Layout,
    *,
    num_slots: int,
    max_tokens: int,
    kv_dtype: str = "auto",
    cache_tokens: int | None = None,
    num_snapshots: int = 0,
) -> RunnerInfo:
    """What the engine may count on. A pool of fewer than `max_tokens` rows bounds the length of a sequence.

    Raises RequestError for a size below 1 or beyond the model's context, ConfigError for an unknown `kv_dtype`.
    """
    check_kv_dtype(kv_dtype)
    if num_slots < 1 or not 1 <= max_tokens <= spec.max_context:
        raise RequestError(
            f"num_slots={num_slots}, max_tokens={max_tokens}",
            expected=f"at least one slot, and 1 to {spec.max_context} tokens, the model's context",
        )
    if (cache_tokens is not None and cache_tokens < 1) or num_snapshots < 0:
        raise RequestError(
            f"cache_tokens={cache_tokens}, num_snapshots={num_snapshots}",
            expected="a pool of at least one token, and no fewer than 0 snapshots",
        )
    return RunnerInfo(
        dp=layout.dp,
        num_slots=num_slots,
        max_tokens=max_tokens if cache_tokens is None else min(max_tokens, cache_tokens),
        vocab_size=spec.vocab_size,
        has_vision=spec.vision is not None,
        stop_ids=(spec.tokens.eos,),
        kv_dtype=kv_dtype,
        cache_tokens=cache_tokens or 0,
        num_snapshots=num_snapshots,
        reading=reading_cost(spec),
        encoding=encoding_cost(spec),
    )


class Runner(Protocol):
    """Computes steps. Calls come one at a time.

    After an exception `is_intact` says whether it goes on: True where all ranks are there and in step with each other,
    so that only what was asked of them failed. What the slots of a failed step hold is unknown then, until they are
    reset. False: nothing works any more.
    """

    @property
    def info(self) -> RunnerInfo: ...

    @property
    def is_intact(self) -> bool: ...

    @property
    def failure(self) -> WorkbenchError | None:
        """What has broken it, known also while nothing is asked of it; None where nothing has."""

    def encode_images(self, replica: int, images: Sequence[EncodeImage]) -> None:
        """Compute and keep the features of images under their keys, for steps of that replica to refer to."""

    def encode_rows(self, replica: int, image: EncodeImage, first: int, stop: int) -> None:
        """Compute rows [first, stop) of all layers' rows of one image, those before having been computed; with the last
        its features are kept. Only with `info.encoding`. Patches are looked at where `first` is 0."""

    def drop_images(self, replica: int, keys: Collection[str]) -> None:
        """Forget features of images, those that are half encoded, and kept pages; unknown keys are ignored."""

    def reset_slot(self, replica: int, slot: int) -> None:
        """Clear a slot before a new sequence enters it; it has no pages then."""

    def step(self, inputs: Sequence[StepInput]) -> Sequence[Sequence[SampledToken | WorkbenchError]]:
        """Advance all replicas together: one input each, one list each, in the order of its sequences that sample.

        In place of a token stands the error of a sequence that has none, such as logits that are not finite; the others
        are not touched by it.
        """

    def close(self) -> None: ...
