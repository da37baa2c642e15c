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
from workbench.planner import (
    CheckLine,
    PlanCheck,
    WeightTable,
    check,
    check_deployment,
    check_memory,
    measure_other,
)
from workbench.spec import ModelSpec


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
    sizes = {"num_slots": 3, "max_tokens": 96, "kv_dtype": "fp8", "cache_tokens": 200, "num_snapshots": 2}
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
    by_role = [x for x in check.lines if x.what.startswith(("weights: ", "cache: "))]
    assert {"weights: routed_expert", "weights: vision", "cache: latent", "cache: state", "cache: snapshots"} <= {
        x.what for x in by_role
    }
    assert all(x.predicted.value == x.measured.value > 0 for x in by_role), by_role
    whole = [x for x in check.lines if x.what == "the whole rank"]
    assert [x.counts for x in whole] == [False, False], "what the process takes was assumed"
    check.save(tmp_path / "check.json")
    record = json.loads((tmp_path / "check.json").read_text())
    assert record["layout"] == "pp2"
    assert "weights and caches" in check.render()


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_whole_of_a_rank_is_predicted_from_a_smaller_model_and_a_forgotten_line_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred megabytes of weights over two ranks, beside a process that was measured on another model."""
    write_checkpoint(tmp_path / "small", k3_config(num_experts=16, top_k=4))
    write_checkpoint(tmp_path / "large", k3_config(num_experts=16, top_k=4, vocab_size=2**17))
    layout = Layout(tp=2)
    sizes = {"num_slots": 2, "max_tokens": 96}
    with Deployment.start(tmp_path / "small", layout, precision="bf16", **sizes) as small:
        other = measure_other(small, chunk_tokens=16)
    with Deployment.start(tmp_path / "large", layout, precision="bf16", **sizes) as large:
        whole = {x.rank: x for x in check_memory(large, precision="bf16", chunk_tokens=16, other=other) if x.counts}
        plan_of = check.read_weight_table

        def without_embedding(spec: ModelSpec, precision: str) -> WeightTable:
            table = plan_of(spec, precision)
            edges = {name: tuple(x for x in edge if x.role != "embedding") for name, edge in table._edges.items()}
            return WeightTable(spec, precision, table._params, edges)

        monkeypatch.setattr(check, "read_weight_table", without_embedding)
        forgotten = check_memory(large, precision="bf16", chunk_tokens=16, other=other)
    assert {x.what for x in whole.values()} == {"the whole rank"}
    assert all(x.is_close for x in whole.values()), whole
    missed = {x.what for x in forgotten if x.counts and not x.is_close}
    assert missed == {"weights: embedding", "weights", "weights and caches", "the whole rank"}
