"""`workbench day0 --prove-gates`: on the embedded checkpoint every gate fails under its fault, and nothing is left."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path

import pytest
from acceptance import TINY, command

from workbench.day0 import GATES
from workbench.deployment import LoadSummary
from workbench.report import read_report

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made during the test; what torch's compiler keeps for all its runs lies elsewhere."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def digests() -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in TINY.iterdir()}


@pytest.mark.timeout(1800)
def test_every_gate_fails_under_its_fault_and_names_it(scratch: Path, tmp_path: Path) -> None:
    before = digests()
    code, output = command(TINY, "--ranks", 2, "--device", "cpu", "--out", tmp_path / "out", "--prove-gates")
    assert code == 0, output
    assert "16 of 16 gates pass without a fault, fail under their own, and name it" in output
    report = read_report(tmp_path / "out")
    assert report.passed
    assert [gate.id for gate in report.gates if gate.proof] == list(GATES)
    assert report.environment["gates proven"] == "16 of 16"
    section = next(x for x in report.sections if x.title == "Gates under planted faults")
    told = {row[0]: (row[2], row[4]) for row in section.tables[0].rows}
    for gate_id, word in (
        ("checkpoint.audit", "torn model-00012-of-000012.safetensors"),
        ("operators.coverage", "aten.mm.default"),
        ("parity.fp32", "layer 4"),
        ("parity.serving", "layer 4"),
        ("loading.rows", "rank 0 lacks"),
        ("loading.memory", "rank 1 grew"),
        ("answers.image", "planted: the vision tower takes no picture"),
        ("latency.per_token", "slowest: text, long"),
    ):
        assert word in str(told[gate_id][1]), (gate_id, told[gate_id])
    assert (tmp_path / "out" / "report.html").read_text(encoding="utf-8").count("Fails under: ") == len(GATES)
    assert digests() == before
    assert list(scratch.iterdir()) == []


@pytest.mark.timeout(1800)
def test_a_gate_that_cannot_fail_and_a_missing_tokenizer_are_told(
    scratch: Path, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in copy.glob("tokenizer*"):
        path.unlink()
    monkeypatch.setattr(LoadSummary, "rows_missing", 0)
    code, output = command(copy, "--device", "cpu", "--out", tmp_path / "out", "--prove-gates", "--json")
    assert code == 1
    record = json.loads(output)
    told = {proof["gate"]: proof for proof in record["proofs"]}
    assert told["loading.rows"]["reason"] == "passes under its fault"
    assert told["answers.text"]["reason"].startswith("without a fault it is not measured: TokenizerError: ")
    assert {gate_id for gate_id, proof in told.items() if proof["status"] == "not asked"} == {
        "answers.correct",
        "answers.blank",
    }
    assert told["parity.serving"]["status"] == told["loading.memory"]["status"] == "proven"
    assert not record["passed"]
    assert list(scratch.iterdir()) == []
