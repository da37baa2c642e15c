"""The verdict over planted faults: proven only where a gate passed without its fault, failed under it, and named it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from acceptance import TINY

from workbench.checkpoint import AuditReport, audit
from workbench.day0 import GATES, GateProofs, prove_gates
from workbench.day0.gates import GateBook, gate_forms
from workbench.day0.prove import judge
from workbench.day0.sabotage import ALONE, ON_RANKS, Bench, Fault, SabotagedRun
from workbench.report import Day0Report, Gate, compare_reports, read_report

TORN = next(run for run in ALONE if run.gate_ids == ("checkpoint.audit",))


def sound_report(**values: object) -> Day0Report:
    """A report in which every gate that is named passes, or has the value given (None: not measured)."""
    book = GateBook()
    for gate_id, form in GATES.items():
        value = values.get(gate_id.replace(".", "_"), form.threshold)
        if value is not None:
            book.measured(gate_id, value, evidence="as it should be")  # type: ignore[arg-type]
    return Day0Report(
        model="K3", checkpoint=str(TINY), weights_kind="dummy", gates=book.close(), created_at="2026-11-30T09:00:00",
        hardware="a CPU", versions={},
    )  # fmt: skip


def proven(report: Day0Report, *runs: SabotagedRun, **options: object) -> GateProofs:
    return prove_gates(TINY, report, device="cpu", say=None, alone=runs, on_ranks=(), **options)  # type: ignore[arg-type]


def run_of(gate_id: str, enter: Callable[[Bench], None]) -> SabotagedRun:
    return SabotagedRun(gate_ids=(gate_id,), run=enter)


def entering(gate_id: str, value: object, evidence: str) -> SabotagedRun:
    def enter(bench: Bench) -> None:
        bench.plant(gate_id, "a fault", "its name")
        bench.gates.measured(gate_id, value, evidence=evidence)  # type: ignore[arg-type]

    return run_of(gate_id, enter)


def proof(found: GateProofs, gate_id: str) -> tuple[str, str]:
    one = next(x for x in found.proofs if x.gate_id == gate_id)
    return one.status, one.told


def test_each_gate_that_can_be_asked_has_one_run_that_fails_it() -> None:
    runs = [run.gate_ids for run in ALONE] + [group.gate_ids for group in ON_RANKS]
    assert sorted(gate_id for gate_ids in runs for gate_id in gate_ids) == sorted(gate_forms(has_known_answers=True))


def test_a_torn_copy_proves_the_audit_by_the_audit_itself(tmp_path: Path) -> None:
    found = proven(sound_report(), TORN, out=tmp_path)
    assert proof(found, "checkpoint.audit")[0] == "proven"
    assert "First: error: torn model-00012-of-000012.safetensors" in proof(found, "checkpoint.audit")[1]
    gate = next(gate for gate in read_report(tmp_path).gates if gate.id == "checkpoint.audit")
    assert gate.passed
    assert gate.proof.startswith("the end of model-00012-of-000012.safetensors is cut off (1, good is 0); seen 20")
    assert "Fails under: the end of model-00012" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert audit(TINY).ok


def test_a_gate_that_cannot_fail_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """An audit that looks at another folder than it is told to."""
    monkeypatch.setattr("workbench.day0.files.audit", lambda root: audit(TINY))
    found = proven(sound_report(), TORN)
    status, told = proof(found, "checkpoint.audit")
    assert status == "not proven"
    assert told.startswith("passes under its fault: ")
    assert not found.passed
    gate = next(gate for gate in found.report.gates if gate.id == "checkpoint.audit")
    assert (gate.proof, gate.passed) == ("", True)
    assert gate.unproven.startswith("passes under its fault")
    assert "Not proven: passes under its fault" in found.report.render_html()


def test_a_gate_that_fails_by_something_else_is_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(root: Path) -> AuditReport:
        report = audit(root)
        return dataclasses.replace(
            report, findings=tuple(dataclasses.replace(x, file="another.safetensors") for x in report.findings)
        )

    monkeypatch.setattr("workbench.day0.files.audit", elsewhere)
    status, told = proof(proven(sound_report(), TORN), "checkpoint.audit")
    assert status == "not proven"
    assert told.startswith("fails under its fault without naming it (torn, model-00012-of-000012.safetensors): ")


@pytest.mark.parametrize(
    ("value", "evidence", "reason"),
    [
        (1, "its name is told", ""),
        (1, "something is wrong", "without naming it"),
        (0, "its name is told", "passes under its fault"),
        (None, "its name is told", "not measured under its fault"),
    ],
)
def test_the_judge_asks_for_a_failure_with_a_name(value: object, evidence: str, reason: str) -> None:
    sound = Gate(id="a.b", layer="framework", question="?", threshold=0, value=0)
    found = judge(sound, Fault(what="a fault", words=("its", "name")), dataclasses.replace(
        sound, value=value, evidence=evidence))  # fmt: skip
    assert (reason in found) if reason else (found == "")
    assert "without a fault it is fail" in judge(dataclasses.replace(sound, value=2), Fault(what="", words=()), sound)


def test_all_gates_proven_is_the_only_way_to_pass() -> None:
    def wrong(value: object) -> object:
        return not value if isinstance(value, bool) else value + 1  # type: ignore[operator]

    runs = [entering(gate_id, wrong(form.threshold), "its name") for gate_id, form in GATES.items()]
    found = proven(sound_report(), *runs)
    assert found.passed
    assert found.sentence() == "16 of 16 gates pass without a fault, fail under their own, and name it"
    assert found.report.environment["gates proven"] == "16 of 16"
    assert proof(found, "answers.correct")[0] == proof(found, "answers.blank")[0] == "not asked"
    assert not proven(sound_report(), *runs[1:]).passed
    assert proof(proven(sound_report(), *runs[1:]), "device.features") == ("not proven", "no fault was planted")
    assert not proven(sound_report()).passed


def test_what_does_not_pass_without_a_fault_is_not_tried() -> None:
    def never(bench: Bench) -> None:
        raise AssertionError("nothing could be shown")

    report = sound_report(checkpoint_audit=3, answers_image=None)
    found = proven(report, run_of("checkpoint.audit", never), run_of("answers.image", never))
    assert proof(found, "checkpoint.audit") == ("not proven", "without a fault it is fail: as it should be")
    assert proof(found, "answers.image")[1].startswith("without a fault it is not measured: ")
    assert not found.passed


def test_a_run_that_breaks_off_is_a_reason_and_others_go_on() -> None:
    def broken(bench: Bench) -> None:
        bench.plant("loading.rows", "a fault", "its name")
        raise RuntimeError("out of luck")

    lines: list[str] = []
    runs = (run_of("loading.rows", broken), entering("checkpoint.audit", 1, "its name"))
    found = prove_gates(TINY, sound_report(), device="cpu", say=lines.append, alone=runs, on_ranks=())
    assert proof(found, "loading.rows") == (
        "not proven", "the sabotaged run broke off: unexpected RuntimeError: out of luck"
    )  # fmt: skip
    assert proof(found, "checkpoint.audit")[0] == "proven"
    assert lines == [
        "not proven: loading.rows, the sabotaged run broke off: unexpected RuntimeError: out of luck",
        "proven: checkpoint.audit, under 'a fault': 1, good is 0",
    ]


def test_the_table_fits_a_terminal_and_the_record_is_whole() -> None:
    found = proven(sound_report(), entering("checkpoint.audit", 1, "its name " * 40))
    text = found.render(width=120)
    for width, columns in ((120, 5), (90, 4), (72, 3)):
        table = found.render(width=width).split("\n\n")[1]
        assert max(map(len, table.splitlines())) <= width
        assert ("fault planted" in table, "what the report said" in table) == (columns > 3, columns > 4)
    assert "not proven: device.features\n    no fault was planted" in text
    record = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert record["passed"] is False
    assert record["proofs"][0] == {
        "gate": "device.features", "status": "not proven", "fault": "", "sabotaged": None,
        "reason": "no fault was planted",
    }  # fmt: skip
    assert Day0Report.from_json(record["report"]) == found.report


def test_a_proof_that_is_lost_is_shown_by_a_comparison() -> None:
    before = proven(sound_report(), entering("checkpoint.audit", 1, "its name")).report
    lost = compare_reports(before, proven(sound_report(), entering("checkpoint.audit", 0, "its name")).report)
    assert [change.id for change in lost.regressions] == ["checkpoint.audit"]
    assert "WORSE, proof lost: passes under its fault: its name; tried 20" in lost.render()
    assert "1 without the proof they had" in lost.render()
    plain = compare_reports(before, sound_report())
    assert plain.passed
    assert "proof lost: no fault was planted" in plain.render()
    assert [change.is_proof_lost for change in plain.gates].count(True) == 1
    assert compare_reports(before, before).table().rows == ()
    assert compare_reports(sound_report(), before).table().rows == ()
