"""Answers are checked by a second reading of each question: its words are parsed and answered from the figures anew."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from workbench.training.data.phrasing import NUMBER_NAMES, plain_words
from workbench.training.data.questions import KINDS, Kind, Question, ask, caption, describe, follow_up, kinds_of
from workbench.training.data.scenes import COLOURS, SHAPES, Bar, Figure, Label, Scene, make_scene

NUM_SCENES = 1500


def asked(kind: Kind, seed: int = 0) -> list[tuple[Scene, Question]]:
    rng = np.random.default_rng(seed)
    pairs = []
    for _ in range(NUM_SCENES):
        scene = make_scene(rng)
        if kind in kinds_of(scene) and (question := ask(scene, kind, rng)) is not None:
            assert question.kind == kind
            pairs.append((scene, question))
    assert len(pairs) > 60, f"too few {kind} questions to judge"
    return pairs


def words_of(text: str) -> list[str]:
    spelling = {"color": "colour", "center": "centre"}
    return [spelling.get(word, word) for word in plain_words(text).split()]


def meant(scene: Scene, words: list[str]) -> list[Figure]:
    """Figures that fit the colour and shape words: "red circle", "circle", "red", singular or plural."""
    colours = [w for w in words if w in COLOURS]
    shapes = [s for w in words for s in SHAPES if w in (s, f"{s}s", f"{s}es")]
    return [
        f for f in scene.figures if (not colours or f.colour == colours[0]) and (not shapes or f.shape == shapes[0])
    ]


def the_one(scene: Scene, words: list[str]) -> Figure:
    found = meant(scene, words)
    assert len(found) == 1, f"{' '.join(words)} means {len(found)} figures of {caption(scene)}"
    return found[0]


def at_place(scene: Scene, words: list[str]) -> Figure:
    """The figure at the place that is named in the words."""
    text = " ".join(words)
    found = [f for f in scene.figures if f.place in text]
    assert len(found) == 1, f"{text} names {len(found)} places"
    return found[0]


def right_answer(scene: Scene, question: Question) -> str:
    """The answer in plain words, found from the question's text alone; the form only says how to read it."""
    words = words_of(question.text)
    text = " ".join(words)
    if question.form in ("shape.at", "shape.colour"):
        figure = at_place(scene, words) if question.form == "shape.at" else the_one(scene, words)
        return f"a {figure.shape}"
    if question.form == "colour.at":
        return at_place(scene, words).colour
    if question.form == "colour.ref":
        if scene.label and words[-1] in ("word", "number", "text", "have") and not meant_shape(words):
            return scene.label.colour
        return the_one(scene, words).colour
    if question.form == "count.all":
        return NUMBER_NAMES[len(scene.figures)]
    if question.form == "count.some":
        return NUMBER_NAMES[len(meant(scene, words))]
    if question.form == "position.ref":
        is_label = scene.label and not meant_shape(words)
        return scene.label.place if is_label and scene.label else the_one(scene, words).place
    if question.form == "size.ref":
        return the_one(scene, words).size
    if question.form.startswith("size."):
        first, second = re.split(r" or ", text)
        pair = [the_one(scene, first.split()), the_one(scene, second.split())]
        wanted = "large" if question.form == "size.larger" else "small"
        (figure,) = [f for f in pair if f.size == wanted]
        said = first if figure is pair[0] else second
        return said[said.rindex("the ") :]
    if question.form == "presence.is":
        if "word" in words or "number" in words:
            return "yes" if scene.label and ("number" in words) == scene.label.is_number else "no"
        return "yes" if meant(scene, words) else "no"
    if question.form.startswith("relation."):
        return right_relation(scene, text, question.form)
    if question.kind in ("digit", "word"):
        assert scene.label is not None
        return f"it says {scene.label.text}"
    if question.kind == "chart":
        return right_chart(scene, words, question.form)
    raise AssertionError(f"no reading of {question.form}")


def meant_shape(words: list[str]) -> bool:
    return any(shape in words for shape in SHAPES)


def right_relation(scene: Scene, text: str, form: str) -> str:
    before, side, after = re.split(r"\b(left of|right of|above|below|under)\b", text)

    def lies(figure: Figure, other: Figure) -> bool:
        return {
            "left of": figure.column < other.column,
            "right of": figure.column > other.column,
            "above": figure.row < other.row,
            "below": figure.row > other.row,
            "under": figure.row > other.row,
        }[side]

    other = the_one(scene, after.split())
    if form == "relation.is":
        return "yes" if lies(the_one(scene, before.split()), other) else "no"
    (figure,) = [f for f in scene.figures if f is not other and lies(f, other)]
    return f"{'an' if figure.colour == 'orange' else 'a'} {figure.colour} {figure.shape}"


def right_chart(scene: Scene, words: list[str], form: str) -> str:
    by_colour = {bar.colour: bar.height for bar in scene.bars}
    named = [w for w in words if w in by_colour]
    if form in ("chart.tallest", "chart.shortest"):
        pick = max if form == "chart.tallest" else min
        (colour,) = [c for c, h in by_colour.items() if h == pick(by_colour.values())]
        return colour
    if form == "chart.count":
        return NUMBER_NAMES[len(scene.bars)]
    if form == "chart.value":
        return NUMBER_NAMES[by_colour[named[0]]]
    if form == "chart.end":
        return scene.bars[0 if "first" in words or "left" in words else -1].colour
    first, second = (by_colour[name] for name in named)
    assert first != second, "bars of one height have no order"
    return "yes" if (first > second) == ("taller" in words) else "no"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "caption"])
