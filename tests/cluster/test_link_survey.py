"""The order of a survey and what a failure costs, with pools that only pretend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from workbench.cluster.link_survey import MAX_BREAKS, LinkSurvey, Series, plan_series
from workbench.cluster.rank_pool import StepOutcome

SIZES = (1000, 2000, 3000, 4000)
Fault = Callable[[Mapping[str, Any]], str]


class FakePool:
    """Two ranks that take a microsecond per byte; `fault` says "break" or "error" of a step, "" where it is sound."""

    def __init__(self, fault: Fault, join_failure: str = "") -> None:
        self.fault, self.join_failure, self.is_closed = fault, join_failure, False
        self.steps: list[dict[str, Any]] = []

    def start(self, *, join_limit_s: float) -> StepOutcome:
        return StepOutcome(answers={}, failure=self.join_failure, is_broken=bool(self.join_failure))

    def run(self, step: Mapping[str, Any], what: str) -> StepOutcome:
        self.steps.append(dict(step))
        fault = self.fault(step)
        if fault == "break":
            return StepOutcome(answers={}, failure=f"{what}: rank 1 did not answer", is_broken=True)
        error = "RuntimeError: no" if fault == "error" else ""
        answer = {"error": error, "num_bytes": step["num_bytes"], "seconds": step["num_bytes"] * 1e-6}
        failure = f"{what}: ranks 0 1: {error}" if error else ""
        return StepOutcome(answers={0: answer, 1: answer}, failure=failure)

    def close(self) -> None:
        self.is_closed = True


class Pools:
    def __init__(self, fault: Fault, join_failure: str = "") -> None:
        self.fault, self.join_failure = fault, join_failure
        self.made: list[FakePool] = []

    def survey(self) -> LinkSurvey:
        def new_pool() -> Any:
            self.made.append(FakePool(self.fault, self.join_failure))
            return self.made[-1]

        return LinkSurvey(new_pool, num_ranks=2, join_limit_s=1.0, say=lambda what: None)

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [step for pool in self.made for step in pool.steps]


def series(operation: Any = "all_reduce", dtype: str = "bfloat16") -> Series:
    return Series(operation=operation, algorithm=operation, ranks=(0, 1), dtype=dtype, sizes=SIZES)


def test_pairs_come_first_then_groups_and_one_rank_of_each_host() -> None:
    planned = list(plan_series(("a", "a", "a", "b", "b"), SIZES, ("bfloat16", "int8")))
    assert [x.ranks for x in planned[:10]] == [(a, b) for a in range(5) for b in range(a + 1, 5)]
    assert {x.operation for x in planned[:10]} == {"send_recv"}
    groups = list(dict.fromkeys(x.ranks for x in planned[10:]))
    assert groups == [(0, 1, 2, 3, 4), (0, 1), (0, 1, 2, 3), (0, 3)]
    assert {x.ranks for x in planned if x.dtype == "int8"} == {(0, 1, 2, 3, 4)}
    assert len(set(planned)) == len(planned)


def test_every_size_is_measured_and_repeats_follow_the_time() -> None:
    pools = Pools(lambda step: "")
    with pools.survey() as survey:
        survey.measure(series())
    assert survey.findings.points[series()] == [(size, size * 1e-6) for size in SIZES]
    assert [step["repeats"] for step in pools.steps] == [4, 50, 25, 17]
    assert len({step["seed"] for step in pools.steps}) == 4, "numbers must differ from step to step"
    assert pools.made[0].is_closed


def test_what_was_measured_before_a_break_counts_and_the_break_is_a_claim() -> None:
    pools = Pools(lambda step: "break" if step["num_bytes"] == 3000 else "")
    with pools.survey() as survey:
        survey.measure(series())
        survey.measure(series(dtype="float32"))
        survey.measure(series("broadcast"))
    assert [size for size, _ in survey.findings.points[series()]] == [1000, 2000]
    assert survey.findings.claims[0] == (
        "claimed, not measured: all_reduce in bfloat16 over ranks 0 1, 3,000 B: rank 1 did not answer"
    )
    assert series(dtype="float32") not in survey.findings.points, "an algorithm that broke the ranks is not tried again"
    assert [pool.is_closed for pool in pools.made] == [True, True]


def test_one_size_is_too_few_for_a_fit() -> None:
    pools = Pools(lambda step: "break" if step["num_bytes"] == 2000 else "")
    with pools.survey() as survey:
        survey.measure(series())
    assert survey.findings.points == {}


def test_an_error_ends_the_series_and_keeps_the_ranks() -> None:
    pools = Pools(lambda step: "error" if step["num_bytes"] == 4000 else "")
    with pools.survey() as survey:
        survey.measure(series())
        survey.measure(series("broadcast"))
    assert len(pools.made) == 1
    assert [size for size, _ in survey.findings.points[series("broadcast")]] == [1000, 2000, 3000]
    assert len(survey.findings.claims) == 2


@pytest.mark.parametrize(("fault", "tried"), [("error", 48), ("break", MAX_BREAKS)])
def test_coverage_tries_each_dtype_but_after_a_break_no_other(fault: str, tried: int) -> None:
    pools = Pools(lambda step: fault)
    with pools.survey() as survey:
        survey.cover()
    assert len(pools.steps) == tried
    assert len(survey.findings.coverage) == tried
    assert not any(x.is_supported for x in survey.findings.coverage)
    expected = (
        "RuntimeError: no"
        if fault == "error"
        else "all_reduce in float32 over ranks 0 1, 1,024 B: rank 1 did not answer"
    )
    assert survey.findings.coverage[0].detail == expected


def test_after_many_breaks_the_rest_is_given_up_and_counted() -> None:
    pools = Pools(lambda step: "break")
    with pools.survey() as survey:
        for operation in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"):
            survey.measure(series(operation))
    assert len(pools.made) == MAX_BREAKS
    assert survey.findings.claims[-1] == "claimed, not measured: 2 more measurements, given up after the ranks broke"


def test_ranks_that_cannot_join_are_not_started_again() -> None:
    pools = Pools(lambda step: "", join_failure="joining the group: rank 1 did not answer within 1 s")
    with pools.survey() as survey:
        survey.cover()
        survey.measure(series())
    assert len(pools.made) == 1
    assert survey.findings.claims[0].endswith("joining the group: rank 1 did not answer within 1 s")
    assert pools.steps == []
