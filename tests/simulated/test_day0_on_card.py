"""The whole acceptance on the simulated accelerator, two devices, by the command that a user types."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from card_runs import GAPS, NANO, PLANTED, TINY, OnCard, named

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

ALWAYS = {"device.features", "operators.coverage", "checkpoint.audit", "loading.rows", "loading.read_ratio"}


def accepted(
    on_card: OnCard, root: Path, out: Path, gaps: str
) -> tuple[int, dict[str, dict[str, Any]], dict[str, Any]]:
    # How fast a simulated card is, is a matter of how busy its host is: its times are given limits of their own.
    limits = ("--max-first-token-s", 600, "--max-per-token-s", 60)
    done = on_card("-m", "workbench.cli", "day0", root, "--ranks", 2, "--json", "--out", out, *limits, GAPS=gaps)
    assert done.returncode in (0, 1), done.stderr[-4000:]
    report = json.loads((out / "report.json").read_text())
    return done.returncode, {gate["id"]: gate for gate in report["gates"]}, report


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("root", [TINY, NANO], ids=lambda root: root.name)
def test_without_gaps_the_card_is_accepted(on_card: OnCard, tmp_path: Path, root: Path) -> None:
    code, gates, report = accepted(on_card, root, tmp_path, "")
    failed = {gate_id for gate_id, gate in gates.items() if gate["status"] != "pass"}
    # The miniature's weights know nothing, on the host as well; the trained model's do.
    assert failed == ({"answers.correct"} if root == TINY else set()), report["verdict"]
    assert code == (1 if failed else 0)
    covered = next(section for section in report["sections"] if section["title"] == "Operators")
    assert not any(table["title"] == "Gaps" for table in covered["tables"])
    assert report["environment"]["device"] == "simcard"
    assert report["hardware"] == "simulated accelerator 0, 2 devices (simcard)"
    assert any(section["title"] == "Operators" for section in report["sections"])


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("root", [TINY, NANO], ids=lambda root: root.name)
def test_with_gaps_it_fails_and_names_each(on_card: OnCard, tmp_path: Path, root: Path) -> None:
    code, gates, report = accepted(on_card, root, tmp_path, GAPS)
    assert code == 1
    failed = {gate_id for gate_id, gate in gates.items() if gate["status"] == "fail"}
    assert failed == {"operators.coverage"}, report["verdict"]
    assert named(gates["operators.coverage"]["evidence"]) == PLANTED
    covered = next(section for section in report["sections"] if section["title"] == "Operators")
    (gaps,) = (table for table in covered["tables"] if table["title"] == "Gaps")
    shown = {re.sub(r"^aten\.|_?\..*$", "", str(row[1])): row[2] for row in gaps["rows"]}
    assert shown == PLANTED, "the coverage table shows these and no others"
    passed = {gate_id for gate_id, gate in gates.items() if gate["status"] == "pass"}
    assert passed >= ALWAYS - {"operators.coverage"}
    for gate_id in ("answers.text", "answers.image", "parity.serving"):  # nothing was answered: nothing is judged
        assert gates[gate_id]["status"] == "not measured"
        assert "topk" in gates[gate_id]["evidence"]
