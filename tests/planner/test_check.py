"""Predicted beside measured, on real ranks of a small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from planner_samples import machine, simple_trace

from workbench.base import Quantity
from workbench.checkpoint import k3_config, write_checkpoint
from workbench.deployment import Deployment
from workbench.placement import Layout
from workbench.planner import CheckLine, PlanCheck, check_deployment


def line(predicted: float, measured: float, unit: str = "B", **more: object) -> CheckLine:
    return CheckLine(
        what="x",
        predicted=Quantity(predicted, unit, "modelled"),
        measured=Quantity(measured, unit, "measured"),
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("predicted", "measured", "unit", "is_close"),
    [(103, 100, "B", True), (104, 100, "B", False), (97, 100, "B", True), (1.24, 1, "s", True), (0.7, 1, "s", False)],
)
def test_memory_must_be_within_three_and_times_within_twenty_five_percent(
    predicted: float, measured: float, unit: str, is_close: bool
) -> None:
    assert line(predicted, measured, unit).is_close == is_close


def test_a_check_fails_on_a_line_that_counts_and_only_on_those() -> None:
    def check(*lines: CheckLine) -> PlanCheck:
        return PlanCheck(model="toy", layout=Layout(), precision="bf16", lines=lines)

    assert check(line(100, 100), line(500, 100, counts=False)).ok
    assert not check(line(100, 100), line(500, 100)).ok


@pytest.mark.ranks
def test_memory_of_real_ranks_is_predicted_to_the_byte(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", k3_config(num_experts=16, top_k=4))
    layout = Layout(pp=2, stages=(3, 5))
    sizes = {"num_slots": 3, "max_tokens": 96, "kv_dtype": "fp8"}
    with Deployment.start(tmp_path / "model", layout, precision="mxfp4", **sizes) as deployment:
        check = check_deployment(
            deployment,
            machine(2, device_type="cpu"),
            precision="mxfp4",
            chunk_tokens=16,
            trace=simple_trace,
            repeats=2,
        )
    memory = [x for x in check.lines if x.what in ("weights", "caches", "weights and caches")]
    assert len(memory) == 3 * 2
    for x in memory:
        assert x.predicted.value == x.measured.value > 0, x
    times = [x for x in check.lines if x.measured.unit == "s"]
    assert [x.what.split(":")[0] for x in times] == ["prefill", "decode"]
    assert all(x.measured.value > 0 for x in times)
    assert not check.ok, "a toy machine of 400 TFLOP/s does not describe this one"
    check.save(tmp_path / "check.json")
    record = json.loads((tmp_path / "check.json").read_text())
    assert record["layout"] == "pp2"
    assert "weights and caches" in check.render()
