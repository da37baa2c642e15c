"""Faults in what ranks do with a request: called on each of them through `Deployment.call`, and taken out again.

    deployment.call("workbench.day0.faults.ranks:plant", {"fault": "blind"})
    deployment.call("workbench.day0.faults.ranks:lift")

`plant` puts a function in the place of the rank's own step or image encoder; more than one fault may be planted, in
the order in which a step should meet them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from workbench.base import DeploymentError, ImageError, RequestFailedError, WorkbenchError
from workbench.deployment.commands import RankCommands
from workbench.serving.runner import RankRunner
from workbench.serving.steps import EncodeImage, SampledToken, SequenceStep, StepInput

__all__ = ["FAULTS", "REFUSED_PICTURE", "REFUSED_TEXT", "lift", "plant"]

REFUSED_TEXT = "planted: the logits of this text are not finite"
REFUSED_PICTURE = "planted: the vision tower takes no picture"

Sampled = list[SampledToken | WorkbenchError]
Step = Callable[[StepInput], Sampled]
Encode = Callable[..., None]  # images, and which rows of one where it is encoded in parts


def plant(commands: RankCommands, *, fault: str, **options: Any) -> None:
    """Plant `fault` on this rank. Raises DeploymentError for a name that is not among `FAULTS`."""
    if fault not in FAULTS:
        raise DeploymentError(f"no fault {fault!r}", expected=", ".join(FAULTS))
    FAULTS[fault](commands.runner, **options)


def lift(commands: RankCommands) -> None:
    """Take out whatever was planted; does nothing where nothing was."""
    for name in ("step", "encode_images"):
        vars(commands.runner).pop(name, None)


def _misread(runner: RankRunner) -> None:
    """A generated token is read as its neighbour in the vocabulary when its turn comes; prompts are read right."""

    def misread(step: SequenceStep) -> SequenceStep:
        if not step.step_idx:
            return step
        return replace(step, token_ids=tuple((token + 1) % runner.info.vocab_size for token in step.token_ids))

    _before_step(runner, lambda steps: tuple(map(misread, steps)))


def _mix_up(runner: RankRunner) -> None:
    """Tokens of sequences that step together go to the wrong ones, each to the next."""
    _after_step(runner, lambda steps, sampled: sampled[-1:] + sampled[:-1])


def _refuse_text(runner: RankRunner, *, num_tokens: int) -> None:
    """No token for a text request that asks for so many."""

    def refuse(steps: StepInput, sampled: Sampled) -> Sampled:
        return [
            RequestFailedError(REFUSED_TEXT) if not x.has_images and _asked(x) == num_tokens else token
            for x, token in zip(_sampling(steps), sampled, strict=True)
        ]

    _after_step(runner, refuse)


def _refuse_pictures(runner: RankRunner) -> None:
    """No picture can be encoded."""

    def refuse(encode: Encode, images: Sequence[EncodeImage], *rows: tuple[int, int]) -> None:
        if images:
            raise ImageError(REFUSED_PICTURE)
        encode(images, *rows)

    runner.encode_images = partial(refuse, runner.encode_images)  # type: ignore[method-assign]


def _blind(runner: RankRunner) -> None:
    """Every picture is black by the time the vision tower sees it."""

    def darken(encode: Encode, images: Sequence[EncodeImage], *rows: tuple[int, int]) -> None:
        encode([(key, np.zeros_like(patches), grid) for key, patches, grid in images], *rows)

    runner.encode_images = partial(darken, runner.encode_images)  # type: ignore[method-assign]


def _be_late(runner: RankRunner, *, first_s: float, next_s: float, num_tokens: int, number: int) -> None:
    """Of the requests that ask for so many tokens, which come one after another, that of this number (from 1) waits
    `first_s` for its first one and `next_s` for each that follows."""
    num_requests = 0

    def wait(steps: StepInput) -> StepInput:
        nonlocal num_requests
        for step in _sampling(steps):
            if _asked(step) != num_tokens:
                continue
            num_requests += step.step_idx == 0
            if num_requests == number:
                time.sleep(next_s if step.step_idx else first_s)
        return steps

    _before_step(runner, wait)


FAULTS: dict[str, Callable[..., None]] = {
    "misread": _misread,
    "mix up": _mix_up,
    "refuse text": _refuse_text,
    "refuse pictures": _refuse_pictures,
    "blind": _blind,
    "late": _be_late,
}


def _sampling(steps: StepInput) -> list[SequenceStep]:
    return [step for step in steps if step.sample is not None]


def _asked(step: SequenceStep) -> int:
    """Tokens that the request of a sampling step asks for."""
    return step.sample.max_tokens if step.sample is not None else 0


def _before_step(runner: RankRunner, change: Callable[[StepInput], StepInput]) -> None:
    step: Step = runner.step
    runner.step = lambda steps: step(change(steps))  # type: ignore[method-assign]


def _after_step(runner: RankRunner, change: Callable[[StepInput, Sampled], Sampled]) -> None:
    """`change` what comes of a step, on the rank that samples: the others have nothing to change."""
    step: Step = runner.step

    def changed(steps: StepInput) -> Sampled:
        sampled = step(steps)
        return change(steps, sampled) if sampled else sampled

    runner.step = changed  # type: ignore[method-assign]
