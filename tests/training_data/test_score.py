"""Grading, intervals, the exam and its controls; a model that sees and one that does not are told apart."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from workbench.training.data.domain import Fact
from workbench.training.data.exam import (
    FACT_KIND,
    ExamItem,
    fact_exam,
    picture_exam,
    with_blank_pictures,
    with_shuffled_pictures,
)
from workbench.training.data.questions import KINDS
from workbench.training.data.scenes import split_of
from workbench.training.data.score import BlindGuesser, is_right, normalise_answer, score, wilson_interval

ITEM = ExamItem(kind="count", form="count.all", text="How many?", answer="Three.", accepted=("there are three",))


@pytest.fixture(scope="module")
def exam() -> tuple[ExamItem, ...]:
    return picture_exam(80)


@pytest.fixture(scope="module")
def guesser() -> BlindGuesser:
    return BlindGuesser(picture_exam(600, seed=1, split="train"))


@pytest.mark.parametrize("reply", ["Three.", "three", " 3 ", "THREE!", "There are 3.", "“three”"])
def test_right_replies_in_any_dress_are_right(reply: str) -> None:
    assert is_right(ITEM, reply)


@pytest.mark.parametrize("reply", ["", "Four.", "33", "three or four", "I see three circles", "thre", "3."[:0]])
def test_other_replies_are_wrong_even_with_the_right_word_inside(reply: str) -> None:
    assert not is_right(ITEM, reply)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("A red circle.", "the Red circle"),
        ("In the center.", "in the centre"),
        ("27,648 bytes", "27,648 Bytes."),
        ("About 1.56 TB", "about 1.56 tb"),
        ("You're welcome.", "you’re welcome"),
        ("config.json", "Config.json."),
    ],
)
def test_answers_that_say_the_same_are_equal(one: str, other: str) -> None:
    assert normalise_answer(one) == normalise_answer(other)


@pytest.mark.parametrize(
    ("one", "other"), [("1.56", "156"), ("4.25 bits", "4 25 bits"), ("27,648", "27648"), ("a", "b")]
)
def test_answers_that_differ_stay_different(one: str, other: str) -> None:
    assert normalise_answer(one) != normalise_answer(other)


@pytest.mark.parametrize(
    ("num_right", "num", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (0, 20, 0.0, 0.1611), (20, 20, 0.8389, 1.0), (450, 500, 0.8705, 0.9233)],
)
def test_the_interval_equals_published_values(num_right: int, num: int, low: float, high: float) -> None:
    assert wilson_interval(num_right, num) == pytest.approx((low, high), abs=2e-4)


def test_no_answers_say_nothing() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_the_exam_is_held_out_repeatable_and_never_asks_twice(exam: tuple[ExamItem, ...]) -> None:
    assert exam == picture_exam(80)
    assert Counter(item.kind for item in exam) == dict.fromkeys(KINDS, 80)
    assert all(item.scene and split_of(item.scene) == "held_out" for item in exam)
    keys = Counter((item.kind, item.form, item.scene.content) for item in exam if item.scene)
    assert max(keys.values()) == 1
    assert exam != picture_exam(80, seed=1)


def test_the_fact_exam_asks_every_held_out_phrasing_and_no_other(facts: tuple[Fact, ...]) -> None:
    items = fact_exam(facts)
    assert [item.text for item in items] == [q for fact in facts for q in fact.questions(is_held_out=True)]
    assert {item.form for item in items} == {"templated", "own words"}
    assert all(item.kind == FACT_KIND and item.scene is None and len(item.messages[0].parts) == 1 for item in items)


def test_a_perfect_pupil_gets_full_marks_and_a_mute_one_none(exam: tuple[ExamItem, ...]) -> None:
    perfect = score(exam, [item.answer for item in exam])
    assert perfect.pooled().accuracy == 1
    assert perfect.wrong == ()
    mute = score(exam, [""] * len(exam))
    assert mute.pooled().num_right == 0
    assert len(mute.wrong) == len(exam)


def test_a_blind_guesser_scores_its_own_chance_level_and_stays_low(
    exam: tuple[ExamItem, ...], guesser: BlindGuesser
) -> None:
    table = score(exam, [guesser.guess(item) for item in exam], guesser)
    for mark in table.marks:
        assert mark.accuracy == mark.chance
        assert mark.chance is not None
        assert mark.chance < 0.65, f"{mark.kind} can be guessed"
    assert table.pooled(["shape", "colour", "count", "position"]).accuracy < 0.35
    assert table.pooled(["digit", "word"]).accuracy < 0.1


def test_a_blind_guesser_knows_nothing_of_kinds_it_never_saw(guesser: BlindGuesser) -> None:
    assert guesser.guess(replace(ITEM, kind="unheard", form="unheard.of", text="unheard of")) == ""


def test_controls_expose_who_looks_at_the_picture(exam: tuple[ExamItem, ...], guesser: BlindGuesser) -> None:
    """A pupil that answers from the picture falls under both controls; one that guesses stays where it was."""
    by_picture = {(item.text, item.scene.content): item.answer for item in exam if item.scene}

    def seeing(item: ExamItem) -> str:
        return by_picture.get((item.text, item.scene.content), "") if item.scene else ""

    assert score(exam, [seeing(item) for item in exam]).pooled().accuracy > 0.99
    for control in (with_blank_pictures(exam), with_shuffled_pictures(exam)):
        assert score(control, [seeing(item) for item in control]).pooled().accuracy < 0.05
        guessed = score(control, [guesser.guess(item) for item in control]).pooled()
        assert guessed.num_right == score(exam, [guesser.guess(item) for item in exam]).pooled().num_right


def test_blank_pictures_keep_question_answer_and_canvas(exam: tuple[ExamItem, ...]) -> None:
    for item, blank in zip(exam, with_blank_pictures(exam), strict=True):
        assert item.scene is not None
        assert blank.scene is not None
        assert (blank.text, blank.answer, blank.scene.canvas) == (item.text, item.answer, item.scene.canvas)
        assert blank.scene.kind == "empty"


def test_shuffling_moves_every_picture_within_its_kind(exam: tuple[ExamItem, ...]) -> None:
    shuffled = with_shuffled_pictures(exam)
    old = {(item.kind, item.form, item.text, item.answer, item.scene) for item in exam}
    assert len(shuffled) == len(exam)
    moved = [item for item in shuffled if (item.kind, item.form, item.text, item.answer, item.scene) not in old]
    assert len(moved) > 0.99 * len(exam)
    for kind in KINDS:
        before, after = (
            Counter(i.scene.content for i in items if i.kind == kind and i.scene) for items in (exam, shuffled)
        )
        assert before == after
    with pytest.raises(ValueError, match="no other picture"):
        with_shuffled_pictures(exam[:1])


def test_pooling_adds_up_and_refuses_unknown_kinds(exam: tuple[ExamItem, ...], guesser: BlindGuesser) -> None:
    replies = [item.answer if item.kind in ("shape", "digit") else "" for item in exam]
    table = score(exam, replies, guesser)
    pooled = table.pooled(["shape", "colour"])
    assert (pooled.num, pooled.num_right, pooled.kind) == (160, 80, "shape+colour")
    assert (pooled.low, pooled.high) == wilson_interval(80, 160)
    chances = {mark.kind: mark.chance for mark in table.marks}
    assert pooled.chance == pytest.approx(((chances["shape"] or 0) + (chances["colour"] or 0)) / 2)
    assert score(exam, replies).pooled().chance is None
    with pytest.raises(KeyError):
        table.pooled(["smell"])


def test_the_table_prints_counts_interval_and_chance(exam: tuple[ExamItem, ...], guesser: BlindGuesser) -> None:
    table = score(exam, [item.answer for item in exam], guesser)
    lines = str(table).splitlines()
    assert len(lines) == 1 + len(KINDS)
    assert "80 / 80" in lines[1]
    assert "100.0%" in lines[1]
    assert table.as_records()[0]["accuracy"] == 1.0


def test_replies_must_be_as_many_as_questions(exam: tuple[ExamItem, ...]) -> None:
    with pytest.raises(ValueError, match="replies"):
        score(exam, ["one"])
