"""Planted faults: the gate that must catch each one fails by name, the others keep their word, and a report ends it."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from acceptance import TINY, Accept

from workbench.base import Quantity
from workbench.checkpoint import Checkpoint
from workbench.cluster import host_device
from workbench.day0 import GATES, run
from workbench.deployment import Deployment
from workbench.report import read_report

FAMILIES = Path(__file__).resolve().parents[1] / "golden" / "families"

pytestmark = pytest.mark.ranks

NEED_WEIGHTS = {gate_id for gate_id in GATES if gate_id.split(".")[0] not in ("device", "operators", "checkpoint")}
NEED_ANSWERS = {gate_id for gate_id in GATES if gate_id.split(".")[0] in ("answers", "serving", "latency")}


def test_a_torn_shard_fails_the_audit_and_leaves_the_rest_unmeasured(accept: Accept, copy: Path) -> None:
    shard = sorted(copy.glob("*.safetensors"))[3]
    shard.write_bytes(shard.read_bytes()[:-100])
    acceptance = accept(copy)
    assert acceptance.failed == {"checkpoint.audit"}
    assert acceptance.unmeasured == NEED_WEIGHTS
    assert f"First: error: torn {shard.name}" in acceptance.evidence("checkpoint.audit")
    for gate_id in NEED_WEIGHTS:
        assert shard.name in acceptance.evidence(gate_id), gate_id
    steps = acceptance.report.sections[0]
    assert steps.title == "Steps that failed"
    assert [row[0] for row in steps.tables[0].rows] == ["parity in fp32", "loading in mxfp4"]
    assert read_report(acceptance.folder).verdict == acceptance.report.verdict
    assert any(line.startswith("FAIL: 2 passed, 1 failed, 13 not measured") for line in acceptance.lines)


def test_weights_that_are_all_zero_are_refused_by_name(accept: Accept, copy: Path) -> None:
    name = "vision_tower.patch_embed.proj.weight"
    entry = Checkpoint.open(copy).tensor(name)
    with (copy / entry.file).open("r+b") as file:
        file.seek(entry.begin)
        file.write(bytes(entry.num_bytes))
    acceptance = accept(copy)
    assert acceptance.failed == {"checkpoint.audit"}
    assert acceptance.unmeasured == NEED_WEIGHTS
    assert "vision.patch_embed" in acceptance.evidence("loading.rows")


@pytest.mark.slow
def test_one_nibble_of_one_expert_fails_parity_and_names_the_layer(
    accept: Accept, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks load another file than the reference reads: the published one with the sign of one weight changed."""
    name = "language_model.model.layers.5.block_sparse_moe.experts.0.w2.weight_packed"
    entry = Checkpoint.open(copy).tensor(name)
    with (copy / entry.file).open("r+b") as file:
        file.seek(entry.begin)
        data = file.read(entry.num_bytes)
        place = next(i for i, byte in enumerate(data) if byte & 0x07 == 0x07)  # a low nibble of the largest size
        file.seek(entry.begin + place)
        file.write(bytes([data[place] ^ 0x08]))
    start = Deployment.start
    monkeypatch.setattr(run.Deployment, "start", lambda root, *args, **options: start(copy, *args, **options))
    acceptance = accept(TINY)
    assert "parity.fp32" in acceptance.failed
    assert acceptance.failed <= {"parity.fp32", "parity.fp32_tokens", "parity.serving"}
    assert acceptance.unmeasured == set()
    assert "layer 5" in acceptance.evidence("parity.fp32")


def test_without_a_tokenizer_only_the_answers_are_missing(
    accept: Accept, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine whose memory is full, so that parity in fp32 is not tried either."""
    for path in copy.glob("tokenizer*"):
        path.unlink()
    full = dataclasses.replace(host_device(), memory_free=Quantity(1e6, "B", "measured", "a full machine"))
    monkeypatch.setattr(run, "host_device", lambda: full)
    acceptance = accept(copy)
    assert acceptance.failed == set()
    assert acceptance.unmeasured == NEED_ANSWERS | {"parity.fp32", "parity.fp32_tokens", "parity.batch"}
    assert all(acceptance.evidence(gate_id).startswith("TokenizerError: ") for gate_id in NEED_ANSWERS)
    assert "do not fit" in acceptance.evidence("parity.batch")
    assert acceptance.report.environment["parity in fp32"] == "does not fit"


def test_a_rank_that_dies_is_named_where_it_was_needed(accept: Accept, monkeypatch: pytest.MonkeyPatch) -> None:
    original = run.measure_answers

    def killing(*args: Any, **options: Any) -> None:
        os.kill(args[3].pids[0], signal.SIGKILL)
        original(*args, **options)

    monkeypatch.setattr(run, "measure_answers", killing)
    monkeypatch.setattr(run, "_fits_in_fp32", lambda *args: False)
    acceptance = accept(TINY)
    assert acceptance.failed == set()
    assert acceptance.unmeasured >= NEED_ANSWERS
    assert acceptance.evidence("answers.text").startswith("WorkerDiedError: ")
    assert "SIGKILL" in acceptance.evidence("answers.text")
    assert next(gate for gate in acceptance.report.gates if gate.id == "loading.rows").status == "pass"


@pytest.mark.slow
def test_a_request_that_fails_counts_with_its_reason(accept: Accept, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache too short for the long question: the other requests are still asked and timed."""
    monkeypatch.setattr(run, "_fits_in_fp32", lambda *args: False)
    monkeypatch.setattr("workbench.day0.prompts.LONG_QUESTION_REPEATS", 1)
    acceptance = accept(TINY, max_tokens=160)
    assert acceptance.failed == {"answers.text"}
    assert "text, long: PromptTooLongError: " in acceptance.evidence("answers.text")
    assert len(acceptance.report.answers) == 4


def test_another_family_is_tried_and_its_parity_is_not_made_up(accept: Accept) -> None:
    acceptance = accept(FAMILIES / "llama")
    assert acceptance.failed == set()
    assert {"parity.fp32", "parity.fp32_tokens", "parity.batch", "parity.serving"} <= acceptance.unmeasured
    assert "no independent implementation of this family" in acceptance.evidence("parity.fp32")
    assert {gate.id for gate in acceptance.report.gates if gate.status == "pass"} >= {
        "loading.rows",
        "checkpoint.audit",
    }


@pytest.mark.parametrize("step", ["run.survey_machine", "files.audit", "run.inspect_checkpoint"])
def test_a_bug_in_a_step_is_shown_and_does_not_cost_the_report(
    accept: Accept, copy: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def broken(*args: object, **options: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(f"workbench.day0.{step}", broken)
    monkeypatch.setattr(run, "_fits_in_fp32", lambda *args: False)
    monkeypatch.setattr(run.Deployment, "start", broken)
    acceptance = accept(copy)
    rows = acceptance.report.sections[0].tables[0].rows
    assert len(rows) == 2
    assert all("Traceback" in row[1] and "RuntimeError: out of luck" in row[1] for row in rows)
    assert acceptance.evidence("loading.rows") == "unexpected RuntimeError: out of luck"
    gate_of: dict[str, str] = {"run.survey_machine": "device.features", "files.audit": "checkpoint.audit"}
    if step in gate_of:
        assert acceptance.evidence(gate_of[step]) == "unexpected RuntimeError: out of luck"
    assert "out of luck" in (acceptance.folder / "report.html").read_text()
