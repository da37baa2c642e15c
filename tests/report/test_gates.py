"""Gates: the verdict follows from the numbers, and nothing unmeasured passes by silence."""

from __future__ import annotations

import json

import pytest

from workbench.report import Gate, gates_table, verdict_of
from workbench.report.gates import gates_text


def gate(gate_id: str = "a.b", **changes: object) -> Gate:
    values: dict[str, object] = {"layer": "align", "question": "?", "threshold": 2.0, "value": 1.0, "relation": "<="}
    return Gate(id=gate_id, **{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("relation", "threshold", "value", "passed"),
    [
        ("<=", 2.0, 2.0, True),
        ("<=", 2.0, 2.1, False),
        (">=", 2, 2, True),
        (">=", 2, 1, False),
        ("==", 0, 0, True),
        ("==", 0, 0.0, True),
        ("==", 0, 1, False),
        ("==", True, True, True),
        ("==", True, False, False),
        ("==", True, 1, False),
        ("==", "a red circle", "a red circle", True),
        ("==", "a red circle", "a circle", False),
        ("<=", 2.0, float("nan"), False),
        (">=", 2.0, float("nan"), False),
        ("<=", 2.0, float("inf"), False),
        ("<=", 2.0, None, None),
    ],
)
def test_passing_is_computed_from_the_numbers(
    relation: str, threshold: object, value: object, passed: bool | None
) -> None:
    found = gate(relation=relation, threshold=threshold, value=value)
    assert found.passed is passed
    assert found.status == {True: "pass", False: "fail", None: "not measured"}[passed]


def test_values_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be compared by <="):
        gate(value="fast")
    with pytest.raises(ValueError, match="cannot be compared by >="):
        gate(relation=">=", threshold=True, value=1)
    with pytest.raises(ValueError, match="relation '<'"):
        gate(relation="<")


def test_one_failed_gate_fails_the_verdict() -> None:
    assert verdict_of([gate("a"), gate("b")]).passed
    verdict = verdict_of([gate("a"), gate("b", value=3.0)])
    assert not verdict.passed
    assert verdict.blocking == ("b",)
    assert verdict.sentence() == "FAIL: 1 passed, 1 failed; blocking: b"


def test_what_was_not_measured_fails_unless_declared_optional() -> None:
    assert not verdict_of([gate("a"), gate("b", value=None)]).passed
    assert verdict_of([gate("a"), gate("b", value=None, is_optional=True)]).passed
    assert not verdict_of([gate("a"), gate("b", value=3.0, is_optional=True)]).passed


def test_no_gates_is_not_a_pass() -> None:
    assert not verdict_of([]).passed


def test_values_read_with_their_units() -> None:
    assert gate(value=92e6, threshold=80e6, unit="B").value_text() == "92 MB"
    assert gate(value=92e6, threshold=80e6, unit="B").threshold_text() == "at most 80 MB"
    assert gate(value=0, threshold=0, unit="findings").value_text() == "0 findings"
    assert gate(relation="==", value=True, threshold=True).value_text() == "yes"
    assert gate(value=None).value_text() == "not measured"
    assert gate(relation=">=", value=5346376, threshold=1, unit="").threshold_text() == "at least 1"


@pytest.mark.parametrize("value", [1.5, float("inf"), float("nan"), None, 7])
def test_a_gate_survives_its_json(value: object) -> None:
    original = gate(value=value, evidence="e", conditions="c", proof="p", is_optional=True, unit="s")
    record = json.loads(json.dumps(original.to_json(), allow_nan=False))
    assert record["status"] == original.status
    restored = Gate.from_json(record)
    assert str(restored) == str(original)  # by text: a nan is not equal to itself
    record["passed"], record["status"] = True, "pass"
    assert Gate.from_json(record).status == original.status, "a tampered verdict was believed"


def test_table_leads_with_the_verdict() -> None:
    text = gates_table([gate("first"), gate("second", value=3.0)]).render()
    assert text.startswith("FAIL: 1 passed, 1 failed; blocking: second")
    assert "first" in text


LONG = "layer 6, tensor kda_conv: relative 2.1e-01, tolerance 2.0e-01; look at mixer.{q,k,v}_proj. " * 4


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_text_for_a_terminal_keeps_to_its_width_and_tells_failures_in_full(width: int) -> None:
    gates = [gate("a.first", evidence=LONG), gate("b.second", value=3.0, evidence=LONG)]
    text = gates_text(gates, width)
    assert max(map(len, text.splitlines())) <= width
    table, _, below = text.partition("fail: b.second")
    assert ("…" in table) is ("evidence" in table) is (width > 40)  # a narrow terminal has no such column
    assert " ".join(below.split()) == f"? {LONG}".strip()


def test_gates_without_a_value_for_one_reason_are_told_together() -> None:
    gates = [gate(f"loading.{i}", value=None, evidence="LoadError: torn\x1b[31m") for i in range(3)]
    text = gates_text([gate(), *gates], 80)
    assert "not measured: loading.0, loading.1, loading.2\n    LoadError: torn\\x1b[31m" in text
    assert "\x1b" not in text


def test_nothing_is_told_below_where_all_pass() -> None:
    assert gates_text([gate(evidence="seen")], 80).splitlines()[-1].endswith("seen")
