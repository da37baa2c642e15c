"""Faults in the ranks: each does what it says to the requests it is meant for, and is gone when it is lifted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from workbench.base import DeploymentError, ImageError, RequestFailedError
from workbench.day0.faults import ranks
from workbench.day0.faults.ranks import REFUSED_PICTURE, REFUSED_TEXT, lift, plant
from workbench.serving import SamplingParams
from workbench.serving.steps import SampledToken, SequenceStep

SHORT, LONG = SamplingParams(max_tokens=2), SamplingParams(max_tokens=3)
PATCHES = np.full((4, 3, 2, 2), 7, np.uint8)


class Runner:
    """Notes what it is given; a step gives each sequence that samples the id of its slot."""

    info = SimpleNamespace(vocab_size=10)

    def __init__(self) -> None:
        self.steps: list[SequenceStep] = []
        self.pictures: list[np.ndarray] = []

    def step(self, steps: tuple[SequenceStep, ...]) -> list[SampledToken]:
        self.steps += steps
        return [SampledToken(token_id=step.slot, logprob=0.0) for step in steps if step.sample]

    def encode_images(self, images: list[Any]) -> None:
        self.pictures += [patches for _, patches, _ in images]


@pytest.fixture
def commands() -> Any:
    return SimpleNamespace(runner=Runner())


def decode(slot: int, token: int, step_idx: int = 1, sample: SamplingParams = LONG) -> SequenceStep:
    return SequenceStep(slot=slot, start=5, token_ids=(token,), sample=sample, step_idx=step_idx)


def prompt(slot: int, sample: SamplingParams = LONG, *, has_images: bool = False) -> SequenceStep:
    return SequenceStep(slot=slot, start=0, token_ids=(1, 2, 9), sample=sample, has_images=has_images)


def test_generated_tokens_are_misread_and_prompts_are_not(commands: Any) -> None:
    plant(commands, fault="misread")
    commands.runner.step((prompt(0), decode(1, 3), decode(2, 9)))
    assert [step.token_ids for step in commands.runner.steps] == [(1, 2, 9), (4,), (0,)]


def test_tokens_of_a_batch_go_to_the_next_and_one_alone_keeps_its_own(commands: Any) -> None:
    plant(commands, fault="mix up")
    assert [token.token_id for token in commands.runner.step((prompt(3), decode(5, 1), decode(7, 1)))] == [7, 3, 5]
    assert [token.token_id for token in commands.runner.step((prompt(3),))] == [3]
    assert commands.runner.step((SequenceStep(slot=0, start=0, token_ids=(1,)),)) == []


def test_only_texts_that_ask_for_so_many_tokens_are_refused(commands: Any) -> None:
    plant(commands, fault="refuse text", num_tokens=3)
    refused, other, seen = commands.runner.step((prompt(0), prompt(1, SHORT), prompt(2, has_images=True)))
    assert isinstance(refused, RequestFailedError)
    assert str(refused) == REFUSED_TEXT
    assert (other.token_id, seen.token_id) == (1, 2)


def test_pictures_are_refused_where_there_are_any(commands: Any) -> None:
    plant(commands, fault="refuse pictures")
    commands.runner.encode_images([])
    with pytest.raises(ImageError, match=REFUSED_PICTURE):
        commands.runner.encode_images([("key", PATCHES, (1, 2, 2))])
    assert commands.runner.pictures == []


def test_a_blind_tower_sees_black(commands: Any) -> None:
    plant(commands, fault="blind")
    commands.runner.encode_images([("key", PATCHES, (1, 2, 2))])
    (seen,) = commands.runner.pictures
    assert seen.shape == PATCHES.shape
    assert not seen.any()
    assert PATCHES.all()


def test_tokens_of_the_request_of_that_number_are_late_and_no_others(
    commands: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(ranks.time, "sleep", slept.append)
    plant(commands, fault="late", first_s=4.0, next_s=0.5, num_tokens=3, number=2)
    for step in (prompt(0, SHORT), prompt(0), decode(0, 1), decode(0, 1, 2)):
        commands.runner.step((step,))
    assert slept == []
    for step in (prompt(1), decode(1, 1), decode(1, 1, 2), prompt(2), decode(2, 1)):
        commands.runner.step((step,))
    assert slept == [4.0, 0.5, 0.5]


def test_what_was_planted_is_lifted_and_an_unknown_fault_is_refused(commands: Any) -> None:
    for fault in ("misread", "mix up", "blind"):
        plant(commands, fault=fault)
    lift(commands)
    commands.runner.step((decode(1, 3),))
    commands.runner.encode_images([("key", PATCHES, (1, 2, 2))])
    assert commands.runner.steps[0].token_ids == (3,)
    assert commands.runner.pictures[0] is PATCHES
    lift(commands)  # once more does no harm
    with pytest.raises(DeploymentError, match="no fault 'bad luck'"):
        plant(commands, fault="bad luck")
