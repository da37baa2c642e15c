"""Pictures that are encoded a part a step: no step is longer for one, features are the same, and nothing is left."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import replace

import pytest
from serving_fakes import EchoRunner, placed_image

from workbench.base import DeploymentError, RequestFailedError
from workbench.serving.encoding import ReplicaImages
from workbench.serving.engine import Engine
from workbench.serving.requests import GenerationRequest, SamplingParams
from workbench.serving.scheduler import FULL_DEPTH
from workbench.serving.sequence import SequenceState
from workbench.spec import EncodingCost, ReadingCost

pytestmark = pytest.mark.timeout(120)

READING = ReadingCost(token=1000.0)
ENCODING = EncodingCost(num_layers=3, row=400.0, pair=1.0)
SLOTS, BUDGET = 4, 256
FULL = READING.of(BUDGET, FULL_DEPTH)


class PartRunner(EchoRunner):
    """Counts what steps cost, text and pictures, and holds pictures to be encoded row by row, in order, once."""

    def __init__(self, *, tells: bool = True, **options: object) -> None:
        super().__init__(**{"num_slots": SLOTS, "max_tokens": 40_000, **options})
        self.info = replace(self.info, reading=READING, encoding=ENCODING if tells else None)
        self.rows: dict[str, int] = {}
        self.now, self.pending, self.costs = 0.0, 0.0, list[float]()

    def _spend(self, num_rows, num_patches):
        self.pending += ENCODING.of(num_rows, num_patches)
        self.now += ENCODING.of(num_rows, num_patches)

    def encode_images(self, replica, images):
        for key, patches, _ in images:
            assert key not in self.rows
            self._spend(ENCODING.num_rows(len(patches)), len(patches))
        super().encode_images(replica, images)

    def encode_rows(self, replica, image, first, stop):
        key, patches, (_, rows, columns) = image
        num_patches = rows * columns
        assert self.rows.get(key, 0) == first < stop
        assert len(patches) == (0 if first else num_patches)
        self._spend(stop - first, num_patches)
        self.rows[key] = stop
        if key in self.bad_images and first:
            raise ZeroDivisionError(f"rank 1 cannot go on with {key}")
        if stop == ENCODING.num_rows(num_patches):
            del self.rows[key]
            super().encode_images(replica, [placed(key, num_patches)])

    def drop_images(self, replica, keys):
        gone = [key for key in keys if self.rows.pop(key, None) is not None]
        super().drop_images(replica, [key for key in keys if key not in gone])

    def step(self, inputs):
        cost = sum(READING.of(len(step.token_ids), step.start) for step in inputs[0])
        self.costs.append(self.pending + cost)
        self.pending, self.now = 0.0, self.now + cost
        return super().step(inputs)


def placed(key: str, num_patches: int):
    image = placed_image(key, 0, num_patches // 4)
    return image.key, image.patches, image.grid


def ask(ids, max_tokens=1, images=()) -> GenerationRequest:
    return GenerationRequest(token_ids=tuple(ids), sampling=SamplingParams(max_tokens=max_tokens), images=tuple(images))


def pictures(number: int, size: int) -> GenerationRequest:
    """A prompt of pictures of `size` tokens each, a token of text between them."""
    images = [placed_image(f"p{n}", n * (size + 1), size) for n in range(number)]
    return ask([1] * (number * (size + 1) + 1), images=images)


def finish(engine: Engine) -> None:
    while engine.step_once():
        pass


@pytest.mark.parametrize("tells", [True, False])
def test_no_step_costs_more_for_a_large_picture_than_one_of_text(tells):
    runner = PartRunner(tells=tells)
    engine = Engine(runner, step_tokens=BUDGET)
    generation = engine.submit(pictures(4, 300))
    running = engine.submit(ask([3], 400))
    finish(engine)
    assert [event.token_id for event in generation] == [1000], "read with its first picture's first row at its place"
    assert len(list(running)) == 400
    assert (max(runner.costs) <= 1.1 * FULL) == tells, "planted: whole pictures in a step"
    assert runner.features == [{}]
    assert not runner.rows
    assert engine.stats().num_images == 0


@pytest.mark.parametrize("tells", [True, False])
def test_gaps_of_a_short_text_behind_large_pictures_are_those_of_an_empty_server_and_one_step(tells):
    """On a clock that counts multiply-adds."""

    def gaps(*others: GenerationRequest) -> tuple[list[float], int]:
        runner = PartRunner(tells=tells)
        engine = Engine(runner, step_tokens=BUDGET, clock=lambda: runner.now)
        for other in others:
            engine.submit(other)
        engine.step_once()
        before = len(runner.costs)
        short = engine.submit(ask([2] * 101, 12))
        num_steps = 0
        while short._events.empty():
            engine.step_once()
            num_steps = len(runner.costs) - before
        while short.finish is None and engine.step_once():
            if short._events.qsize() > 12:
                break
        times = [event.time_s for event in short]
        return [b - a for a, b in itertools.pairwise(times)], num_steps

    alone, _ = gaps()
    behind, steps = gaps(pictures(20, 700))
    assert len(behind) == 11
    assert (max(behind) <= 2 * max(alone) + FULL) == tells
    assert steps <= -(-101 // (BUDGET // SLOTS))


def test_small_pictures_share_a_step_as_far_as_it_goes():
    runner = PartRunner()
    engine = Engine(runner, step_tokens=BUDGET)
    engine.submit(pictures(6, 4))
    finish(engine)
    assert len(runner.costs) == 1
    assert [call[0] for call in runner.calls if call[0] == "encode"] == ["encode"] * 6


def test_one_picture_in_two_prompts_is_encoded_once_also_where_the_first_to_ask_leaves():
    for leaves in (False, True):
        runner = PartRunner()
        engine = Engine(runner, step_tokens=BUDGET)
        first, second = (engine.submit(ask([1] * 801, images=[placed_image("same", 0, 800)])) for _ in range(2))
        engine.step_once()
        assert runner.rows["same"]
        if leaves:
            first.abort()
        finish(engine)
        assert [event.token_id for event in second] == [1000]
        assert len([call for call in runner.calls if call[0] == "encode"]) == 1
        assert runner.features == [{}]


def test_a_picture_that_is_given_up_half_way_is_dropped_and_begins_anew_for_the_next():
    runner = PartRunner()
    engine = Engine(runner, step_tokens=BUDGET)
    gone = engine.submit(pictures(1, 900))
    engine.step_once()
    assert engine.stats().num_images == 1
    gone.abort()
    assert not engine.step_once()
    assert not runner.rows
    assert engine.stats().num_images == 0
    again = engine.submit(pictures(1, 900))
    finish(engine)
    assert [event.token_id for event in again] == [1000]


def test_a_picture_that_fails_half_way_ends_its_request_and_nothing_else():
    runner = PartRunner(is_intact=True, bad_images={"p0"})
    engine = Engine(runner, step_tokens=BUDGET)
    bad, good = engine.submit(pictures(1, 900)), engine.submit(ask([5, 6], 4))
    finish(engine)
    with pytest.raises(RequestFailedError, match="cannot go on with p0"):
        list(bad)
    assert [event.token_id for event in good] == [5, 6, 5, 6]
    assert engine.stats().num_images == 0
    assert engine.stats().num_free_slots == SLOTS


def test_an_engine_that_is_stopped_in_the_middle_of_a_picture_leaves_nothing_of_it_on_the_runner():
    begun = threading.Event()

    class Slow(PartRunner):
        def encode_rows(self, replica, image, first, stop):
            super().encode_rows(replica, image, first, stop)
            begun.set()
            while not engine._is_stopping:
                time.sleep(0.005)

    runner = Slow()
    engine = Engine(runner, step_tokens=BUDGET).start()
    given_up = engine.submit(pictures(1, 900))
    assert begun.wait(30)
    assert runner.rows
    engine.stop()
    with pytest.raises(DeploymentError, match="engine was stopped"):
        list(given_up)
    assert not runner.rows
    assert engine.stats().num_images == 0
    after = Engine(runner, step_tokens=BUDGET)
    again = after.submit(pictures(1, 900))
    finish(after)
    assert [event.token_id for event in again] == [1000]
    assert runner.features == [{}]


def test_rows_are_as_many_as_the_allowance_buys_and_some_in_any_case():
    cost = EncodingCost(num_layers=2, row=10.0, pair=1.0)
    assert cost.num_rows(90) == 180
    assert cost.rows(100_000.0, 90) == 1000
    assert cost.rows(99.0, 90) == 0
    images, step = ReplicaImages(0, cost), {}
    sequence = SequenceState(request_id=1, request=ask([1] * 101, images=[placed_image("a", 10, 90)]))
    assert images.plan(sequence, 50, step, allowance=100.0, room=1000) == 10, "no rows are left beside ten tokens"
    assert not step
    sequence.num_cached = 10
    assert images.plan(sequence, 50, step, allowance=100.0, room=1000) == 10
    assert (step["a"].first, step["a"].stop, step["a"].num_rows) == (0, 64, 720)
    images.mark(step["a"])
    assert len(images) == 1
    assert images.unused() == ["a"], "nobody has said that it is needed"
    assert len(images) == 0
