"""The difference of two models on the same questions, and how sure it is."""

from __future__ import annotations

import random

import pytest

from workbench.exam.paired import PairedMarks, compare_replies
from workbench.training.data.exam import ExamItem


def pair(both: int, won: int, lost: int, neither: int) -> PairedMarks:
    return PairedMarks(kinds="all", num=both + won + lost + neither, both_right=both, only_model=won, only_other=lost)


def items(number: int, kind: str = "colour") -> list[ExamItem]:
    return [ExamItem(kind=kind, form=kind, text=f"What? {i}", answer="Red.", accepted=()) for i in range(number)]


def test_replies_are_counted_question_by_question_and_only_of_the_kinds_asked() -> None:
    asked = [*items(4), *items(2, "word")]
    found = compare_replies(
        asked,
        ["Red.", "red", "Blue.", "Blue.", "Red.", "Red."],
        ["Red.", "Blue.", "Red.", "Green.", "Blue.", "Blue."],
        ["colour"],
        name="colours",
    )
    assert found == PairedMarks(kinds="colours", num=4, both_right=1, only_model=1, only_other=1)
    assert (found.num_right, found.other_right, found.points_lost) == (2, 2, 0.0)
    with pytest.raises(ValueError, match="shorter"):
        compare_replies(asked, ["Red."] * 6, ["Red."] * 5, ["colour"], name="colours")


def test_points_lost_count_what_only_the_other_got_right() -> None:
    assert pair(90, 2, 5, 3).points_lost == pytest.approx(3.0)
    assert pair(90, 5, 2, 3).points_lost == pytest.approx(-3.0)
    assert pair(0, 0, 0, 0).points_lost == 0.0


def test_equal_models_have_an_interval_around_nothing_that_narrows() -> None:
    few, many = pair(9, 0, 0, 1).interval, pair(900, 0, 0, 100).interval
    assert few[0] == pytest.approx(-few[1])
    assert 0 < many[1] < 0.2 < 1.0 < few[1]


def test_an_interval_that_ignored_the_pairing_would_be_far_wider() -> None:
    """900 of 1000 right on both sides and 10 that differ: two independent shares would be unsure by 2.6 points."""
    low, high = pair(895, 5, 5, 95).interval
    assert high - low < 1.3
    independent = 2 * 1.96 * 100 * (2 * 0.9 * 0.1 / 1000) ** 0.5
    assert independent > 5


def test_interval_covers_the_true_difference_as_often_as_it_says() -> None:
    rng, covered = random.Random(1), 0
    share_lost, share_won, number = 0.04, 0.01, 300
    for _ in range(400):
        lost = won = 0
        for _ in range(number):
            mark = rng.random()
            lost += mark < share_lost
            won += share_lost <= mark < share_lost + share_won
        low, high = pair(number - lost - won, won, lost, 0).interval
        covered += low <= 100 * (share_lost - share_won) <= high
    assert 0.92 <= covered / 400 <= 0.99


def test_record_travels_and_its_figures_are_computed_anew() -> None:
    marks = pair(90, 2, 5, 3)
    record = {**marks.to_json(), "points_lost": -50.0}
    assert PairedMarks.from_json(record) == marks
    assert PairedMarks.from_json(record).points_lost == pytest.approx(3.0)
