"""Engine and scheduler over a runner that echoes its slot and checks every promise made to runners."""

from __future__ import annotations

import random
import threading
import time

import pytest
from serving_fakes import EchoRunner, echo_of, placed_image

from workbench.base import DeploymentError, QueueFullError, RequestError, WorkerDiedError
from workbench.serving.engine import Engine
from workbench.serving.requests import GenerationRequest, SamplingParams
from workbench.serving.scheduler import Scheduler
from workbench.serving.sequence import SequenceState

pytestmark = pytest.mark.timeout(60)


def request(prompt, max_tokens=4, images=(), **sampling) -> GenerationRequest:
    return GenerationRequest(
        token_ids=tuple(prompt), images=tuple(images), sampling=SamplingParams(max_tokens=max_tokens, **sampling)
    )


def run_all(engine: Engine, limit: int = 10_000) -> int:
    """Step by hand until nothing is left; the slots are checked after every step. Returns the number of steps."""
    for count in range(limit):
        if not engine.step_once():
            return count
        engine.scheduler.check()
        stats = engine.stats()
        assert stats.num_free_slots + stats.num_running == engine.info.dp * engine.info.num_slots
    raise AssertionError(f"still working after {limit} steps")


def tokens_of(generation) -> list[int]:
    return [event.token_id for event in generation]


def test_a_request_is_answered_token_by_token_and_says_how_it_ended():
    clock = iter(range(1000))
    engine = Engine(EchoRunner(), clock=lambda: float(next(clock)))
    generation = engine.submit(request([5, 6, 7], max_tokens=5))
    run_all(engine)
    events = list(generation)
    assert [event.token_id for event in events] == [5, 6, 7, 5, 6]
    assert generation.finish.reason == "length"
    assert generation.finish.num_tokens == 5
    times = [generation.submitted_s, generation.admitted_s, *(event.time_s for event in events)]
    assert times == sorted(set(times)), "submitted, admitted and each token come one after another"


def test_a_stop_token_ends_the_answer_and_is_not_part_of_it():
    engine = Engine(EchoRunner())
    generation = engine.submit(request([5, 6, 9999, 7], max_tokens=9, stop_ids=(9999,)))
    run_all(engine)
    assert tokens_of(generation) == [5, 6]
    assert (generation.finish.reason, generation.finish.num_tokens) == ("stop", 3)


@pytest.mark.parametrize("dp", [1, 3])
@pytest.mark.parametrize("step_tokens", [4, 7, 64])
def test_sixty_four_requests_at_once_never_see_each_other(dp, step_tokens):
    runner = EchoRunner(dp=dp, num_slots=4)
    engine = Engine(runner, step_tokens=step_tokens)
    rng = random.Random(7)
    prompts = []
    for canary in range(64):
        filler = [rng.randrange(1000, 1010) for _ in range(rng.randrange(0, 40))]
        filler.insert(rng.randrange(len(filler) + 1), canary + 1)
        prompts.append(filler)
    generations = [engine.submit(request(prompt, max_tokens=2 * len(prompt) + 3)) for prompt in prompts]
    run_all(engine)
    for prompt, generation in zip(prompts, generations, strict=True):
        assert tokens_of(generation) == echo_of(prompt, 2 * len(prompt) + 3)
    assert engine.stats().num_free_slots == dp * 4


def test_a_runner_that_swaps_two_slots_is_caught_by_the_canaries():
    runner = EchoRunner(num_slots=2)
    engine = Engine(runner)
    generations = [engine.submit(request([n, 500, 501], max_tokens=6)) for n in (1, 2)]
    engine.step_once()
    runner.slots[0, 0], runner.slots[0, 1] = runner.slots[0, 1], runner.slots[0, 0]
    run_all(engine)
    assert [tokens_of(generation) for generation in generations] != [echo_of([n, 500, 501], 6) for n in (1, 2)]


