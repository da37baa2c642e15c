"""Goodput under a service level objective."""

from __future__ import annotations

import pytest

from workbench.profiling import Percentiles, RequestTiming, Slo, measure_goodput


def timing(first: float, last: float, num: int, **options: object) -> RequestTiming:
    arrivals = ((10.0 + first, 1), (10.0 + last, num - 1)) if num > 1 else ((10.0 + first, 1),)
    return RequestTiming(submitted_s=10.0, arrivals=arrivals, **options)  # type: ignore[arg-type]


SLO = Slo(first_token_s=1.0, per_token_s=0.5, end_to_end_s=8.0)


def test_each_limit_is_broken_by_its_own_request() -> None:
    timings = [
        timing(1.0, 3.0, 5),  # every limit kept to the last bit
        timing(1.25, 2.0, 5),
        timing(0.5, 3.5, 6),
        timing(0.5, 8.5, 20),
        timing(0.5, 0.5, 1),  # one token: there is no time per token
        timing(0.5, 3.0, 9, error="DeploymentError: x"),
        RequestTiming(submitted_s=10.0, arrivals=((10.5, 0),)),
    ]
    assert [SLO.broken_by(each) for each in timings] == [
        (),
        ("first_token_s",),
        ("per_token_s",),
        ("end_to_end_s",),
        (),
        ("error",),
        ("error",),
    ]
    good = measure_goodput(timings, SLO)
    assert (good.num_good, good.num_requests, good.seconds) == (2, 7, 8.5)
    assert good.requests_per_s == 2 / 8.5
    assert dict(good.broken) == {"first_token_s": 1, "per_token_s": 1, "end_to_end_s": 1, "error": 2}
    assert "2 of 7" in good.render()


def test_a_share_of_few_requests_is_not_sure() -> None:
    """Wilson's interval, against published values: 10 of 10 and 5 of 10."""
    low, high = measure_goodput([timing(0.5, 1.0, 3)] * 10, SLO).interval
    assert (low, high) == (pytest.approx(0.7225, abs=1e-4), 1.0)
    half = measure_goodput([timing(0.5, 1.0, 3)] * 5 + [timing(5, 6, 3)] * 5, SLO).interval
    assert half == (pytest.approx(0.2366, abs=1e-4), pytest.approx(0.7634, abs=1e-4))
    assert measure_goodput([], SLO).interval == (0.0, 1.0)
    assert measure_goodput([], SLO).share is None


def test_limits_that_nothing_could_keep_are_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        Slo(first_token_s=0.0)


def test_percentiles_of_weighted_values_are_those_of_the_values_written_out() -> None:
    pairs = [(0.3, 4), (0.1, 7), (0.2, 0), (0.9, 1), (0.5, 3)]
    assert Percentiles.weighted(pairs) == Percentiles.of([value for value, weight in pairs for _ in range(weight)])
    assert Percentiles.weighted([(1.0, 0)]) is None


@pytest.mark.parametrize(
    ("count", "p90", "p99"), [(1, False, False), (10, True, False), (99, True, False), (100, True, True)]
)
def test_a_percentile_without_samples_beyond_it_is_marked(count: int, p90: bool, p99: bool) -> None:
    found = Percentiles.of([float(n) for n in range(count)])
    assert found is not None
    assert (found.supports(90), found.supports(99)) == (p90, p99)
