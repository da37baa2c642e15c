"""Coverage drawn: the operator that is most off, the costliest ones against their limit, and what a cache explains."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.operators import Coverage, OperatorResult, OperatorUse, Roofline
from workbench.view import error_bars, rate_bars


def result(
    name: str,
    error: float | None = None,
    *,
    tolerance: float | None = 0.01,
    seconds: float | None = None,
    share: float | None = None,
    count: int = 1,
) -> OperatorResult:
    use = OperatorUse(
        name=f"aten.{name}.default",
        category="elementwise",
        layer_kind="layer",
        input_shapes=((3, 5), (5, 7)),
        input_dtypes=("bfloat16", "bfloat16"),
        flops=0,
        bytes_read=64,
        bytes_written=32,
        weight_bytes=0,
        count=count,
    )
    return OperatorResult(use=use, status="ran", error=error, tolerance=tolerance, seconds=seconds, share=share)


def record(*results: OperatorResult) -> dict[str, Any]:
    return Coverage(device="card:0", device_name="card", taken_at="now", results=results, roofline=Roofline()).to_json()


def test_error_bars_show_each_operator_by_its_worst_shape() -> None:
    chart = error_bars(record(result("mm", 0.002), result("exp", 0.0), result("mm", 0.006), result("view")))
    assert dict(zip(chart.labels, chart.values, strict=True)) == {"mm": pytest.approx(60), "exp": 0.0}
    assert chart.title == "the largest error, of mm, is 60 % of what rounding explains"
    assert "2 operators on card:0" in chart.note


def test_error_bars_say_which_operator_is_wrong() -> None:
    found = (result("mm", 0.002), result("exp", 0.05))
    assert error_bars(record(*found)).title == "exp is off by 5.0 times what rounding explains"
    endless = (result("sin", float("inf")), result("neg", 1, tolerance=0))
    assert error_bars(record(*found, *endless)).title == "sin, neg: no finite error"
    with pytest.raises(ValueError, match="compared"):
        error_bars(record(result("mm")))


def test_rate_bars_weigh_operators_by_all_their_calls_and_tell_of_caches() -> None:
    chart = rate_bars(
        record(
            result("mm", seconds=2e-6, share=0.25, count=50),
            result("exp", seconds=1e-5, share=1.5),
            result("sin", seconds=1e-6),
        )
    )
    assert chart.labels == ("mm 5x7", "exp 5x7")
    assert chart.values == (pytest.approx(25), pytest.approx(150))
    assert chart.texts[0].endswith("100 µs")
    assert chart.title.startswith("mm at 25 % of its limit")
    assert (
        chart.note
        == "1 of 2 shapes pass the limits measured on card:0: they lie in a cache, or the device had other work then"
    )
    assert (
        rate_bars(record(result("mm", seconds=2e-6, share=0.25))).note
        == "0 of 1 shapes pass the limits measured on card:0"
    )
    with pytest.raises(ValueError, match="known limit"):
        rate_bars(record(result("mm")))