def test_a_short_request_behind_a_long_prompt_answers_within_its_share_of_steps():
    num_slots, step_tokens, num_short = 3, 48, 101
    engine = Engine(EchoRunner(num_slots=num_slots, max_tokens=700_000), step_tokens=step_tokens)
    engine.submit(request([1] * 600_000, max_tokens=2))
    engine.step_once()
    short = engine.submit(request([2] * num_short, max_tokens=3))
    bound = -(-num_short // (step_tokens // num_slots)) + 2
    for _ in range(bound):
        engine.step_once()
    assert tokens_of(short) == [2, 2, 2]
    assert engine.stats().num_running == 1, "the long prompt is still being read"


def test_generation_goes_on_in_every_step_while_a_long_prompt_is_read():
    engine = Engine(EchoRunner(num_slots=3), step_tokens=16)
    early = engine.submit(request([3, 4], max_tokens=30))
    engine.step_once()
    engine.submit(request([1] * 400, max_tokens=1))
    for _ in range(29):
        engine.step_once()
    assert len(tokens_of(early)) == 30


def test_the_token_budget_holds_and_is_used_in_full_while_there_is_work():
    runner = EchoRunner(num_slots=4)
    engine = Engine(runner, step_tokens=10)
    for size in (33, 2, 57, 11):
        engine.submit(request([1] * size, max_tokens=3))
    run_all(engine)
    for inputs in runner.steps:
        assert sum(len(step.token_ids) for step in inputs[0]) <= 10
    assert [sum(len(step.token_ids) for step in inputs[0]) for inputs in runner.steps[:8]] == [10] * 8


def test_requests_enter_slots_in_order_of_arrival():
    runner = EchoRunner(num_slots=1)
    engine = Engine(runner)
    for n in range(1, 6):
        engine.submit(request([n], max_tokens=1))
    run_all(engine)
    assert [inputs[0][0].token_ids[0] for inputs in runner.steps] == [1, 2, 3, 4, 5]


def test_replicas_share_the_load_and_an_idle_one_still_takes_part_with_an_empty_input():
    runner = EchoRunner(dp=3, num_slots=2)
    engine = Engine(runner)
    for n in range(1, 5):
        engine.submit(request([n], max_tokens=2 if n < 4 else 9))
    engine.step_once()
    assert [len(replica) for replica in runner.steps[0]] == [2, 1, 1]
    run_all(engine)
    assert [len(replica) for replica in runner.steps[-1]] == [1, 0, 0]


def test_abort_while_waiting_and_while_running_frees_everything():
    engine = Engine(EchoRunner(num_slots=1))
    running = engine.submit(request([1, 2, 3], max_tokens=50))
    waiting = engine.submit(request([4], max_tokens=50))
    last = engine.submit(request([5], max_tokens=2))
    engine.step_once()
    running.abort()
    waiting.abort()
    assert tokens_of(running) == [1]
    assert tokens_of(waiting) == []
    assert running.finish.reason == waiting.finish.reason == "abort"
    run_all(engine)
    assert tokens_of(last) == [5, 5]
    running.abort()  # after the end: nothing to do
    assert engine.stats().num_aborted == 2
    assert engine.stats().num_free_slots == 1


@pytest.mark.parametrize("moment", range(6))
def test_abort_at_any_moment_even_inside_a_step_frees_the_slot_and_gives_no_further_token(moment):
    moments = []
    runner = EchoRunner(num_slots=2)
    engine = Engine(runner, step_tokens=2)
    generation = engine.submit(request([1, 2, 3, 4, 5], max_tokens=5, images=[placed_image("k", 1, 2)]))

    def gate():
        if len(moments) == moment:
            generation.abort()
        moments.append(1)

    runner.gate = gate
    run_all(engine)
    tokens = tokens_of(generation)
    assert tokens == echo_of([1, 1000, 1001, 4, 5], len(tokens))
    assert generation.finish.reason == "abort"
    assert engine.stats().num_free_slots == 2
    engine.step_once()
    assert runner.features == [{}], "features of the aborted prompt were dropped"


def test_a_full_queue_refuses_and_accepts_again_later():
    engine = Engine(EchoRunner(num_slots=1), max_queue=2)
    engine.submit(request([1]))
    engine.step_once()
    engine.submit(request([2]))
    engine.submit(request([3]))
    with pytest.raises(QueueFullError, match="2 requests wait already"):
        engine.submit(request([4]))
    run_all(engine)
    later = engine.submit(request([5], max_tokens=2))
    run_all(engine)
    assert tokens_of(later) == [5, 5]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (lambda: request([]), "empty"),
        (lambda: request([1, 10_000]), "prompt token 1 is outside the vocabulary"),
        (lambda: request([-1]), "outside the vocabulary"),
        (lambda: request([1] * 90, max_tokens=12), "at most 11 new tokens"),
        (lambda: request([1] * 101, max_tokens=1), "Shorten the prompt"),
        (lambda: request([1] * 9, images=[placed_image("a", 8, 2)]), r"rows \[8, 10\)"),
        (lambda: request([1] * 9, images=[placed_image("a", 2, 3), placed_image("b", 4, 1)]), "image 1"),
        (lambda: request([1], temperature=float("nan")), "temperature is not a finite number"),
        (lambda: request([1], temperature=-0.1), "temperature is out of range"),
        (lambda: request([1], top_p=0.0), "top_p=0"),
        (lambda: request([1], top_p=1.5), "top_p is out of range"),
        (lambda: request([1], top_k=-1), "top_k is out of range"),
        (lambda: request([1], top_k=2.0), "top_k is not an integer"),
        (lambda: request([1], seed=2**64), "seed is out of range"),
        (lambda: request([1], max_tokens=0), "max_tokens is out of range"),
    ],
)
def test_a_request_that_cannot_run_is_refused_with_the_reason_and_the_engine_stays_up(bad, words):
    engine = Engine(EchoRunner(max_tokens=100))
    with pytest.raises(RequestError, match=words):
        engine.submit(bad())
    good = engine.submit(request([1] * 90, max_tokens=11))
    run_all(engine)
    assert len(tokens_of(good)) == 11


def test_images_are_refused_where_the_model_has_no_vision():
    with pytest.raises(RequestError, match="no vision tower"):
        Engine(EchoRunner(has_vision=False)).submit(request([1, 1], images=[placed_image("a", 0, 1)]))