def test_answers_equal_a_second_reading_of_the_question(kind: Kind) -> None:
    for scene, question in asked(kind):
        expected = right_answer(scene, question)
        assert plain_words(question.answer) == expected, f"{question.text} about {caption(scene)}"


def test_the_second_reading_finds_a_wrong_answer() -> None:
    scene = Scene(
        canvas=(112, 112),
        background="white",
        figures=(
            Figure(shape="circle", colour="red", size="large", row=0, column=0),
            Figure(shape="square", colour="blue", size="small", row=1, column=2),
        ),
    )
    for form, text, right in (
        ("count.all", "How many shapes are there?", "two"),
        ("relation.is", "Is the circle left of the square?", "yes"),
        ("relation.is", "Is the circle below the square?", "no"),
        ("relation.what", "What is above the blue square?", "a red circle"),
        ("position.ref", "Where is the circle?", "top left"),
        ("size.larger", "Which is larger, the square or the red circle?", "the red circle"),
        ("presence.is", "Is there a red square?", "no"),
    ):
        kind = next(kind for kind in KINDS if form.startswith(kind))
        assert right_answer(scene, Question(kind=kind, form=form, text=text, answer="")) == right
    twins = replace(scene, figures=(scene.figures[0], replace(scene.figures[0], row=2)))
    ambiguous = Question(kind="position", form="position.ref", text="Where is the circle?", answer="")
    with pytest.raises(AssertionError, match="means 2 figures"):
        right_answer(twins, ambiguous)


def test_an_accepted_answer_is_never_an_answer_to_the_other_choice() -> None:
    for scene, question in asked("size"):
        if question.form == "size.ref":
            continue
        first, second = plain_words(question.text).split(" or ")
        wrong = the_one(scene, first.split()), the_one(scene, second.split())
        other = wrong[0] if question.subject is wrong[1] else wrong[1]
        assert f"{other.colour} {other.shape}" not in question.accepted
        assert other.shape not in question.accepted
        assert other.colour not in question.accepted


@pytest.mark.parametrize("kind", ["relation", "presence"])
def test_yes_and_no_are_about_equally_likely(kind: Kind) -> None:
    answers = Counter(q.answer for _, q in asked(kind) if q.answer in ("Yes.", "No."))
    assert 0.4 < answers["Yes."] / answers.total() < 0.6


def test_counts_are_spread_out() -> None:
    answers = Counter(q.answer for _, q in asked("count"))
    assert max(answers.values()) < 0.45 * answers.total()
    assert {"Zero.", "One.", "Two.", "Three.", "Four.", "Five."} <= set(answers)


def test_a_caption_names_every_figure_in_reading_order() -> None:
    rng = np.random.default_rng(5)
    for _ in range(300):
        scene = make_scene(rng, kind="figures")
        sentences = caption(scene).split(". ")
        assert len(sentences) == len(scene.figures)
        for sentence, figure in zip(sentences, scene.figures, strict=True):
            place, rest = sentence.rstrip(".").split(": ")
            assert place == figure.place.capitalize()
            assert rest == f"a {figure.size} {figure.colour} {figure.shape}"
    assert describe(scene, rng).answer == caption(scene)


def test_captions_of_labels_charts_and_nothing_read_as_they_look() -> None:
    figure = Figure(shape="star", colour="pink", size="small", row=2, column=1)
    label = Label(text="47", colour="blue", row=0)
    scene = Scene(canvas=(112, 112), background="white", figures=(figure,), label=label)
    assert caption(scene) == "Top: the number 47 in blue. Bottom middle: a small pink star."
    moved = replace(scene, figures=(replace(figure, row=0),), label=replace(label, text="owl", row=2))
    assert caption(moved) == "Top middle: a small pink star. Bottom: the word owl in blue."
    bars = (Bar(colour="red", height=4), Bar(colour="black", height=1))
    assert caption(replace(scene, figures=(), label=None, bars=bars)) == "A chart with two bars. Red: four. Black: one."
    assert caption(replace(scene, figures=(), label=None)) == "The picture is empty."


def test_a_follow_up_asks_for_something_not_said_yet() -> None:
    rng = np.random.default_rng(6)
    count = 0
    for kind in ("shape", "colour", "size", "position", "relation"):
        for _, question in asked(kind, seed=7):
            after = follow_up(question, rng)
            if after is None:
                continue
            count += 1
            assert question.subject is not None
            value = {
                "shape": question.subject.shape,
                "colour": question.subject.colour,
                "size": question.subject.size,
                "position": question.subject.place,
            }[after.kind]
            assert value in after.answer.lower()
            assert value not in f"{question.text} {question.answer}".lower()
    assert count > 500


def test_yes_no_questions_have_no_follow_up() -> None:
    question = Question(kind="relation", form="relation.is", text="Is the star left of the cross?", answer="Yes.")
    assert follow_up(question, np.random.default_rng(0)) is None
