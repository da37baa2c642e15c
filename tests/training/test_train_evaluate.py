"""The exam tells a model that looks from one that guesses, and the export is compared with what it was made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import give_tokenizer, write_recipe

from workbench.training import evaluate
from workbench.training.data.exam import ExamItem
from workbench.training.evaluate import Evaluation, compare_export, evaluate_checkpoint
from workbench.training.launch import train


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    give_tokenizer(folder / "out")
    train(write_recipe(folder, steps=3), folder / "out")
    return folder / "out"


def examined(monkeypatch: pytest.MonkeyPatch, out: Path, answer: Any) -> Evaluation:
    """With `answer(item)` in the model's place; the model itself still runs once, for its expert load."""
    real = evaluate.answer_items

    def replies(model: Any, ctx: Any, tokenizer: Any, items: Any) -> list[str]:
        real(model, ctx, tokenizer, items[:1], max_new_tokens=2)
        return [answer(item) for item in items]

    monkeypatch.setattr(evaluate, "answer_items", replies)
    return evaluate_checkpoint(out / "model", per_kind=12, num_facts=5)


def test_one_that_looks_is_right_and_falls_without_its_picture(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: dict[tuple[str, str], str] = {}

    def looks(item: ExamItem) -> str:
        """Right about pictures seen with their own question, lost otherwise."""
        key = (item.text, item.scene.content if item.scene else "")
        return shown.setdefault(key, item.answer) if len(shown) < 12 * 11 + 5 else shown.get(key, "I cannot tell.")

    report = examined(monkeypatch, out, looks)
    assert {name: mark.accuracy for name, mark in report.groups.items()} == {"scene": 1, "reading": 1, "facts": 1}
    assert report.blank.pooled().accuracy < 0.1
    assert report.shuffled.pooled().accuracy < 0.2
    low, high = report.groups["scene"].low, report.groups["scene"].high
    assert 0.9 < low < high == 1.0


def test_one_that_guesses_does_not_fall_without_its_picture(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = examined(monkeypatch, out, lambda item: "Red.")
    assert report.groups["scene"].accuracy < 0.3
    gap = report.exam.pooled(["colour"]).accuracy - report.shuffled.pooled(["colour"]).accuracy
    assert gap == 0
    assert report.blank.pooled(["colour"]).num_right == report.exam.pooled(["colour"]).num_right


def test_the_report_prints_and_travels_as_json(out: Path) -> None:
    report = evaluate_checkpoint(out / "model", per_kind=2, num_facts=3)
    text = report.render()
    for word in ("scene", "reading", "facts", "blank", "shuffled", "95 % interval", "dead experts"):
        assert word in text
    record = json.loads(json.dumps(report.to_json()))
    assert {mark["kind"] for mark in record["exam"]} >= {"shape", "colour", "digit", "word", "fact"}
    assert [mark["num"] for mark in record["exam"] if mark["kind"] == "fact"] == [3]
    assert {load.layer for load in report.loads} == {1, 2, 3}
    assert all(sum(load.counts) > 0 for load in report.loads)
    assert report.max_over_mean >= 1


def test_the_export_is_compared_with_its_masters_on_the_same_questions(out: Path) -> None:
    loss = compare_export(out, per_kind=1, num_facts=2)
    assert loss.num == 11 + 2
    assert loss.points_lost == 100 * (loss.masters_right - loss.export_right) / 13
    assert "points lost" in loss.render()
    assert loss.to_json()["num"] == 13