@pytest.mark.parametrize("step_tokens", [3, 4, 5, 30])
def test_images_are_encoded_once_and_spliced_by_row_over_any_chunks(step_tokens):
    runner = EchoRunner(num_slots=3)
    engine = Engine(runner, step_tokens=step_tokens)
    prompt = list(range(1, 16))
    images = [placed_image("first", 2, 4), placed_image("second", 8, 5)]
    alone = engine.submit(request(prompt, max_tokens=15, images=images))
    shared = engine.submit(request(prompt, max_tokens=15, images=images))
    run_all(engine)
    expected = [1, 2, 1000, 1001, 1002, 1003, 7, 8, 2000, 2001, 2002, 2003, 2004, 14, 15]
    assert tokens_of(alone) == expected
    assert tokens_of(shared) == expected
    assert [call for call in runner.calls if call[0] == "encode"] == [
        ("encode", (0, "first")),
        ("encode", (0, "second")),
    ]
    assert runner.features == [{}]


def test_at_most_one_image_is_encoded_per_step_and_nobody_starves():
    runner = EchoRunner(num_slots=3)
    encodes_before = []
    runner.gate = lambda: encodes_before.append(sum(call[0] == "encode" for call in runner.calls))
    engine = Engine(runner, step_tokens=64)
    many = engine.submit(request([1] * 12, max_tokens=1, images=[placed_image(f"m{i}", 2 * i, 2) for i in range(6)]))
    one = engine.submit(request([2] * 4, max_tokens=1, images=[placed_image("one", 0, 4)]))
    text = engine.submit(request([3] * 4, max_tokens=1))
    run_all(engine)
    assert max(b - a for a, b in zip([0, *encodes_before], encodes_before, strict=False)) == 1
    assert len(tokens_of(many)) == len(tokens_of(one)) == len(tokens_of(text)) == 1
    assert len(runner.steps[0][0]) == 2, "the text prompt does not wait for images"


def test_a_failing_runner_fails_every_request_in_flight_and_every_later_one_and_nothing_hangs():
    runner = EchoRunner(num_slots=2)
    engine = Engine(runner).start()
    blocked = threading.Event()

    def gate():
        if len(runner.steps) == 3:
            blocked.wait(5)
            raise WorkerDiedError("rank 1 died", found="SIGKILL")

    runner.gate = gate
    generations = [engine.submit(request([n], max_tokens=100)) for n in range(1, 5)]
    blocked.set()
    for generation in generations:
        with pytest.raises(WorkerDiedError, match="SIGKILL"):
            list(generation)
    with pytest.raises(WorkerDiedError, match="rank 1 died"):
        engine.submit(request([1]))
    assert engine.stats().num_free_slots == 2
    engine.stop()


def test_an_unexpected_exception_becomes_a_deployment_error_that_names_it():
    runner = EchoRunner()
    runner.gate = lambda: [][1]
    engine = Engine(runner)
    generation = engine.submit(request([1]))
    assert engine.step_once() is False
    with pytest.raises(DeploymentError, match="IndexError: list index out of range"):
        list(generation)


def test_a_runner_that_returns_too_few_tokens_is_named():
    runner = EchoRunner()
    engine = Engine(runner)
    generation = engine.submit(request([1]))
    runner.step = lambda inputs: [[]]
    engine.step_once()
    with pytest.raises(DeploymentError, match="replica 0 returned 0 tokens"):
        list(generation)


def test_only_the_engine_thread_calls_the_runner_and_many_threads_may_submit():
    runner = EchoRunner(num_slots=4)
    engine = Engine(runner, step_tokens=16).start()
    answers: dict[int, list[int]] = {}

    def ask(n: int) -> None:
        answers[n] = tokens_of(engine.submit(request([n, n + 1], max_tokens=7)))

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(1, 33)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert answers == {n: echo_of([n, n + 1], 7) for n in range(1, 33)}
    assert len(runner.threads) == 1
    assert threading.get_ident() not in runner.threads
    engine.stop()


def test_stop_fails_what_is_in_flight_and_start_takes_requests_again():
    runner = EchoRunner(num_slots=1)
    runner.gate = lambda: time.sleep(0.002)
    engine = Engine(runner).start()
    generation = engine.submit(request([1], max_tokens=4000))
    engine.stop()
    with pytest.raises(DeploymentError, match="stopped while the request was in flight"):
        list(generation)
    with pytest.raises(DeploymentError, match="engine is stopped"):
        engine.submit(request([1]))
    assert tokens_of(engine.start().submit(request([2], max_tokens=2))) == [2, 2]
    engine.stop()


def test_the_slot_check_notices_a_lost_slot():
    scheduler = Scheduler(EchoRunner(num_slots=2).info, step_tokens=8, max_queue=9)
    scheduler.add(SequenceState(request_id=0, request=request([1])))
    (sequence,) = scheduler.admit()
    scheduler.check()
    scheduler.running[0].remove(sequence)
    with pytest.raises(AssertionError, match="slots"):
        scheduler.check()
