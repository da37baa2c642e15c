"""What a caller asks for, and the limits it is held to before anything is queued."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from workbench.base import PromptTooLongError, RequestError

if TYPE_CHECKING:
    from workbench.serving.steps import RunnerInfo

__all__ = ["Constraint", "GenerationRequest", "PlacedImage", "SamplingParams", "check_request"]

MAX_SEED = 2**64 - 1
MAX_LOGPROBS = 20  # as many as the usual interfaces ask for


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to stop.

    `temperature` 0 takes the most likely token. `top_k` 0 and `top_p` 1 switch those filters off; where both are on,
    top_p cuts what top_k left, and `min_p` drops what is less likely than that share of the most likely. Equal `seed`s
    give equal tokens for equal logits, whatever else runs at the same time.

    Penalties change the logits before all that: `repetition_penalty` divides positive ones and multiplies negative ones
    of ids in the prompt or the answer, `presence_penalty` is taken once from each id of the answer, `frequency_penalty`
    once per occurrence. `num_logprobs` likeliest ids are told with each token.

    Generation ends after `max_tokens`, or earlier at one of `stop_ids`, none of which is chosen among the first
    `min_tokens` tokens while anything else may come. Raises RequestError for a value out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    max_tokens: int = 256
    stop_ids: tuple[int, ...] = ()
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    num_logprobs: int = 0
    min_tokens: int = 0

    @property
    def needs_history(self) -> bool:
        """Whether the choice depends on the tokens before it."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p=0 leaves no token", expected="0 < top_p <= 1", next_step="Use temperature=0")
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _number("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _number("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        _integer("num_logprobs", self.num_logprobs, 0, MAX_LOGPROBS)
        _integer("top_k", self.top_k, 0, 1 << 31)
        _integer("seed", self.seed, 0, MAX_SEED)
        _integer("max_tokens", self.max_tokens, 1, 1 << 31)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        for stop_id in self.stop_ids:
            _integer("stop_ids", stop_id, 0, 1 << 31)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlacedImage:
    """An image and the prompt rows [row, row + count) that its features fill.

    `key` names the content: equal keys must mean equal patches and grid, for features are shared by key.
    """

    key: str
    patches: np.ndarray  # (N, 3, p, p) uint8
    grid: tuple[int, int, int]
    row: int
    count: int

    @property
    def stop(self) -> int:
        return self.row + self.count


class Constraint(Protocol):
    """Which ids an answer may go on with. It follows one answer, so each request needs its own."""

    @property
    def error(self) -> str | None: ...

    def allowed(self) -> bytes:
        """One bit per id, in little-endian words of 32; empty where all may come."""

    def accept(self, token_id: int) -> None:
        """The id that came."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GenerationRequest:
    """A prompt as token ids, each image already expanded to one placeholder id per feature row.

    Of those that wait, the higher `priority` goes first; it may take the slot of a lower one, which goes on later where
    it was. Of one priority, the tenant that holds the fewest slots for its `weight` has the next one. Beginnings of
    prompts are shared within a `tenant` only.
    """

    token_ids: tuple[int, ...]
    images: tuple[PlacedImage, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    constraint: Constraint | None = None
    priority: int = 0
    tenant: str = ""
    weight: float = 1.0

    @property
    def num_image_tokens(self) -> int:
        return sum(image.count for image in self.images)


def check_request(request: GenerationRequest, info: RunnerInfo) -> None:
    """Raises RequestError where the request cannot be run as it stands, PromptTooLongError with what would fit."""
    num_prompt, num_new = len(request.token_ids), request.sampling.max_tokens
    if not num_prompt:
        raise RequestError("the prompt is empty", expected="at least one token")
    _number("weight", request.weight, 1e-3, 1e3)
    # The last generated token is never fed back, so it needs no room.
    if num_prompt + num_new - 1 > info.max_tokens:
        room = info.max_tokens - num_prompt + 1
        raise PromptTooLongError(
            f"the prompt of {num_prompt} tokens and {num_new} new ones do not fit into {info.max_tokens}",
            next_step=f"Ask for at most {room} new tokens" if room > 0 else "Shorten the prompt",
        )
    for row, token_id in enumerate(request.token_ids):
        if not 0 <= token_id < info.vocab_size:
            raise RequestError(
                f"prompt token {row} is outside the vocabulary", found=token_id, expected=f"0..{info.vocab_size - 1}"
            )
    _check_images(request, info)


def _check_images(request: GenerationRequest, info: RunnerInfo) -> None:
    if request.images and not info.has_vision:
        raise RequestError("the prompt has images, but this model has no vision tower")
    filled = 0
    for number, image in enumerate(request.images):
        if image.count < 1 or image.row < filled or image.stop > len(request.token_ids):
            raise RequestError(
                f"image {number} fills prompt rows [{image.row}, {image.stop})",
                expected=f"a range inside [{filled}, {len(request.token_ids)}), images in order",
            )
        filled = image.stop


def _number(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < math.inf:
        raise RequestError(f"{name} is not a finite number", found=repr(value))
    if not low <= value <= high:
        raise RequestError(f"{name} is out of range", found=value, expected=f"{low:g} to {high:g}")


def _integer(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} is not an integer", found=repr(value))
    if not low <= value <= high:
        raise RequestError(f"{name} is out of range", found=value, expected=f"{low} to {high}")
