"""Right answers are demanded of a model that was trained here, and of no other; each gate fails under its fault."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from acceptance import TINY, Accept
from PIL import Image

from workbench.base import RequestError
from workbench.day0 import GATES, run
from workbench.day0.gates import KNOWN_ANSWER_GATES, GateBook, gate_forms
from workbench.day0.known import PICTURE_KINDS, known_questions, measure_known_answers
from workbench.exam import is_trained_here
from workbench.report import Gate, SampleAnswer, Section
from workbench.serving import Answer, Timings, Usage
from workbench.training.data.scenes import draw_scene, split_of

RECIPE = 'name = "small"\nseed = 1\n'
RIGHT = {item.text: item.answer for item in known_questions() if item.scene is None}


def say_trained(root: Path, *, weights: str = "trained", recipe: str = "small") -> None:
    (root / "origin.json").write_text(json.dumps({"weights": weights, "recipe": recipe}))
    (root / "recipe.toml").write_text(RECIPE)


class Service:
    """Answers with `reply(text, pixels)`."""

    def __init__(self, reply: Callable[[str, np.ndarray | None], str]) -> None:
        self.reply = reply

    def infer(self, text: str, pictures: list[bytes] | None, *, max_tokens: int, temperature: float) -> Answer:
        pixels = np.asarray(Image.open(io.BytesIO(pictures[0]))) if pictures else None
        return Answer(
            text=self.reply(text, pixels),
            thinking="",
            token_ids=(1,),
            logprobs=(0.0,),
            finish_reason="stop",
            usage=Usage(prompt_tokens=9, image_tokens=0, completion_tokens=1),
            timings=Timings(queued_s=0.0, token_s=(0.1,), total_s=0.1),
        )


def looks(text: str, pixels: np.ndarray | None) -> str:
    """Right about every picture it is really shown, and about facts."""
    if pixels is None:
        return RIGHT[text]
    for item in known_questions():
        if item.scene and item.text == text and np.array_equal(draw_scene(item.scene), pixels):
            return item.answer
    return "I cannot tell."


def leaks(text: str, pixels: np.ndarray | None) -> str:
    """Right whatever the picture shows."""
    return next(item.answer for item in known_questions() if item.text == text)


def judged(reply: Callable[[str, np.ndarray | None], str]) -> tuple[dict[str, Gate], list[Section], list[SampleAnswer]]:
    book = GateBook(gate_forms(has_known_answers=True))
    sections, answers = list[Section](), list[SampleAnswer]()
    measure_known_answers(book, sections, answers, Service(reply), say=lambda line: None)  # type: ignore[arg-type]
    return {gate.id: gate for gate in book.close()}, sections, answers


def test_one_that_looks_passes_and_every_answer_is_kept_with_its_mark() -> None:
    gates, (section,), answers = judged(looks)
    assert gates["answers.correct"].status == gates["answers.blank"].status == "pass"
    assert gates["answers.correct"].value == 1.0
    assert len(answers) == len(section.tables[0].rows) == len(known_questions())
    assert all(answer.is_right and answer.expected == answer.answer for answer in answers)
    assert [len(answer.pictures) for answer in answers] == [1 if item.scene else 0 for item in known_questions()]


def test_one_that_is_right_without_looking_is_found_out() -> None:
    gates, _, _ = judged(leaks)
    assert gates["answers.correct"].status == "pass"
    assert gates["answers.blank"].status == "fail"
    assert gates["answers.blank"].value > 0.9  # type: ignore[operator]


def test_one_that_is_shown_empty_pictures_fails_and_is_quoted() -> None:
    gates, (section,), _ = judged(lambda text, pixels: looks(text, None if pixels is None else pixels * 0))
    assert gates["answers.correct"].status == "fail"
    assert "fact 6/6" in gates["answers.correct"].evidence
    assert "shape 0/3" in gates["answers.correct"].evidence
    assert "got 'I cannot tell.', expected" in gates["answers.correct"].evidence
    assert [row[4] for row in section.tables[0].rows].count("NO") == len(PICTURE_KINDS) * 3


def test_a_refused_question_counts_as_wrong_with_its_reason() -> None:
    def refuses(text: str, pixels: np.ndarray | None) -> str:
        raise RequestError("no room")

    gates, _, answers = judged(refuses)
    assert gates["answers.correct"].value == 0
    assert "no room" in gates["answers.correct"].evidence
    assert answers == []


def test_questions_are_held_out_and_of_every_kind() -> None:
    items = known_questions()
    assert {item.kind for item in items} == {*PICTURE_KINDS, "fact"}
    assert all(split_of(item.scene) == "held_out" for item in items if item.scene)
    assert items == known_questions()


def test_gates_about_right_answers_stand_beside_the_others_about_answers() -> None:
    assert gate_forms(has_known_answers=False) == GATES
    forms = list(gate_forms(has_known_answers=True))
    assert [x for x in forms if x not in GATES] == list(KNOWN_ANSWER_GATES)
    assert forms.index("answers.correct") == forms.index("answers.looks") + 1


def test_only_a_folder_that_says_so_was_trained_here(tmp_path: Path) -> None:
    assert not is_trained_here(TINY)
    assert not is_trained_here(tmp_path)
    say_trained(tmp_path)
    assert is_trained_here(tmp_path)
    say_trained(tmp_path, weights="random")
    assert not is_trained_here(tmp_path)
    say_trained(tmp_path, recipe="another")
    assert not is_trained_here(tmp_path)
    (tmp_path / "origin.json").write_text('{"weights": "trained"}')
    (tmp_path / "recipe.toml").write_text("seed = 1\n")
    assert not is_trained_here(tmp_path)


@pytest.mark.slow
@pytest.mark.ranks
def test_random_weights_that_claim_to_be_trained_fail_and_say_what_they_answered(
    accept: Accept, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    say_trained(copy)
    monkeypatch.setattr(run, "_fits_in_fp32", lambda *args: False)
    monkeypatch.setattr("workbench.day0.known.MAX_NEW_TOKENS", 12)  # noise is as wrong after a few words
    acceptance = accept(copy)
    assert acceptance.failed == {"answers.correct"}
    assert acceptance.evidence("answers.correct").startswith("0 of 24 right (shape 0/3, colour 0/3")
    report = acceptance.report
    assert [answer.is_right for answer in report.answers[:24]] == [False] * 24
    page = (acceptance.folder / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 18 + 3
    assert page.count(" expected: ") >= 24
    assert "Held-out questions" in [section.title for section in report.sections]
