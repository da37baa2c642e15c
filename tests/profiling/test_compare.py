"""Two runs compared: differences that are there are found, noise is not, and unlike runs are called unlike."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from workbench.base import ConfigError
from workbench.profiling import ClosedLoop, Load, LoadReport, RequestTiming, Slo, compare_runs, measure_goodput
from workbench.profiling.compare import load_run


def run(scale: float, *, num: int = 40, seed: int = 1, failed: int = 0, commit: str = "aaa") -> dict[str, Any]:
    """Requests of about a second, some tenth of it noise."""
    rng = random.Random(seed)
    timings = []
    for n in range(num):
        first, rest = 0.5 * scale * rng.uniform(0.9, 1.1), 2.0 * rng.uniform(0.9, 1.1)
        timings.append(RequestTiming(submitted_s=n, arrivals=((n + first, 1), (n + first + rest, 9))))
    timings = [replace(t, error="DeploymentError: x") if n < failed else t for n, t in enumerate(timings)]
    report = LoadReport(
        load=Load(arrivals=ClosedLoop(concurrency=1), num_requests=num, seed=seed),
        warm_up=(),
        timings=tuple(timings),
        started_s=0.0,
        goodput=measure_goodput(timings, Slo(first_token_s=0.6)),
    )
    record = {"kind": "LoadReport", "environment": {"commit": commit, "hardware": {"cores": 2}}, **report.to_json()}
    return json.loads(json.dumps(record, allow_nan=False))


def test_a_planted_slowdown_is_found_where_it_is_and_nowhere_else() -> None:
    found = compare_runs(run(1.0), run(1.3, seed=2))
    verdicts = {change.name: change.verdict for change in found.changes}
    assert verdicts["first_token_s"] == "worse"
    assert verdicts["per_token_s"] == "no difference seen"
    first = next(change for change in found.changes if change.name == "first_token_s")
    assert first.low < first.change < first.high
    assert first.change == pytest.approx(0.3, abs=0.08)
    assert found.is_worse
    assert "Slower than before" in found.render()
    assert compare_runs(run(1.3, seed=2), run(1.0)).changes[0].verdict == "better"


@pytest.mark.parametrize("seed", range(2, 8))
def test_noise_alone_is_no_difference(seed: int) -> None:
    assert not compare_runs(run(1.0), run(1.0, seed=seed)).is_worse


def test_few_requests_decide_nothing() -> None:
    found = compare_runs(run(1.0, num=4), run(2.0, num=4))
    assert {change.verdict for change in found.changes} == {"too few"}
    assert not found.is_worse


def test_new_failures_are_worse_whatever_the_latencies() -> None:
    found = compare_runs(run(1.0), run(1.0, failed=3))
    assert found.failed == (0, 3)
    assert found.is_worse


def test_other_circumstances_are_named() -> None:
    after = run(1.0, seed=3, commit="bbb")
    after["environment"]["hardware"] = {"cores": 8}
    found = {name: (a, b) for name, a, b in compare_runs(run(1.0), after).differences}
    assert found == {"load.seed": ("1", "3"), "commit": ("aaa", "bbb"), "hardware.cores": ("2", "8")}
    assert compare_runs(run(1.0), run(1.0)).differences == ()


def test_what_is_no_load_is_refused() -> None:
    with pytest.raises(ConfigError, match="not the record of a load"):
        compare_runs({"kind": "LoadReport"}, run(1.0))
    with pytest.raises(ConfigError, match="no record of a load"):
        load_run([{"kind": "LatencySummary"}])
    assert load_run([{"kind": "LoadReport", "n": 1}, {"kind": "x"}, {"kind": "LoadReport", "n": 2}])["n"] == 2
