"""The exam tells a model that looks from one that guesses, says so in its verdict, and compares with the masters."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import give_tokenizer, write_recipe

from workbench.base import CheckpointError, ConfigError
from workbench.cli import main
from workbench.exam import run as exam_run
from workbench.exam.masters import load_masters
from workbench.exam.record import EXAM_NAME, ExamReport, LayerLoad, read_exam
from workbench.exam.run import run_exam
from workbench.parallel import single_context
from workbench.serving.open import thinks_first
from workbench.spec import read_spec
from workbench.training.config import MAX_NEW_TOKENS
from workbench.training.data.exam import ExamItem
from workbench.training.data.score import Mark, ScoreTable
from workbench.training.launch import train

Answer = Callable[[ExamItem], str]
NUM_PICTURE_KINDS = 11
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    give_tokenizer(folder / "out")
    train(write_recipe(folder, steps=3), folder / "out")
    return folder / "out"


def examined(monkeypatch: pytest.MonkeyPatch, out: Path, *answers: Answer, **options: Any) -> ExamReport:
    """With `answers` in the model's place, one for each round, the last for all that follow; the model itself still
    runs once a round, for its expert load."""
    real, rounds = exam_run.answer_items, iter(answers)
    current = answers[-1]

    def replies(model: Any, ctx: Any, tokenizer: Any, items: Sequence[ExamItem], **how: Any) -> list[str]:
        nonlocal current
        current = next(rounds, current)
        assert how == {"thinking": thinks_first(out / "model"), "max_new_tokens": MAX_NEW_TOKENS}
        real(model, ctx, tokenizer, items[:1], **{**how, "max_new_tokens": 2})
        return [current(item) for item in items]

    monkeypatch.setattr(exam_run, "answer_items", replies)
    return run_exam(out / "model", **{"per_kind": 12, "num_facts": 5, "device": "cpu", **options})


def right(item: ExamItem) -> str:
    return item.answer


def lost(item: ExamItem) -> str:
    return "I cannot tell."


def held(report: ExamReport, what: str) -> list[bool]:
    return [holds for name, _, _, holds in report.checks if what in name]


def test_one_that_looks_is_right_and_falls_without_its_picture(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = examined(monkeypatch, out, right, lost)
    assert held(report, "scenes: ") == held(report, "reading: ") == held(report, "domain: ") == [True]
    assert held(report, "blank picture") == held(report, "shuffled picture") == [True, True]
    assert report.ok == all(held(report, "expert"))  # three steps of training may or may not have balanced those


def test_one_that_never_looks_is_found_out_by_both_controls(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right about everything, whatever is in the picture: a leak, which accuracy alone would praise."""
    report = examined(monkeypatch, out, right)
    assert held(report, "scenes: ") == [True]
    assert held(report, "blank picture") == held(report, "shuffled picture") == [False, False]
    assert not report.ok
    assert "NOT as asked" in report.render()


