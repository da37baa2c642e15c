"""Coverage records: what passes, what a gap says, how rates stand to the roofline, and survival through JSON."""

from __future__ import annotations

import json

import pytest

from workbench.base import Quantity
from workbench.operators import (
    STATUSES,
    Coverage,
    Inventory,
    OperatorResult,
    OperatorUse,
    Roofline,
    Status,
    Workload,
    distinct_operators,
)
from workbench.placement import Layout

ROOFLINE = Roofline(
    matmul=(("bfloat16", Quantity(2e12, "FLOP/s", "measured", "square products")),),
    memory=Quantity(1e11, "B/s", "measured", "copy"),
)


def use(name: str = "aten.mm.default", count: int = 3, *, kind: str = "KDA+MoE", flops: int = 4_000_000) -> OperatorUse:
    return OperatorUse(
        name=name,
        category="gemm",
        layer_kind=kind,
        input_shapes=((20, 100), (100, 1000)),
        input_dtypes=("bfloat16", "bfloat16"),
        flops=flops,
        bytes_read=300_000,
        bytes_written=100_000,
        weight_bytes=200_000,
        count=count,
    )


def coverage(*results: OperatorResult) -> Coverage:
    return Coverage(device="card:0", device_name="a card", taken_at="2026-01-01", results=results, roofline=ROOFLINE)


@pytest.mark.parametrize("status", STATUSES)
def test_only_what_ran_on_the_device_passes(status: Status) -> None:
    good = OperatorResult(use=use("aten.bmm.default"), status="ran", seconds=1e-5)
    found = coverage(good, OperatorResult(use=use(), status=status, detail="why"))
    assert found.ok == (status == "ran")
    assert [gap.status for gap in found.gaps] == ([] if status == "ran" else [status])
    assert ("FAIL: 1 of 2" in found.render()) == (status != "ran")
    colours = {"ran": "green", "failed": "red", "missing": "red"}
    assert found.results[1].colour == colours.get(status, "amber")


def test_seconds_belong_to_the_operator_at_its_shapes() -> None:
    found = coverage(OperatorResult(use=use(), status="ran", seconds=5e-6))
    other_layer = found.seconds(use(count=9, kind="MLA+MoE"))
    assert other_layer is not None
    assert (other_layer.value, other_layer.unit, other_layer.basis) == (5e-6, "s", "measured")
    assert found.seconds(use("aten.bmm.default")) is None


def test_the_roofline_takes_the_slower_of_work_and_bytes() -> None:
    assert ROOFLINE.least_seconds(use()) == pytest.approx(400_000 / 1e11)
    assert ROOFLINE.least_seconds(use(flops=400_000_000)) == pytest.approx(4e8 / 2e12)


def test_a_limit_that_was_not_measured_gives_no_share() -> None:
    assert Roofline(memory=ROOFLINE.memory).least_seconds(use()) is None
    assert Roofline(matmul=ROOFLINE.matmul).least_seconds(use()) is None
    assert Roofline(memory=ROOFLINE.memory).least_seconds(use(flops=0)) is not None


@pytest.mark.parametrize(
    ("name", "word"),
    [("aten.topk.default", "sort"), ("aten.tanh_.default", "vendor"), ("aten.index_copy_.default", "index_put")],
)
def test_a_gap_comes_with_something_to_compute_instead(name: str, word: str) -> None:
    assert word in OperatorResult(use=use(name), status="missing").replacement
    assert OperatorResult(use=use(name), status="ran").replacement == ""


def test_coverage_survives_json() -> None:
    found = coverage(
        OperatorResult(use=use(), status="ran", seconds=5e-6, error=1e-3, tolerance=8e-3, share=0.8),
        OperatorResult(use=use("aten.topk.default", flops=0), status="fell back", detail="to the host"),
    )
    again = Coverage.from_json(json.loads(json.dumps(found.to_json())))
    assert again == found
    assert again.seconds(use()) == found.seconds(use())
    assert "<table>" in again._repr_html_()


def test_equal_operators_of_several_inventories_count_together() -> None:
    def inventory(*uses: OperatorUse) -> Inventory:
        return Inventory(
            model="m",
            layout=Layout(),
            stage=0,
            precision="bf16",
            workload=Workload(phase="decode"),
            operators=uses,
            collectives=(),
            activation_peak_bytes=0,
        )

    first, second = inventory(use(count=3), use("aten.bmm.default")), inventory(use(count=4, kind="MLA+MoE"))
    counts = {u.name: u.count for u in distinct_operators((first, second))}
    assert counts == {"aten.mm.default": 7, "aten.bmm.default": 3}
    assert first.flops == 6 * 4_000_000
    assert first.bytes == 6 * 400_000
    assert first.weight_bytes == 6 * 200_000
