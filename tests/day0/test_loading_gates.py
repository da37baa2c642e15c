"""The gates about loading name the rank that is worst in each."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.day0.gates import GateBook
from workbench.day0.load import measure_loading
from workbench.deployment import LoadReport
from workbench.report import Gate, Section

NONE: Any = None  # what the gates do not look at


def report(rank: int, **changes: float) -> LoadReport:
    """A rank that was assigned 100 bytes and keeps 60 of them in a window of 40."""
    values = {"rows_written": 7, "bytes_read": 100, "peak_host_bytes": 90, **changes}
    stats = {"bytes_assigned": 100, "resident_bytes": 60, "window_bytes": 40, "seconds": 1.0}
    stats |= {key: values[key] for key in ("bytes_read", "peak_host_bytes")}
    stats["read_ratio"] = stats["bytes_read"] / stats["bytes_assigned"]
    ledger = {"rows": 7, "rows_written": int(values["rows_written"]), "warnings": []}
    return LoadReport(
        rank=rank, place=f"rank {rank}", info=NONE, spec=NONE, ledger=ledger, stats=stats, stages={}, phases={}
    )


def judged(*reports: LoadReport, on_host: bool = True) -> dict[str, Gate]:
    gates, sections = GateBook(), list[Section]()
    measure_loading(gates, sections, reports, samples={}, on_host=on_host, say=lambda line: None)
    assert [section.title for section in sections] == ["Loading"]
    return {gate.id: gate for gate in gates.close() if gate.id.startswith("loading.")}


def test_a_load_that_keeps_its_word_passes() -> None:
    gates = judged(report(0), report(1))
    assert {gate.status for gate in gates.values()} == {"pass"}
    assert gates["loading.rows"].evidence == "ledgers of 2 ranks"


@pytest.mark.parametrize(
    ("gate_id", "changes", "words"),
    [
        ("loading.rows", {"rows_written": 5}, "rank 1 lacks 2"),
        ("loading.read_ratio", {"bytes_read": 150}, "250 bytes read, 200 assigned; rank 1 read 1.500 times its own"),
        ("loading.memory", {"peak_host_bytes": 101}, "rank 1 grew by 101 B, its window is 40 B, its weights 60 B"),
    ],
)
def test_the_rank_that_broke_it_is_named(gate_id: str, changes: dict[str, float], words: str) -> None:
    gates = judged(report(0), report(1, **changes))
    assert {key for key, gate in gates.items() if gate.status == "fail"} == {gate_id}
    assert words in gates[gate_id].evidence


def test_weights_elsewhere_are_no_excuse_for_host_memory() -> None:
    gate = judged(report(0), on_host=False)["loading.memory"]
    assert (gate.status, gate.value) == ("fail", 50)
    assert "weights" not in gate.evidence