def test_one_that_guesses_reaches_chance_and_no_more(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = examined(monkeypatch, out, lambda item: "Red.", controls=["blank"])
    assert held(report, "scenes: ") == [False]
    assert held(report, "blank picture") == [True, True]
    assert held(report, "shuffled") == []
    assert len(report.wrong) <= 24
    assert {wrong.reply for wrong in report.wrong} == {"Red."}


def test_masters_answer_the_same_questions_and_the_loss_is_paired(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The export is asked first and loses every word question; the masters, asked last, lose none."""

    def no_words(item: ExamItem) -> str:
        return lost(item) if item.kind == "word" else item.answer

    report = examined(monkeypatch, out, no_words, lost, lost, right, against=out)
    everything, *groups = report.paired
    assert (everything.kinds, everything.num) == ("all kinds", 12 * NUM_PICTURE_KINDS + 5)
    assert (everything.only_other, everything.only_model) == (12, 0)
    assert {pair.kinds: pair.only_other for pair in groups} == {"scenes": 0, "reading": 12, "domain": 0}
    assert held(report, "rounding") == [False]


def test_a_real_model_is_examined_and_its_record_is_read_back(out: Path, tmp_path: Path) -> None:
    said: list[str] = []
    report = run_exam(
        out / "model",
        per_kind=2,
        num_facts=3,
        activations="float32",
        against=out,
        max_new_tokens=12,
        device="cpu",
        say=said.append,
    )
    assert len(said) == 4
    assert (report.settings["precision"], report.settings["activations"]) == ("mxfp4", "float32")
    assert {mark.kind for mark in report.exam.marks} >= {"shape", "colour", "digit", "word", "caption", "fact"}
    assert [mark.num for mark in report.exam.marks if mark.kind == "fact"] == [3]
    assert set(report.controls) == {"blank", "shuffled"}
    assert [load.layer for load in report.loads] == [1, 2, 3]
    assert all(sum(load.counts) > 0 for load in report.loads)
    again = read_exam(report.save(tmp_path / "kept.json"))
    assert again.to_json() == json.loads(json.dumps(report.to_json()))
    assert again.checks == report.checks
    for table in (*report.tables(), *again.tables()):
        assert table.render()
    assert "<table" in report._repr_html_()


def test_weights_before_rounding_are_the_same_numbers_in_either_arithmetic(out: Path) -> None:
    spec, ctx = read_spec(out / "model"), single_context()
    wide, narrow = (dict(load_masters(out, spec, ctx, dtype=x)[0].named_parameters()) for x in DTYPES)
    assert {x.dtype for x in wide.values()} == {torch.float32}
    assert {x.dtype for x in narrow.values()} == {torch.float32, torch.bfloat16}
    assert wide.keys() == narrow.keys()
    assert all(torch.equal(wide[name], narrow[name].float()) for name in wide)


def test_command_keeps_the_record_and_its_exit_code_is_the_verdict(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "model"
    shutil.copytree(out / "model", root)
    arguments = ["exam", str(root), "--per-kind", "1", "--facts", "2", "--control", "none", "--device", "cpu"]
    arguments += ["--max-new-tokens", "9"]
    assert main([*arguments, "--save"]) == 1  # three steps teach nothing
    printed = capsys.readouterr()
    assert "held-out questions" in printed.err
    assert "at least 90%" in printed.out
    assert read_exam(root).exam.pooled().num == NUM_PICTURE_KINDS + 2
    assert main([*arguments, "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert (record["ok"], record["controls"], record["settings"]["precision"]) == (False, {}, "mxfp4")
    assert record["settings"]["max_new_tokens"] == 9


def test_masters_of_another_step_or_model_are_refused(out: Path, tmp_path: Path) -> None:
    root = tmp_path / "model"
    shutil.copytree(out / "model", root)
    origin = json.loads((root / "origin.json").read_text())
    (root / "origin.json").write_text(json.dumps({**origin, "steps": 2}))
    with pytest.raises(CheckpointError, match="not the one this checkpoint was exported from"):
        run_exam(root, per_kind=2, num_facts=1, controls=[], against=out, device="cpu")
    shutil.copytree(out, tmp_path / "empty", ignore=shutil.ignore_patterns("states", "model"))
    with pytest.raises(CheckpointError, match="no saved state"):
        run_exam(out / "model", per_kind=2, num_facts=1, controls=[], against=tmp_path / "empty", device="cpu")


def test_a_model_without_eyes_is_not_examined(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = dataclasses.replace(read_spec(out / "model"), vision=None)
    monkeypatch.setattr(exam_run, "read_spec", lambda root: spec)
    with pytest.raises(ConfigError, match="takes none"):
        run_exam(out / "model", device="cpu")


def marks(**right_of_100: int) -> ScoreTable:
    return ScoreTable(
        marks=tuple(
            Mark(kind=kind, num=100, num_right=number, low=0.0, high=1.0, chance=0.2)
            for kind, number in right_of_100.items()
        ),
        wrong=(),
    )


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({}, True),
        ({"exam": marks(shape=95, colour=95, count=85, position=84)}, False),  # 89.75 % together
        ({"exam": marks(shape=99, colour=99, count=81, position=81)}, True),  # the four are asked together
        ({"loads": (LayerLoad(layer=1, counts=(21, 7, 7, 7)),)}, True),  # 2.0
        ({"loads": (LayerLoad(layer=1, counts=(22, 7, 7, 7)),)}, False),
        ({"loads": (LayerLoad(layer=1, counts=(5, 5, 5, 0)),)}, False),  # one is dead
    ],
)
def test_limits_are_where_they_are_said_to_be(changes: dict[str, Any], holds: bool) -> None:
    good = {"exam": marks(shape=95, colour=95, count=90, position=90), "loads": (LayerLoad(layer=1, counts=(5, 4)),)}
    assert ExamReport(model="m", controls={}, **{**good, **changes}).ok is holds


def test_a_damaged_record_is_refused_by_name(tmp_path: Path) -> None:
    for text in ("{", "[]", '{"format": "exam/0"}', '{"format": "exam/1"}'):
        (tmp_path / EXAM_NAME).write_text(text)
        with pytest.raises(ConfigError, match="exam report"):
            read_exam(tmp_path)
