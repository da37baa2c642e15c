"""Loads: planned from a seed, and sent so that no request escapes the clock."""

from __future__ import annotations

import io
import statistics
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image

from workbench.base import ConfigError
from workbench.profiling import (
    Bursts,
    ClosedLoop,
    Kind,
    Lengths,
    Load,
    Poisson,
    Question,
    RequestTiming,
    Slo,
    generate_load,
    plan_load,
)

MIX = (
    Kind(name="chat", prompt=Lengths(least=5, most=40), answer=Lengths(least=1, most=9), weight=3.0),
    Kind(name="picture", prompt=Lengths(least=3, most=3), num_images=2, image_size=(40, 24), weight=1.0),
)


def load(arrivals: Any, number: int = 200, **options: Any) -> Load:
    return Load(arrivals=arrivals, num_requests=number, **options)


def test_a_plan_is_a_function_of_its_seed() -> None:
    wanted = load(Poisson(rate_per_s=3.0), kinds=MIX, seed=5)
    assert plan_load(wanted) == plan_load(wanted)
    other = plan_load(replace(wanted, seed=6))
    assert other.requests[0].question.text != plan_load(wanted).requests[0].question.text
    warmer = plan_load(replace(wanted, num_warm_up=9))
    assert warmer.requests == plan_load(wanted).requests, "more warm-up changes nothing that is measured"
    assert len(warmer.warm_up) == 9


def test_poisson_arrivals_have_the_rate_and_the_spread_of_independent_ones() -> None:
    times = [x.due_s for x in plan_load(load(Poisson(rate_per_s=4.0), 4000)).requests]
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]  # type: ignore[operator,list-item]
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.08), "an even pace would have none"


def test_bursts_come_together_and_keep_the_rate() -> None:
    times = [x.due_s or 0.0 for x in plan_load(load(Bursts(rate_per_s=8.0, size=4), 4002)).requests]
    groups = [times[i : i + 4] for i in range(0, len(times), 4)]
    assert all(len(set(group)) == 1 for group in groups)
    assert len(groups[-1]) == 2
    assert len(times) / times[-1] == pytest.approx(8.0, rel=0.08)


def test_a_closed_loop_has_no_times() -> None:
    assert {x.due_s for x in plan_load(load(ClosedLoop(concurrency=3))).requests} == {None}


def test_kinds_come_in_their_shares_with_lengths_and_pictures_of_their_own() -> None:
    plan = plan_load(load(Poisson(rate_per_s=1.0), 400, kinds=MIX), count_tokens=lambda text: len(text.split()))
    questions = [x.question for x in plan.requests]
    chats = [q for q in questions if q.label == "chat"]
    assert 260 < len(chats) < 340
    lengths = {len(q.text.split()) for q in chats}
    assert (min(lengths), max(lengths)) == (5, 40)
    assert {q.max_tokens for q in chats} == set(range(1, 10))
    pictures = [q for q in questions if q.label == "picture"]
    assert all(len(q.images) == 2 for q in pictures)
    assert Image.open(io.BytesIO(pictures[0].images[0])).size == (40, 24)  # type: ignore[arg-type]
    assert len({image for q in pictures for image in q.images}) == 2 * len(pictures), "no picture twice"
    assert len({q.text.split()[0] for q in questions}) == 400, "no two prompts begin alike"


def test_a_prompt_is_as_long_as_the_tokenizer_says_to_within_a_word() -> None:
    def bytes_of(text: str) -> int:
        return len(text)

    kind = Kind(prompt=Lengths(least=90, most=90))
    for planned in plan_load(load(Poisson(rate_per_s=1.0), 50, kinds=(kind,)), count_tokens=bytes_of).requests:
        assert 82 <= len(planned.question.text) <= 90


def test_logarithmic_lengths_are_mostly_short() -> None:
    kind = Kind(answer=Lengths(least=1, most=1024, is_logarithmic=True))
    drawn = [x.question.max_tokens for x in plan_load(load(Poisson(rate_per_s=1.0), 1000, kinds=(kind,))).requests]
    assert 20 < statistics.median(drawn) < 52  # 32 in the middle of the logarithm
    assert max(drawn) <= 1024


