"""`workbench compare`: two reports, what changed, and an exit code that a pipeline can stop on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench.report import Day0Report, Gate

Call = Callable[..., Any]


def report(first_token_s: float | None, created_at: str = "2026-11-29T19:30:00+00:00") -> Day0Report:
    gate = Gate(id="latency.first_token", layer="application", question="?", threshold=1.0, value=0.5, relation="<=")
    return Day0Report(
        model="K3",
        checkpoint="data/k3-tiny",
        weights_kind="dummy",
        gates=(dataclasses.replace(gate, value=first_token_s),),
        created_at=created_at,
        hardware="a CPU",
        versions={},
    )


@pytest.fixture
def reports(tmp_path: Path) -> dict[str, Path]:
    for name, value in (("good", 0.5), ("slower", 0.9), ("bad", 1.5), ("silent", None)):
        report(value, created_at=name).write(tmp_path / name)
    return {path.name: path for path in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("old", "new", "code", "shown"),
    [
        ("good", "good", 0, "0 of 1 gates changed, 0 for the worse"),
        ("good", "slower", 0, "1.8x"),
        ("bad", "good", 0, "0 for the worse"),
        ("good", "bad", 1, "WORSE"),
        ("good", "silent", 1, "WORSE"),
    ],
)
def test_exit_code_is_1_where_a_gate_got_worse(
    call: Call, reports: dict[str, Path], old: str, new: str, code: int, shown: str
) -> None:
    outcome = call("compare", reports[old], reports[new] / "report.json")
    assert (outcome.code, outcome.err) == (code, "")
    assert shown in outcome.out
    record = call("compare", reports[old], reports[new], "--json").record
    assert record["passed"] is (code == 0)


def test_what_differs_around_the_gates_is_listed(call: Call, reports: dict[str, Path]) -> None:
    assert "created_at" in call("compare", reports["good"], reports["slower"]).out
    same = call("compare", reports["good"], reports["good"]).out
    assert same == "0 of 1 gates changed, 0 for the worse\n"
