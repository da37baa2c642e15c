"""Plans drawn: bars that add up to the peak, findings in titles, and no figure without its basis."""

from __future__ import annotations

from typing import Any

import pytest
from test_charts import numbers

from workbench.base import Quantity
from workbench.placement import Layout
from workbench.planner import CostLine, MemoryLedger, MemoryLine, StageCost, StepCost
from workbench.view import cache_lines, chart_from_json, draw_svg, memory_bars, step_bars


def ledger(capacity: float | None, **sizes: tuple[str, str, float]) -> dict[str, Any]:
    lines = tuple(
        MemoryLine(role=role, group=group, phase=phase, size=Quantity(size, "B"))  # type: ignore[arg-type]
        for role, (group, phase, size) in sizes.items()
    )
    known = None if capacity is None else Quantity(capacity, "B")
    return MemoryLedger(layout=Layout(tp=3), stage=0, precision="bf16", lines=lines, capacity=known).to_json()


LINES = {
    "routed_expert": ("weights", "rest", 70e9),
    "norm": ("weights", "rest", 1e6),
    "latent": ("cache", "rest", 20e9),
    "other": ("other", "rest", 2e9),
    "router": ("weights", "rest", 2e6),
    "window": ("working", "load", 3e9),
    "activations": ("working", "serving", 4e9),
}


def test_memory_bars_add_up_to_the_peak_and_what_is_free() -> None:
    record = ledger(128e9, **LINES)
    chart = memory_bars(record)
    assert sum(chart.values) == 128e9
    assert dict(zip(chart.labels, chart.values, strict=True)) == {
        "routed expert": 70e9,
        "cache: latent": 20e9,
        "activations": 4e9,
        "runtime": 2e9,
        "2 smaller ones": 3e6,
        "free": record["free"],
    }
    assert chart.title == "tp3: 32 GB of 128 GB stay free on each rank"
    assert "serving" in chart.note


def test_memory_bars_of_a_load_that_takes_more_than_serving_leave_the_caches_out() -> None:
    chart = memory_bars(ledger(None, **LINES | {"window": ("working", "load", 50e9)}))
    assert "cache: latent" not in chart.labels
    assert "activations" not in chart.labels
    assert sum(chart.values) == 70e9 + 3e6 + 2e9 + 50e9
    assert chart.title == "tp3: 122 GB on each rank"
    assert "loading" in chart.note


def test_memory_that_does_not_fit_is_said_in_the_title() -> None:
    chart = memory_bars(ledger(90e9, **LINES))
    assert chart.title == "tp3: 6 GB more than the 90 GB of a device"
    assert "free" not in chart.labels


def step(*names: str) -> dict[str, Any]:
    lines = tuple(
        CostLine(
            name=name,
            kind="operators",
            calls=3,
            lower=Quantity(0.001, "s", "modelled"),
            estimate=Quantity(0.01 * (i + 1), "s", "assumed"),
        )
        for i, name in enumerate(names)
    )
    return StepCost(phase="decode", stages=(StageCost(stage=0, lines=lines),)).to_json()


def test_step_bars_name_the_longest_work_and_how_far_the_bound_is() -> None:
    chart = step_bars(step("gemm", "grouped_gemm", "norm"))
    assert chart.title == "norm takes 50% of a predicted decode step of 60 ms, 20 times its lower bound"
    assert chart.labels == ("norm", "grouped gemm", "gemm")
    assert "assumed" in chart.note
    many = step_bars(step(*(f"work {i}" for i in range(14))))
    assert many.labels[-1] == "4 smaller ones"
    assert sum(many.values) == pytest.approx(1.05)
    with pytest.raises(ValueError, match="no step"):
        step_bars(step())


def test_cache_lines_tell_both_sizes_and_where_the_cache_overtakes() -> None:
    chart = cache_lines({1000: 30_000, 4000: 120_000, 64_000: 1_920_000}, 100_000)
    assert chart.title == "At 64,000 tokens a sequence keeps 1.92 MB of cache and 100 kB of state"
    assert "from 4,000 tokens" in chart.note
    assert [s.y[0] for s in chart.series] == [30_000.0, 100_000.0]
    assert chart.log_y
    assert "nowhere" in cache_lines({10: 1}, 5).note
    with pytest.raises(ValueError, match="no context"):
        cache_lines({}, 5)


@pytest.mark.parametrize(
    "chart",
    [memory_bars(ledger(90e9, **LINES)), step_bars(step("a", "b")), cache_lines({1: 1, 9: 9}, 3)],
    ids=["memory", "step", "cache"],
)
def test_they_are_charts_like_all_others(chart: Any) -> None:
    assert chart_from_json(chart.to_json()) == chart
    assert numbers(draw_svg(chart))
