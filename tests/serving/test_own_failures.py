"""A failure belongs to one request or to all of them: who ends, who goes on, and that nothing is left behind."""

from __future__ import annotations

import pytest
from serving_fakes import EchoRunner, echo_of, placed_image

from workbench.base import DeploymentError, ImageError, RequestError, RequestFailedError, WorkerDiedError
from workbench.serving.engine import Engine
from workbench.serving.generation import TokenEvent
from workbench.serving.requests import GenerationRequest, SamplingParams
from workbench.serving.sampler import sample_steps
from workbench.serving.steps import SequenceStep

pytestmark = pytest.mark.timeout(60)


def request(prompt, max_tokens=4, images=(), **options) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=max_tokens)
    return GenerationRequest(token_ids=tuple(prompt), images=tuple(images), sampling=sampling, **options)


def run_all(engine: Engine, limit: int = 500) -> None:
    for _ in range(limit):
        if not engine.step_once():
            break
        engine.scheduler.check()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_slots == engine.info.num_slots * engine.info.dp
    assert engine.error is None


def tokens_of(generation) -> list[int]:
    return [event.token_id for event in generation]


# pictures


@pytest.mark.parametrize("dp", [1, 2])
def test_a_picture_that_cannot_be_encoded_ends_its_request_and_nothing_else(dp):
    runner = EchoRunner(dp=dp, is_intact=True, bad_images={"bad"})
    engine = Engine(runner, step_tokens=16)
    before = engine.submit(request([1, 2, 3], 6))
    bad = engine.submit(request([5] * 6, images=[placed_image("bad", 1, 3)]))
    good = engine.submit(request([6] * 6, images=[placed_image("good", 1, 3)]))
    run_all(engine)
    after = engine.submit(request([7, 8], 3))
    run_all(engine)
    with pytest.raises(RequestFailedError, match="ZeroDivisionError: rank 1 cannot encode bad"):
        list(bad)
    assert bad.finish.num_tokens == 0
    assert tokens_of(before) == echo_of([1, 2, 3], 6)
    assert tokens_of(good) == [6, 1000 * runner.numbers["good"], *(1000 * runner.numbers["good"] + i for i in (1, 2))]
    assert tokens_of(after) == [7, 8, 7]


def test_the_second_of_two_pictures_ends_a_request_that_has_read_the_first_and_both_are_dropped():
    runner = EchoRunner(is_intact=True, bad_images={"bad"})
    engine = Engine(runner, step_tokens=16)
    bad = engine.submit(request([5] * 8, images=[placed_image("good", 0, 3), placed_image("bad", 4, 3)]))
    run_all(engine)
    engine.submit(request([1], 1))
    run_all(engine)
    with pytest.raises(RequestFailedError, match="cannot encode bad"):
        list(bad)
    assert runner.features == [{}]


def test_requests_that_share_a_bad_picture_end_each_and_one_that_comes_later_is_tried_anew():
    runner = EchoRunner(is_intact=True, bad_images={"bad"})
    engine = Engine(runner, step_tokens=16)
    shared = [engine.submit(request([5] * 6, images=[placed_image("bad", 1, 3)])) for _ in range(2)]
    run_all(engine)
    for generation in shared:
        with pytest.raises(RequestFailedError, match="cannot encode bad"):
            list(generation)
    runner.bad_images = ()
    later = engine.submit(request([5] * 6, 1, images=[placed_image("bad", 1, 3)]))
    run_all(engine)
    assert tokens_of(later) == [5]


@pytest.mark.parametrize("kind", [ImageError, RequestError])
def test_what_is_wrong_with_the_picture_itself_keeps_its_type(kind):
    runner = EchoRunner(is_intact=True)

    def encode(_replica, _images):
        raise kind("rank 0: torn")

    runner.encode_images = encode
    engine = Engine(runner)
    bad = engine.submit(request([5] * 6, images=[placed_image("x", 1, 3)]))
    runner.bad_images = {"x"}
    run_all(engine)
    with pytest.raises(kind, match="torn"):
        list(bad)


def test_a_picture_whose_encoding_leaves_the_runner_broken_ends_all_of_them_with_an_error_of_the_machine():
    """Not with the picture's own error: the others would be told that their requests were wrong."""
    runner = EchoRunner(is_intact=False)

    def encode(_replica, _images):
        raise ImageError("rank 0: torn")

    runner.encode_images = encode
    engine = Engine(runner)
    both = [engine.submit(request([1, 2])), engine.submit(request([5] * 6, images=[placed_image("x", 1, 3)]))]
    assert engine.step_once() is False
    for generation in both:
        with pytest.raises(DeploymentError, match="torn"):
            list(generation)
    assert isinstance(engine.error, DeploymentError)


# steps


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("place", [0, 5], ids=["first-chunk", "later-chunk"])
def test_a_step_that_fails_is_traced_to_the_request_that_fails_alone(dp, place):
    runner = EchoRunner(dp=dp, num_slots=3, is_intact=True, bad_token=666)
    engine = Engine(runner, step_tokens=9)
    prompts = [[n, n + 1, n + 2, n + 3, n + 4, n + 5, n + 6] for n in (10, 20, 30, 40, 50)]
    poison = [9] * 7
    poison[place] = 666
    generations = [engine.submit(request(prompt, 12)) for prompt in prompts[:2]]
    for _ in range(4):
        engine.step_once()  # these are generating when the bad one comes
    bad = engine.submit(request(poison, 12))
    generations += [engine.submit(request(prompt, 12)) for prompt in prompts[2:]]
    run_all(engine)
    with pytest.raises(RequestFailedError, match="token 666 breaks the step"):
        list(bad)
    assert [tokens_of(generation) for generation in generations] == [echo_of(prompt, 12) for prompt in prompts]


