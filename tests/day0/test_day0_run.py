"""A whole acceptance run on the embedded checkpoint: complete, readable again, and good."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from acceptance import TINY, Accept, Acceptance, command

from workbench.base import ConfigError, LayoutError
from workbench.day0 import GATES, run, run_day0
from workbench.placement import Layout
from workbench.report import compare_reports, read_report
from workbench.serving import ImageProcessor

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def alone(accept: Accept) -> Acceptance:
    return accept(TINY)


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, Path]:
    folder = tmp_path_factory.mktemp("two")
    return *command(TINY, "--ranks", 2, "--device", "cpu", "--out", folder), folder


def test_all_gates_pass_on_one_rank_and_say_why(alone: Acceptance) -> None:
    assert (alone.failed, alone.unmeasured) == (set(), set()), alone.report.render(width=120)
    assert [gate.id for gate in alone.report.gates] == list(GATES)
    assert all(gate.evidence for gate in alone.report.gates)
    assert alone.report.passed


@pytest.mark.slow
def test_command_passes_on_two_ranks_and_fits_a_log(together: tuple[int, str, Path]) -> None:
    code, output, folder = together
    assert code == 0, output
    assert "accepts no model: its weights were not trained (random weights" in output
    assert "PASS: 16 passed" in output
    assert f"report: {folder / 'report.html'} and {folder / 'report.json'}" in output
    table = output[output.index("PASS: ") : output.index("\nreport: ")]
    assert max(map(len, table.splitlines())) <= 120
    report = read_report(folder)
    assert report.environment["layout"] == "tp2xep2"
    assert report.environment["ranks"] == 2


@pytest.mark.slow
def test_report_is_read_back_and_compares_with_itself(alone: Acceptance, together: tuple[int, str, Path]) -> None:
    assert read_report(alone.folder).to_json() == alone.report.to_json()
    comparison = compare_reports(alone.report, read_report(together[2]))
    assert comparison.passed
    assert ("ranks", "1", "2") in comparison.environment


def test_report_says_what_it_was_made_with(alone: Acceptance) -> None:
    report = alone.report
    assert (report.weights_kind, report.weights_note) == ("dummy", "random weights: its answers are noise")
    assert report.versions["packages"]["torch"]
    assert report.hardware.endswith("(CPU only)")
    assert report.created_at.endswith("+00:00")
    assert report.seconds is not None
    assert report.seconds > 0
    assert report.machine["devices"]
    assert {key: report.environment[key] for key in ("layout", "ranks", "precision", "device", "parity in fp32")} == {
        "layout": "tp1",
        "ranks": 1,
        "precision": "mxfp4",
        "device": "cpu",
        "parity in fp32": "run",
    }
    assert report.environment["command"]
    titles = [section.title for section in report.sections]
    assert titles == [
        "Checkpoint", "Model", "Operators", "Parity with the reference, fp32", "Loading",
        "Parity with the reference, mxfp4", "Latencies", "Machine",
    ]  # fmt: skip


def test_page_is_one_file_that_asks_for_nothing(alone: Acceptance) -> None:
    page = (alone.folder / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://|//[a-z]", page.replace('xmlns="http://www.w3.org/2000/svg"', ""))
    assert "<script" not in page
    for gate in alone.report.gates:
        assert page.count(f"<p class=id>{gate.id}</p>") == 1
    assert page.count("data:image/png;base64,") == 3  # one picture, then two


def test_answers_are_kept_with_their_pictures_and_times(alone: Acceptance) -> None:
    answers = alone.report.answers
    assert [len(answer.pictures) for answer in answers] == [0, 0, 0, 1, 2]
    assert all(answer.num_prompt_tokens and answer.num_tokens and answer.first_token_s for answer in answers)
    rate = next(s for s in alone.report.sections if s.title == "Latencies").tables[0].note
    tokens, per_s = re.search(r"(\d+) tokens, ([\d.]+) tokens/s together", rate).groups()  # type: ignore[union-attr]
    in_all = sum(answer.end_to_end_s or 0.0 for answer in answers)
    assert float(per_s) <= 1.1 * int(tokens) / in_all  # requests came one after another: no rate beyond their sum


@pytest.mark.slow
def test_json_record_is_the_only_output_and_slow_answers_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Limits nobody can keep, and a model that is shown the same picture whatever the file holds."""
    cut = ImageProcessor._patches
    monkeypatch.setattr(ImageProcessor, "_patches", lambda self, image, plan: 0 * cut(self, image, plan))
    monkeypatch.setattr(run, "_fits_in_fp32", lambda *args: False)
    limits = ("--max-first-token-s", 1e-6, "--max-per-token-s", 1e-6)
    code, output = command(TINY, "--device", "cpu", "--json", *limits, "--out", tmp_path)
    assert code == 1
    record = json.loads(output)
    gates = {gate["id"]: gate for gate in record["gates"]}
    failed = {gate_id for gate_id, gate in gates.items() if gate["status"] == "fail"}
    assert failed == {"latency.first_token", "latency.per_token", "answers.looks"}
    silent = {gate_id for gate_id, gate in gates.items() if gate["status"] == "not measured"}
    assert silent == {"parity.fp32", "parity.fp32_tokens", "parity.batch"}
    assert gates["latency.first_token"]["threshold"] == 1e-6
    assert gates["answers.looks"]["value"] is False
    assert json.loads((tmp_path / "report.json").read_text()) == record


@pytest.mark.slow
def test_served_in_fp32_the_reference_is_asked_once(accept: Accept) -> None:
    acceptance = accept(TINY, precision="fp32")
    assert (acceptance.failed, acceptance.unmeasured) == (set(), set()), acceptance.report.render(width=120)
    assert acceptance.evidence("parity.serving") == "served in fp32: the same as parity.fp32"
    assert acceptance.report.environment["parity in fp32"] == "run as served"


def test_what_describes_no_run_is_refused_at_once(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "k3")
    (tmp_path / "k3" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not readable as JSON"):
        run_day0(tmp_path / "k3")
    with pytest.raises(LayoutError, match="tp=5 does not divide"):
        run_day0(TINY, layout=Layout(tp=5))
    with pytest.raises(ConfigError, match="has no limit to set"):
        run_day0(TINY, limits={"loading.rows": 5})
    with pytest.raises(ConfigError, match="cannot be written here"):
        run_day0(TINY, out=TINY / "config.json" / "deep")
