"""The gate about operators: it counts them by name, whatever is wrong with them, and tells the worst of each."""

from __future__ import annotations

import pytest
from acceptance import TINY

from workbench.day0 import operators
from workbench.day0.gates import GateBook
from workbench.operators import Coverage, Inventory, OperatorResult, Roofline, Status, distinct_operators
from workbench.placement import Layout
from workbench.report import Gate, Section
from workbench.spec import read_spec


def judged(monkeypatch: pytest.MonkeyPatch, faults: dict[str, tuple[Status, ...]]) -> tuple[Gate, Section, dict]:
    """The gate where the device answers as `faults` say, one status per use of an operator, and "ran" elsewhere."""
    asked: dict = {}

    def probe(inventories: list[Inventory], device: str, **options: object) -> Coverage:
        asked.update(options, phases=[inventory.workload.phase for inventory in inventories], device=device)
        left = {name: list(statuses) for name, statuses in faults.items()}
        results = []
        for use in distinct_operators(tuple(inventories)):
            statuses = left.get(use.name)
            status = statuses.pop(0) if statuses else "ran"
            results.append(OperatorResult(use=use, status=status, detail=f"as {status} as can be"))
        return Coverage(device=device, device_name="card", taken_at="now", results=tuple(results), roofline=Roofline())

    monkeypatch.setattr(operators, "probe_operators", probe)
    gates, sections = GateBook(), list[Section]()
    operators.measure_coverage(
        gates,
        sections,
        read_spec(TINY),
        Layout(pp=2),
        precision="mxfp4",
        device="card",
        say=lambda line: None,
    )
    gate = gates.found("operators.coverage")
    assert gate is not None
    return gate, sections[0], asked


def test_each_kind_of_gap_fails_by_name_and_the_worst_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, section, _ = judged(
        monkeypatch,
        {
            "aten.mm.default": ("fell back", "missing", "approximate"),
            "aten.topk.default": ("not tried",),
            "aten.exp.default": ("approximate",),
            "aten.silu.default": ("failed",),
        },
    )
    assert (gate.status, gate.value) == ("fail", 4)
    assert gate.evidence.split("; ") == [
        "aten.exp.default approximate: as approximate as can be",
        "aten.mm.default missing: as missing as can be",
        "aten.silu.default failed: as failed as can be",
        "aten.topk.default not tried: as not tried as can be",
    ]
    assert [table.title for table in section.tables] == ["Operators on card (card), now", "Gaps"]


def test_every_stage_every_phase_and_a_picture_are_looked_at_cheaply(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, _, asked = judged(monkeypatch, {})
    assert (gate.status, gate.value) == ("pass", 0)
    assert asked["phases"] == ["prefill", "prefill", "decode", "decode", "vision"]
    assert (asked["each_shape"], asked["roofline"], asked["device"]) == (False, False, "card")


def test_a_coverage_that_was_taken_elsewhere_is_judged_alike() -> None:
    gates = GateBook()
    found = Coverage(device="card:0", device_name="card", taken_at="now", results=(), roofline=Roofline())
    gate = operators.judge_coverage(gates, found)
    assert gates.found("operators.coverage") == gate
    assert (gate.status, gate.value) == ("pass", 0)
    assert gate.evidence.startswith("0 operators in 0 shapes tried on card:0")
