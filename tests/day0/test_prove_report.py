"""Sabotaged checkpoints: the verdict of each report names the file, the tensor, the layer, and what was done."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest
from acceptance import TINY, command

from workbench.checkpoint import AuditReport, Checkpoint, audit
from workbench.cluster import MachineSurvey
from workbench.day0 import prove_report
from workbench.day0.differing import differing_tensors, tell_differing
from workbench.day0.faults.checkpoints import CHECKPOINT_FAULTS, CheckpointFault, Planted
from workbench.day0.faults.files import link_folder
from workbench.day0.prove_report import name_problem
from workbench.report import Day0Report, Gate, read_report

NANO = TINY.parent / "k3-nano"
LLAMA = TINY.parents[1] / "tests" / "golden" / "families" / "llama"
BY_FILES = tuple(fault for fault in CHECKPOINT_FAULTS if not fault.needs_published)
BY_VALUES = tuple(fault for fault in CHECKPOINT_FAULTS if fault.needs_published)


def digests(root: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in root.iterdir()}


def fault(name: str) -> CheckpointFault:
    return next(x for x in CHECKPOINT_FAULTS if x.name == name)


def test_files_that_were_sabotaged_are_named_by_the_verdict(survey: MachineSurvey, tmp_path: Path) -> None:
    before = digests(NANO)
    found = prove_report(NANO, faults=BY_FILES, survey=survey, device="cpu", out=tmp_path, say=None)
    assert found.passed, found.render()
    assert [x.status for x in found.proofs] == ["named"] * len(BY_FILES)
    assert found.sentence() == "6 of 6 sabotaged copies fail with a verdict that names the fault"
    for proof in found.proofs:
        report = read_report(tmp_path / "sabotaged" / proof.name)
        assert not report.passed
        assert report.next_steps[0].startswith("checkpoint.audit: `workbench audit ")
        page = (tmp_path / "sabotaged" / proof.name / "report.html").read_text(encoding="utf-8")
        assert page.count("<p class=cause>checkpoint.audit: ") == 1
        assert f"<strong>{len(report.verdict.blocking)} gates stand in the way</strong>" in page
    assert digests(NANO) == before


def test_a_report_that_does_not_name_the_fault_is_found_out(
    survey: MachineSurvey, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elsewhere(root: Path) -> AuditReport:
        report = audit(root)
        return dataclasses.replace(
            report, findings=tuple(dataclasses.replace(x, file="another.safetensors") for x in report.findings)
        )

    monkeypatch.setattr("workbench.day0.files.audit", elsewhere)
    lines: list[str] = []
    found = prove_report(NANO, faults=(fault("torn-shard"),), survey=survey, device="cpu", say=lines.append)
    assert not found.passed
    assert found.proofs[0].reason == "the verdict does not say model-00011-of-000011.safetensors"
    assert lines[0].startswith("not named: torn-shard, ")


@pytest.mark.parametrize(
    ("gate_id", "value", "evidence", "reason"),
    [
        ("checkpoint.audit", 1, "torn x.safetensors", ""),
        ("checkpoint.audit", 1, "torn", "the verdict does not say x.safetensors"),
        ("checkpoint.audit", 0, "torn x.safetensors", "the report of the copy passes"),
        ("checkpoint.other", 1, "torn x.safetensors", "another gate than checkpoint.audit is named first"),
    ],
)
def test_a_verdict_counts_where_the_right_gate_says_every_word(
    gate_id: str, value: int, evidence: str, reason: str
) -> None:
    gate = Gate(id=gate_id, layer="framework", question="?", threshold=0, value=value, evidence=evidence)
    report = Day0Report(
        model="K3", checkpoint="k3", weights_kind="dummy", gates=(gate,), created_at="2026-11-30T09:00:00",
        hardware="a CPU", versions={},
    )  # fmt: skip
    planted = Planted(what="the end is cut off", words=("torn", "x.safetensors"))
    assert name_problem(fault("torn-shard"), planted, report) == reason


def test_what_cannot_be_planted_or_told_is_not_asked(survey: MachineSurvey) -> None:
    """k3-tiny has no square matrix in its layers; nothing independent computes a Llama."""
    found = prove_report(TINY, faults=(fault("transposed-square"),), survey=survey, device="cpu", say=None)
    assert (found.proofs[0].status, found.passed) == ("not asked", False)
    found = prove_report(LLAMA, faults=BY_VALUES, survey=survey, device="cpu", say=None)
    assert {x.status for x in found.proofs} == {"not asked"}
    assert "nothing independent computes this family" in found.proofs[0].reason


@pytest.mark.parametrize("each", CHECKPOINT_FAULTS, ids=lambda fault: fault.name)
def test_each_fault_changes_a_copy_and_nothing_else(each: CheckpointFault, tmp_path: Path) -> None:
    before = digests(NANO)
    folder = link_folder(NANO, tmp_path / "k3")
    planted = each.plant(folder)
    assert planted is not None
    assert digests(NANO) == before
    assert digests(folder) != before
    assert audit(folder).ok is each.needs_published


def test_other_bytes_are_named_by_what_they_are(tmp_path: Path) -> None:
    told = {}
    for each in BY_VALUES:
        folder = link_folder(NANO, tmp_path / each.name)
        planted = each.plant(folder)
        assert planted is not None
        layer = int(planted.words[0].removeprefix("layer "))
        found = differing_tensors(folder, NANO, (layer,))
        assert differing_tensors(folder, NANO, (layer - 1, None)) == []
        told[each.name] = (found[0].how, tell_differing(found))
    assert told["transposed-square"][0] == "its own transpose"
    assert told["swapped-gate-and-up"][0].startswith("what is published as ")
    assert ".experts.0.w3.weight_packed" in told["swapped-gate-and-up"][0]
    assert told["doubled-scales"][0] == "other values"
    assert "Not as published in model-00005-of-000011.safetensors: " in told["swapped-gate-and-up"][1]
    assert "; and 61 more" in told["swapped-gate-and-up"][1]
    assert differing_tensors(NANO, NANO, (0,)) == []
    zeroed = link_folder(NANO, tmp_path / "zeroed")
    planted = fault("zeroed-router-bias").plant(zeroed)
    assert planted is not None
    assert [x.how for x in differing_tensors(zeroed, NANO, range(Checkpoint.open(NANO).spec.num_layers))] == ["zeros"]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_command_names_every_fault_in_files_and_in_values(tmp_path: Path) -> None:
    arguments = (NANO, "--ranks", 2, "--device", "cpu", "--stop-at-fault", "--published", NANO, "--prove-report")
    code, output = command(*arguments, "--json", "--out", tmp_path)
    record = json.loads(output)
    copies = record["sabotaged_copies"]
    assert copies["passed"], json.dumps(copies, indent=1)
    told = {proof["name"]: proof["verdict"] for proof in copies["proofs"]}
    assert list(told) == [x.name for x in CHECKPOINT_FAULTS]
    assert "gate and up exchanged" in told["swapped-gate-and-up"]
    assert "parity.fp32: " in told["transposed-square"]
    assert code == (0 if record["passed"] else 1)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Reports of sabotaged copies" in page
    for each in CHECKPOINT_FAULTS:
        assert (tmp_path / "sabotaged" / each.name / "report.html").is_file()