@pytest.mark.parametrize(
    "make",
    [
        lambda: Poisson(rate_per_s=0.0),
        lambda: Bursts(rate_per_s=1.0, size=0),
        lambda: ClosedLoop(concurrency=0),
        lambda: Lengths(least=5, most=4),
        lambda: Kind(weight=0.0),
        lambda: load(Poisson(rate_per_s=1.0), 0),
    ],
)
def test_what_is_no_load_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        make()


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class OneAtATime(Executor):
    """Does its work at once: a server, and a sender, that handle one request at a time."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class SlowTarget:
    """Answers after `times[i]` seconds, with three tokens."""

    def __init__(self, times: list[float]) -> None:
        self.clock = Clock()
        self.times = times

    def ask(self, question: Question) -> RequestTiming:
        began = self.clock()
        self.clock.sleep(self.times.pop(0))
        return RequestTiming(submitted_s=began, arrivals=((self.clock(), 3),), label=question.label)


def test_latency_counts_from_when_a_request_was_due_not_from_when_it_left() -> None:
    """A stall of 3 s delays the two requests that were due meanwhile; the one that left in time is untouched."""
    plan = plan_load(load(Poisson(rate_per_s=1.0), 4, num_warm_up=0))
    due = (1.0, 2.0, 3.0, 9.0)
    plan = replace(plan, requests=tuple(replace(x, due_s=t) for x, t in zip(plan.requests, due, strict=True)))
    target = SlowTarget([3.0, 0.5, 0.5, 0.5])
    report = generate_load(target, plan, sleep=target.clock.sleep, executor=lambda _: OneAtATime())
    assert [t.submitted_s - 50 for t in report.timings] == [1.0, 2.0, 3.0, 9.0]
    assert [t.late_s for t in report.timings] == [0.0, 2.0, 1.5, 0.0]
    assert [t.end_to_end_s for t in report.timings] == [3.0, 2.5, 2.0, 0.5], "not 3.0, 0.5, 0.5, 0.5"
    assert report.seconds == 9.5
    assert report.answered_per_s == 4 / 9.5
    late = report.summary.late_s
    assert late is not None
    assert (late.p50, late.high) == (0.0, 2.0)
    assert "sent after it was due" in report.render()


def test_warm_up_goes_first_and_is_in_no_figure() -> None:
    target = SlowTarget([30.0, 20.0, 1.0, 1.0, 1.0])
    plan = plan_load(load(ClosedLoop(concurrency=1), 3, num_warm_up=2))
    heard: list[RequestTiming] = []
    report = generate_load(
        target, plan, slo=Slo(end_to_end_s=1.5), on_request=heard.append, executor=lambda _: OneAtATime()
    )
    assert [t.end_to_end_s for t in report.warm_up] == [30.0, 20.0]
    assert [t.is_warm_up for t in heard] == [True, True, False, False, False]
    end = report.summary.end_to_end_s
    assert end is not None
    assert (end.count, end.high) == (3, 1.0)
    assert report.goodput is not None
    assert (report.goodput.num_good, report.goodput.seconds) == (3, 3.0)
    assert report.started_s == 100.0
    assert [x["is_warm_up"] for x in report.to_json()["warm_up"]] == [True, True]


def test_a_closed_loop_keeps_so_many_under_way_and_no_more() -> None:
    gate, lock = threading.Barrier(3, timeout=30), threading.Lock()
    inside, most = 0, 0

    class Meeting:
        clock = staticmethod(Clock())

        def ask(self, question: Question) -> RequestTiming:
            nonlocal inside, most
            with lock:
                inside += 1
                most = max(most, inside)
            gate.wait()  # nobody leaves before three are here
            with lock:
                inside -= 1
            return RequestTiming(submitted_s=0.0, arrivals=((0.0, 1),))

    report = generate_load(Meeting(), plan_load(load(ClosedLoop(concurrency=3), 9, num_warm_up=0)))
    assert (len(report.timings), most) == (9, 3)


def test_failed_requests_are_counted_by_their_error_and_the_load_goes_on() -> None:
    class Failing(SlowTarget):
        def ask(self, question: Question) -> RequestTiming:
            timing = super().ask(question)
            return replace(timing, error="QueueFullError: full") if len(self.times) % 2 else timing

    target = Failing([1.0] * 6)
    plan = plan_load(load(Poisson(rate_per_s=1.0), 6, num_warm_up=0))
    report = generate_load(target, plan, slo=Slo(end_to_end_s=99.0), sleep=target.clock.sleep,
                           executor=lambda _: OneAtATime())  # fmt: skip
    assert report.errors == {"QueueFullError: full": 3}
    assert report.goodput is not None
    assert report.goodput.num_good == 3
    assert "QueueFullError: full" in report.render()


def test_an_interrupt_ends_the_sending() -> None:
    class Interrupted(SlowTarget):
        def ask(self, question: Question) -> RequestTiming:
            if len(self.times) == 3:
                raise KeyboardInterrupt
            return super().ask(question)

    target = Interrupted([0.0] * 5)
    with pytest.raises(KeyboardInterrupt):
        generate_load(target, plan_load(load(ClosedLoop(concurrency=1), 5, num_warm_up=0)))
