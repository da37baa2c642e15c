"""Chunks that shrink with depth: no step costs more than one at `FULL_DEPTH`, and nobody's answer changes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from serving_fakes import EchoRunner

from workbench.serving.engine import Engine
from workbench.serving.requests import GenerationRequest, SamplingParams
from workbench.serving.scheduler import FULL_DEPTH
from workbench.spec import ReadingCost

pytestmark = pytest.mark.timeout(120)

COST = ReadingCost(token=1000.0, pair=1.0, context=2.0)
SLOTS, BUDGET = 4, 256


class PricedRunner(EchoRunner):
    """A step takes as long as its chunks cost; the scheduler knows of it where it `tells`."""

    def __init__(self, *, tells: bool, cost: ReadingCost = COST) -> None:
        super().__init__(num_slots=SLOTS, max_tokens=40_000)
        self.cost, self.now, self.costs, self.sizes = cost, 0.0, list[float](), list[int]()
        if tells:
            self.info = replace(self.info, reading=cost)

    def step(self, inputs):
        self.costs.append(sum(self.cost.of(len(step.token_ids), step.start) for step in inputs[0]))
        self.sizes.append(max(len(step.token_ids) for step in inputs[0]))
        self.now += self.costs[-1]
        return super().step(inputs)


def ask(ids, max_tokens=1) -> GenerationRequest:
    return GenerationRequest(token_ids=tuple(ids), sampling=SamplingParams(max_tokens=max_tokens))


def finish(engine: Engine) -> None:
    while engine.step_once():
        pass


@pytest.mark.parametrize("tells", [True, False])
def test_no_step_of_a_very_long_prompt_costs_more_than_one_at_full_depth(tells):
    runner = PricedRunner(tells=tells)
    engine = Engine(runner, step_tokens=BUDGET)
    prompt = [number % 9000 for number in range(32_000)]
    generation = engine.submit(ask(prompt, 3))
    finish(engine)
    assert [event.token_id for event in generation] == prompt[:3], "read whole and in order"
    limit = COST.of(BUDGET, FULL_DEPTH)
    assert (max(runner.costs) <= limit) == tells, "the check sees chunks that stay as long as they were"
    if tells:
        read = runner.sizes[:-2]  # the last two steps are of the answer
        shallow = FULL_DEPTH // BUDGET + 1
        assert read[:shallow] == [BUDGET] * shallow
        assert min(read[:-1]) >= 20, "the end of a prompt does not come in ever smaller pieces"
        assert all(later <= earlier for earlier, later in itertools.pairwise(read))


@pytest.mark.parametrize("tells", [True, False])
def test_gaps_of_a_short_answer_are_as_narrow_behind_the_end_of_a_long_prompt_as_behind_its_beginning(tells):
    """On the clock of the costs: within twice the gaps of an empty server and one step at full depth."""

    def gaps_of_short(depth: int | None) -> list[float]:
        runner = PricedRunner(tells=tells)
        engine = Engine(runner, step_tokens=BUDGET, clock=lambda: runner.now)
        if depth is not None:
            long = engine.submit(ask([1] * 32_000))
            while engine.scheduler.running[0][0].num_cached < depth if runner.steps else True:
                engine.step_once()
            assert long.finish is None
        short = engine.submit(ask([2] * 101, 12))
        for _ in range(15):
            engine.step_once()
        times = [event.time_s for event in itertools.islice(short, 12)]
        return [after - before for before, after in itertools.pairwise(times)]

    alone, deep = max(gaps_of_short(None)), max(gaps_of_short(29_000))
    bound = 2 * alone + COST.of(BUDGET, FULL_DEPTH)
    assert (deep <= bound) == tells
    if tells:
        assert max(gaps_of_short(0)) <= bound


@pytest.mark.parametrize("length", [1, 63, 64, 65, 1000, FULL_DEPTH])
def test_up_to_full_depth_a_prompt_is_read_in_the_steps_that_its_share_takes(length):
    runner = PricedRunner(tells=True)
    engine = Engine(runner, step_tokens=BUDGET)
    for _ in range(SLOTS - 1):
        engine.submit(ask([1] * 30_000))
    short = engine.submit(ask([2] * length))
    num_steps = 0
    while not short._events.qsize() and num_steps < 1000:
        engine.step_once()
        num_steps += 1
    assert num_steps <= math.ceil(length / (BUDGET // SLOTS))


def test_where_expanding_the_context_alone_is_dear_chunks_stop_shrinking():
    """Smaller ones would cost nearly the same each, and there would be more of them."""
    cost = ReadingCost(token=1000.0, pair=1.0, context=64.0)
    runner = PricedRunner(tells=True, cost=cost)
    engine = Engine(runner, step_tokens=BUDGET)
    engine.submit(ask([1] * 32_000))
    finish(engine)
    assert min(runner.sizes[:-1]) == cost.least == 64


def test_several_deep_prompts_together_cost_less_than_two_steps_at_full_depth():
    """One step's worth, and a share for each that is near its end: what it leaves of that goes to the others."""
    runner = PricedRunner(tells=True)
    engine = Engine(runner, step_tokens=BUDGET)
    prompts = [[number] * (20_000 + 1000 * number) for number in (1, 2, 3)]
    generations = [engine.submit(ask(prompt)) for prompt in prompts]
    finish(engine)
    assert [[event.token_id for event in generation] for generation in generations] == [[1], [2], [3]]
    assert max(runner.costs) < 2 * COST.of(BUDGET, FULL_DEPTH)