def test_two_bad_requests_in_one_step_are_both_found():
    runner = EchoRunner(num_slots=4, is_intact=True, bad_token=666)
    engine = Engine(runner, step_tokens=32)
    bad = [engine.submit(request([n, 666])) for n in (1, 2)]
    good = [engine.submit(request([n, 5])) for n in (3, 4)]
    run_all(engine)
    for generation in bad:
        with pytest.raises(RequestFailedError):
            list(generation)
    assert [tokens_of(generation) for generation in good] == [[3, 5, 3, 5], [4, 5, 4, 5]]


def test_a_step_that_fails_once_costs_nobody_an_answer():
    runner = EchoRunner(num_slots=3, is_intact=True)
    failed = []

    def gate():
        if len(runner.steps) == 3 and not failed:
            failed.append(True)
            raise MemoryError("for a moment")

    runner.gate = gate
    engine = Engine(runner, step_tokens=16)
    generations = [engine.submit(request([n, n + 1], 8, priority=n)) for n in range(5)]
    run_all(engine)
    assert failed
    assert [tokens_of(generation) for generation in generations] == [echo_of([n, n + 1], 8) for n in range(5)]


def test_a_suspect_that_is_aborted_during_its_trial_lets_the_next_one_go_on():
    runner = EchoRunner(num_slots=3, is_intact=True, bad_token=666)
    engine = Engine(runner, step_tokens=4)
    first, bad = engine.submit(request([1] * 3, 5)), engine.submit(request([2, 666]))
    engine.step_once()
    engine.abort(first.request_id)
    run_all(engine)
    with pytest.raises(RequestFailedError):
        list(bad)
    assert first.request_id is not None
    assert tokens_of(first) == []


def test_a_broken_runner_ends_all_and_is_not_asked_again():
    runner = EchoRunner(is_intact=False, bad_token=666)
    engine = Engine(runner)
    both = [engine.submit(request([1, 2])), engine.submit(request([666]))]
    assert engine.step_once() is False
    for generation in both:
        with pytest.raises(DeploymentError, match="breaks the step"):
            list(generation)
    with pytest.raises(DeploymentError):
        engine.submit(request([1]))


def test_a_dead_rank_is_told_as_such_even_where_one_request_was_alone():
    runner = EchoRunner()

    def gate():
        raise WorkerDiedError("rank 1 died")

    runner.gate = gate
    engine = Engine(runner)
    generation = engine.submit(request([1, 2]))
    engine.step_once()
    with pytest.raises(WorkerDiedError, match="rank 1 died"):
        list(generation)


# sampling, grammars, listeners


def test_logits_that_are_not_finite_are_the_failure_of_their_own_row():
    import torch

    rows = torch.tensor([[0.0, 1.0, 2.0], [0.0, float("nan"), 1.0], [3.0, 1.0, 2.0]])
    steps = [SequenceStep(slot=n, start=0, token_ids=(1,), sample=SamplingParams()) for n in range(3)]
    first, failed, last = sample_steps(rows, steps)
    assert (first.token_id, last.token_id) == (2, 0)
    assert "1 of 3 logits of a sequence are not finite" in str(failed)


def test_a_sequence_without_a_token_ends_and_the_others_of_its_step_keep_theirs():
    class Nan(EchoRunner):
        def step(self, inputs):
            out = super().step(inputs)
            return [[DeploymentError("not finite") if token.token_id == 5 else token for token in row] for row in out]

    engine = Engine(Nan(), step_tokens=16)
    bad, good = engine.submit(request([4, 5, 6])), engine.submit(request([1, 2]))
    run_all(engine)
    assert next(iter(bad)).token_id == 4
    with pytest.raises(RequestFailedError, match="not finite"):
        list(bad)
    assert tokens_of(good) == [1, 2, 1, 2]


class BadGrammar:
    error = None

    def __init__(self, fails_in: str) -> None:
        self.fails_in, self.count = fails_in, 0

    def allowed(self) -> bytes:
        self.count += 1
        if self.fails_in == "allowed" and self.count == 3:
            raise KeyError("state 7")
        return b""

    def accept(self, token_id: int) -> None:
        if self.fails_in == "accept" and self.count == 3:
            raise KeyError("state 7")


@pytest.mark.parametrize("fails_in", ["allowed", "accept"])
def test_a_grammar_that_raises_ends_its_own_answer(fails_in):
    engine = Engine(EchoRunner(), step_tokens=16)
    bad = engine.submit(request([4, 5], 9, constraint=BadGrammar(fails_in)))
    good = engine.submit(request([1, 2], 9))
    run_all(engine)
    with pytest.raises(RequestFailedError, match="grammar of this answer failed: KeyError: 'state 7'"):
        list(bad)
    assert tokens_of(good) == echo_of([1, 2], 9)


def test_a_listener_that_raises_ends_its_own_request():
    seen: list[object] = []

    def listener(event):
        seen.append(event)
        raise BrokenPipeError("gone")

    engine = Engine(EchoRunner(), step_tokens=16)
    engine.submit(request([4, 5], 9), listener)
    good = engine.submit(request([1, 2], 9))
    run_all(engine)
    assert [type(event) is TokenEvent for event in seen] == [True, False]
    assert isinstance(seen[1].error, RequestFailedError)
    assert tokens_of(good) == echo_of([1, 2], 9)
