"""Thoughts about a picture: true line by line, and whoever reads them alone comes to the answer of the question."""

from __future__ import annotations

import re

import numpy as np
import pytest

from workbench.training.data.looking import caption, count_through, look_for, look_through
from workbench.training.data.phrasing import NUMBER_NAMES
from workbench.training.data.questions import Question, ask, kinds_of
from workbench.training.data.scenes import Bar, Figure, Label, Scene, make_scene

LINE = re.compile(r"(?P<place>[A-Z][a-z ]+): (?P<thing>[a-z0-9 ]+)\. (?P<verdict>[A-Z][a-z]+)\.")
DIRECT = {"shape.at", "colour.at", "digit.read", "word.read", "caption.all"}  # one look at one place, or all of it


def figure(shape: str, colour: str, row: int, column: int, size: str = "small") -> Figure:
    return Figure(shape=shape, colour=colour, size=size, row=row, column=column)


def scene_of(*figures: Figure, label: Label | None = None) -> Scene:
    return Scene(canvas=(112, 112), background="white", figures=figures, label=label)


def read(question: Question) -> list[tuple[str, str, str]]:
    """(place, thing, verdict) of each line; every character of the thought belongs to one."""
    lines = [(m["place"].lower(), m["thing"], m["verdict"]) for m in LINE.finditer(question.thought)]
    said = " ".join(f"{place.capitalize()}: {thing}. {verdict}." for place, thing, verdict in lines)
    assert said == question.thought
    return lines


def answer_from(question: Question) -> str:
    """What the thought alone says: the reader sees neither picture nor recipe."""
    form, text = question.form, question.text.lower()
    if question.thought == "The picture is empty.":
        return "zero" if form.startswith("count") else "no"
    lines = read(question)
    found = {verdict: (place, thing) for place, thing, verdict in lines if verdict != "No"}
    if form.startswith("count"):
        return list(found)[-1].lower() if found else "zero"
    if form == "presence.is":
        return "yes" if found else "no"
    if form == "relation.is":
        rows, columns = ("top", "middle", "bottom"), ("left", "centre", "right")
        (first, _), (second, _) = found["First"], found["Second"]

        def at(place: str) -> tuple[int, int]:
            words = ["middle", "centre"] if place == "centre" else place.split()
            return rows.index(words[0]), columns.index(words[1].replace("middle", "centre"))

        (row, column), (other_row, other_column) = at(first), at(second)
        sides = {"left of": column < other_column, "right of": column > other_column}
        sides |= {"above": row < other_row, "below": row > other_row, "under": row > other_row}
        (holds,) = {holds for side, holds in sides.items() if side in text}
        return "yes" if holds else "no"
    if form in ("size.larger", "size.smaller"):
        size = form.removeprefix("size.").replace("er", "").replace("larg", "large")
        return next(thing for _, thing in found.values() if f" {size} " in f" {thing} ")
    place, thing = found["Yes"]
    words = thing.split()
    return {
        "position": place,
        "size": words[1],
        "colour": words[-1] if "in" in words else words[2],
        "shape": words[-1],
    }[question.kind]


def test_a_caption_names_everything_in_reading_order() -> None:
    label = Label(text="owl", colour="black", row=1)
    scene = scene_of(figure("star", "pink", 0, 1), figure("circle", "red", 2, 2, "large"), label=label)
    assert caption(scene) == (
        "Top middle: a small pink star. Middle: the word owl in black. Bottom right: a large red circle."
    )
    assert caption(scene_of()) == "The picture is empty."


def test_a_look_says_a_verdict_behind_each_thing_and_ends_where_it_may() -> None:
    one, two = figure("star", "pink", 0, 1), figure("circle", "red", 2, 2)
    scene = scene_of(one, figure("cross", "red", 1, 0), two)
    assert look_for(scene, one) == "Top middle: a small pink star. Yes."
    assert look_for(scene, two, one) == (
        "Top middle: a small pink star. Second. Middle left: a small red cross. No. "
        "Bottom right: a small red circle. First."
    )
    assert count_through(scene, [two, scene.figures[1]]) == (
        "Top middle: a small pink star. No. Middle left: a small red cross. One. Bottom right: a small red circle. Two."
    )
    assert look_through(scene_of(), lambda thing: "No") == "The picture is empty."


@pytest.mark.parametrize("kind", ["shape", "colour", "count", "position", "relation", "size", "presence"])
def test_a_thought_leads_to_the_answer(kind: str) -> None:
    rng, seen = np.random.default_rng(5), 0
    while seen < 150:
        scene = make_scene(rng)
        question = ask(scene, kind, rng) if kind in kinds_of(scene) else None  # type: ignore[arg-type]
        if question is None:
            continue
        seen += 1
        if question.form in DIRECT:
            assert question.thought == ""
            continue
        whole = caption(scene)
        assert all(f"{p.capitalize()}: {t}." in whole for p, t, _ in (read(question) if scene.figures else []))
        if question.form == "relation.what":
            continue  # the thought finds the thing that is named; what lies beside it is read from the lines
        found = answer_from(question)
        answer = question.answer.rstrip(".").lower()
        if question.form in ("size.larger", "size.smaller"):
            assert all(word in found.split() for word in answer.split()[1:])
        else:
            assert answer in (found, f"a {found}", f"an {found}"), question


def test_a_chart_is_read_out_before_it_is_asked_about() -> None:
    scene = Scene(
        canvas=(112, 112), background="white", bars=(Bar(colour="red", height=4), Bar(colour="black", height=1))
    )
    rng = np.random.default_rng(0)
    for _ in range(20):
        question = ask(scene, "chart", rng)
        assert question is not None
        assert question.thought == caption(scene) == "A chart with two bars. Red: four. Black: one."


def test_counts_go_up_one_by_one() -> None:
    rng = np.random.default_rng(2)
    for _ in range(200):
        scene = make_scene(rng, kind="figures")
        question = ask(scene, "count", rng)
        assert question is not None
        numbers = [verdict.lower() for _, _, verdict in read(question) if verdict != "No"]
        assert numbers == list(NUMBER_NAMES[1 : len(numbers) + 1])
