"""The book of gates: every gate once, values that cannot be overwritten, reasons that survive."""

from __future__ import annotations

import pytest

from workbench.base import ConfigError
from workbench.day0.gates import GATES, GateBook


def test_every_gate_is_reported_once_and_nothing_unmeasured_passes() -> None:
    gates = GateBook().close()
    assert [gate.id for gate in gates] == list(GATES)
    assert {gate.status for gate in gates} == {"not measured"}
    assert all(gate.blocks and gate.evidence for gate in gates)


def test_a_value_is_kept_with_its_evidence_and_found_again() -> None:
    book = GateBook()
    assert book.found("loading.rows") is None
    gate = book.measured("loading.rows", 3, evidence="ledgers", conditions="cold")
    assert (gate.status, gate.threshold, gate.conditions) == ("fail", 0, "cold")
    assert book.found("loading.rows") is gate
    assert gate in book.close()


def test_an_unknown_gate_and_a_second_value_are_bugs() -> None:
    book = GateBook()
    with pytest.raises(KeyError, match=r"loading\.luck"):
        book.measured("loading.luck", 1)
    with pytest.raises(KeyError, match="luck"):
        book.unmeasured("luck", "no gate starts so")
    book.measured("loading.rows", 0)
    with pytest.raises(ValueError, match="has its value already"):
        book.measured("loading.rows", 0)


def test_the_first_reason_stays_and_a_value_outweighs_any() -> None:
    book = GateBook()
    book.unmeasured("parity.fp32", "does not fit")
    book.unmeasured("parity", "a rank died")
    book.measured("parity.batch", 0, evidence="alone and together")
    book.unmeasured("", "never reached")
    told = {gate.id: (gate.status, gate.evidence) for gate in book.close()}
    assert told["parity.fp32"] == told["parity.fp32_tokens"] == ("not measured", "does not fit")
    assert told["parity.serving"] == ("not measured", "a rank died")
    assert told["parity.batch"] == ("pass", "alone and together")
    assert told["answers.text"] == ("not measured", "never reached")


def test_a_limit_moves_its_threshold_and_no_other() -> None:
    book = GateBook(limits={"latency.first_token": 0.25})
    assert book.measured("latency.first_token", 0.3).status == "fail"
    assert book.measured("latency.per_token", 0.3).threshold == GATES["latency.per_token"].threshold
    assert GATES["latency.first_token"].threshold == 10.0


@pytest.mark.parametrize(
    ("gate_id", "limit", "message"),
    [
        ("latency.third_token", 1.0, "has no limit to set"),
        ("checkpoint.audit", 3.0, "has no limit to set"),  # an exact answer is not up for bargaining
        ("latency.per_token", float("nan"), "is no number"),
        ("latency.per_token", True, "is no number"),
    ],
)
def test_unusable_limits_are_refused(gate_id: str, limit: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GateBook(limits={gate_id: limit})
