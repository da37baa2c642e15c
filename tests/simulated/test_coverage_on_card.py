"""The coverage gate on a device with gaps that are known: it names each of them and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from card_runs import GAPS, PLANTED, TINY, OnCard, named

HERE_SCRIPT = "tests/simulated/coverage_gate.py"


def judged(on_card: OnCard, gaps: str) -> dict[str, Any]:
    done = on_card(HERE_SCRIPT, TINY, GAPS=gaps)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_card_without_gaps_passes(on_card: OnCard) -> None:
    found = judged(on_card, "")
    assert found["device"] == "simcard"
    assert (found["gate"]["status"], found["gate"]["value"]) == ("pass", 0), found["gate"]["evidence"]
    assert "tried on simcard" in found["gate"]["evidence"]


def test_planted_gaps_are_named_and_nothing_else_is(on_card: OnCard) -> None:
    found = judged(on_card, GAPS)
    gate = found["gate"]
    assert gate["status"] == "fail"
    assert named(gate["evidence"]) == PLANTED
    assert gate["value"] == len(gate["evidence"].split("; aten."))
    gaps = next(table for table in found["tables"] if table.startswith("Gaps"))
    assert all(operator in gaps for operator in PLANTED)


def test_a_gap_that_cannot_be_planted_is_refused(on_card: OnCard) -> None:
    done = on_card("-c", "import torch", GAPS="missing:no_such_operator")
    assert done.returncode != 0
    assert "no operator 'no_such_operator'" in done.stderr


@pytest.mark.parametrize("gaps", ["topk", "slow:topk"])
def test_gaps_are_spelled_as_documented(on_card: OnCard, gaps: str) -> None:
    done = on_card("-c", "import torch", GAPS=gaps)
    assert done.returncode != 0
    assert "expected missing:NAME, host:NAME or wrong:NAME" in done.stderr
