"""Efficiencies from measurements: right inside the measured range, and no claim outside of it."""

from __future__ import annotations

import pytest
from planner_samples import given, operator

from workbench.base import ConfigError, Quantity
from workbench.operators import Coverage, OperatorResult, OperatorUse, Roofline
from workbench.placement import Layout
from workbench.planner import (
    CheckLine,
    CostLine,
    Efficiency,
    PlanCheck,
    StageCost,
    calibrate,
    calibrate_host,
    step_cost,
)

ROOFLINE = Roofline(
    memory=Quantity(1e9, "B/s", "measured"), matmul=(("bfloat16", Quantity(1e12, "FLOP/s", "measured")),)
)


def measured(use: OperatorUse, seconds: float) -> OperatorResult:
    return OperatorResult(use=use, status="ran", seconds=seconds)


def coverage(*results: OperatorResult, roofline: Roofline = ROOFLINE) -> Coverage:
    return Coverage(device="toy", device_name="toy", taken_at="", results=results, roofline=roofline)


def test_launch_and_share_come_back_from_times_that_follow_them() -> None:
    """3 us to start, a quarter of the roofline."""
    sizes = [10**4, 10**5, 10**6, 10**7]
    results = [measured(operator("norm", moved=size), 3e-6 + size / 1e9 / 0.25) for size in sizes]
    fit = calibrate(coverage(*results)).fits["norm"]
    assert fit.launch_s == pytest.approx(3e-6, rel=1e-3)
    assert fit.share == pytest.approx(0.25, rel=1e-3)
    assert fit.residual < 1e-3
    assert fit.num_points == 4


def test_inside_the_range_the_fit_speaks_and_outside_the_assumption_does() -> None:
    results = [measured(operator("norm", moved=size), size / 1e9 / 0.5) for size in (10**5, 10**6)]
    base = Efficiency(memory={"": 0.9}, launch=given(0, "s"))
    found = calibrate(coverage(*results), base)
    inside, outside = operator("norm", moved=5 * 10**5), operator("norm", moved=10**8)
    seconds, basis, _ = found.seconds(inside, 0.0, 5e5 / 1e9)
    assert (seconds, basis) == (pytest.approx(5e5 / 1e9 / 0.5), "modelled")
    seconds, basis, _ = found.seconds(outside, 0.0, 1e8 / 1e9)
    assert (seconds, basis) == (pytest.approx(1e8 / 1e9 / 0.9), "assumed")
    other = operator("attention", moved=5 * 10**5)
    assert found.seconds(other, 0.0, 5e5 / 1e9)[1] == "assumed"


def test_one_size_is_no_fit_and_no_roofline_an_error() -> None:
    one = measured(operator("norm", moved=10**5), 1e-3)
    assert calibrate(coverage(one)).fits == {}
    with pytest.raises(ConfigError, match="roofline"):
        calibrate(coverage(one, roofline=Roofline()))


def checked(measured_s: float, host_s: float, share: float = 1.0) -> PlanCheck:
    """A decode step of 0.02 s of measured operators in 1,000 calls, on one stage."""
    seconds = Quantity(0.02, "s", "measured" if share == 1 else "assumed")
    lines = [CostLine(name="gemm", kind="operators", calls=400, lower=seconds, estimate=seconds)]
    between = Quantity(host_s * 1000, "s", "assumed")
    lines.append(CostLine(name="between operators", kind="operators", calls=1000, lower=between, estimate=between))
    cost = step_cost("decode", [StageCost(stage=0, lines=tuple(lines), num_calls=1000, measured_share=share)])
    predicted = cost.seconds + Quantity(0.001, "s", "measured")
    line = CheckLine(what="decode: x", predicted=predicted, measured=Quantity(measured_s, "s", "measured"))
    return PlanCheck(model="toy", layout=Layout(), precision="bf16", lines=(line,), costs=(cost,))


@pytest.mark.parametrize("assumed", [0.0, 3e-6])
def test_what_is_left_of_a_step_is_spread_over_its_calls_whatever_was_assumed_before(assumed: float) -> None:
    found = calibrate_host(checked(0.021 + 1000 * 7e-6, assumed))
    assert found.value == pytest.approx(7e-6)
    assert found.basis == "measured"
    assert calibrate_host(checked(0.005, assumed)).value == 0, "never negative"


def test_a_step_of_assumed_operators_calibrates_nothing() -> None:
    with pytest.raises(ConfigError, match="not measured"):
        calibrate_host(checked(0.05, 0.0, share=0.5))
    with pytest.raises(ConfigError, match="no prefill step"):
        calibrate_host(checked(0.05, 0.0), "prefill")


def test_fits_are_shown_with_their_range() -> None:
    results = [measured(operator("norm", moved=size), size / 1e9) for size in (10**5, 10**6)]
    text = calibrate(coverage(*results)).table().render()
    assert "norm" in text
    assert "100 µs to 1 ms" in text
