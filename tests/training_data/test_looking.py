"""Thoughts about a picture: true in every entry, and whoever reads them alone comes to the answer of the question."""

from __future__ import annotations

import re

import numpy as np
import pytest

from workbench.training.data.looking import caption, count_of, look_for
from workbench.training.data.questions import Question, ask, kinds_of
from workbench.training.data.scenes import COLOURS, SHAPES, Bar, Figure, Label, Scene, make_scene

DIRECT = {"shape.at", "colour.at", "digit.read", "word.read", "caption.all"}  # one look at one place, or all of it
LINE = re.compile(r"([A-Z][a-z ]+): an? (large|small) ([a-z]+) ([a-z]+)\. ")
THOUGHT = re.compile(r"(?P<lines>.*?)(?:By kind (?P<index>[^.]*)\. )?(?P<found>So .*)")


def figure(shape: str, colour: str, row: int, column: int, size: str = "small") -> Figure:
    return Figure(shape=shape, colour=colour, size=size, row=row, column=column)


def scene_of(*figures: Figure, label: Label | None = None) -> Scene:
    return Scene(canvas=(112, 112), background="white", figures=figures, label=label)


def read(thought: str) -> tuple[str, dict[str, str], dict[str, str]]:
    """Lines, index by kind, and what was found by name; every character of the thought belongs to one of them."""
    match = THOUGHT.fullmatch(thought)
    assert match is not None, thought
    index = dict(entry.split(": ") for entry in (match["index"] or "").split("; ") if entry)
    found = dict(text.split(": ") for text in match["found"].removeprefix("So ").removesuffix(".").split(". So "))
    return match["lines"], index, found


def place_of(found: str) -> tuple[int, int]:
    rows, columns = ("top", "middle", "bottom"), ("left", "centre", "right")
    words = found.split(", ")[0].split()[2:]
    words = ["middle", "centre"] if words == ["centre"] else words
    return rows.index(words[0]), columns.index(words[1].replace("middle", "centre"))


def answer_from(question: Question, found: dict[str, str]) -> str:
    """What the findings alone say: the reader sees neither picture nor recipe."""
    form, text, first = question.form, question.text.lower(), next(iter(found.values()))
    if form.startswith("count"):
        return first
    if form == "presence.is":
        return "no" if first == "none" else "yes"
    if form == "relation.is":
        (row, column), (other_row, other_column) = (place_of(thing) for thing in found.values())
        sides = {"left of": column < other_column, "right of": column > other_column}
        sides |= {"above": row < other_row, "below": row > other_row, "under": row > other_row}
        (holds,) = {holds for side, holds in sides.items() if side in text}
        return "yes" if holds else "no"
    if form in ("size.larger", "size.smaller"):
        size = {"size.larger": "large", "size.smaller": "small"}[form]
        return next(f"the {name}" for name, thing in found.items() if thing.endswith(f", {size}"))
    where, last = first.split(", ")
    if next(iter(found)) in ("number", "word", "text"):
        return {"position": where, "colour": last}[question.kind]
    colour, shape, place = where.split(maxsplit=2)
    return {"position": place, "size": last, "colour": colour, "shape": shape}[question.kind]


def test_a_caption_names_everything_in_reading_order() -> None:
    label = Label(text="owl", colour="black", row=1)
    scene = scene_of(figure("star", "pink", 0, 1), figure("circle", "red", 2, 2, "large"), label=label)
    assert caption(scene) == (
        "Top middle: a small pink star. Middle: the word owl in black. Bottom right: a large red circle."
    )
    assert caption(scene_of()) == "The picture is empty."


def test_a_thought_is_the_caption_its_index_and_what_was_found() -> None:
    star = figure("star", "pink", 0, 1)
    scene = scene_of(star, figure("cross", "red", 1, 0), figure("star", "red", 2, 2, "large"))
    shown = (
        "Top middle: a small pink star. Middle left: a small red cross. Bottom right: a large red star. By kind "
        "circle: none; square: none; triangle: none; diamond: none; star: pink top middle, red bottom right; "
        "cross: red middle left; red: cross middle left, star bottom right; green: none; blue: none; yellow: none; "
        "orange: none; purple: none; pink: star top middle; black: none."
    )
    assert look_for(scene, ("the pink star", star)) == f"{shown} So pink star: pink star top middle, small."
    two = look_for(scene, ("the cross", scene.figures[1]), ("the pink star", star))
    assert two == f"{shown} So cross: red cross middle left, small. So pink star: pink star top middle, small."
    assert look_for(scene, ("blue star", None)) == f"{shown} So blue star: none."
    assert count_of(scene, "star") == f"{shown} So star: two."
    assert count_of(scene) == f"{shown} So things: three."


def test_a_label_and_an_empty_picture_need_no_index() -> None:
    label = Label(text="7", colour="green", row=1)
    scene = scene_of(label=label)
    assert look_for(scene, ("the text", label)) == "Middle: the number 7 in green. So text: middle, green."
    assert count_of(scene_of(), "red") == "The picture is empty. So red: zero."


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
        lines, _, found = read(question.thought)
        assert lines.strip() == caption(scene)
        assert all(name in question.text.lower() for name in found if name != "things")
        if question.form == "relation.what":
            continue  # the thought finds the thing that is named; what lies beside it is read from the lines
        answer, read_off = question.answer.rstrip(".").lower(), answer_from(question, found)
        assert answer in (read_off, f"a {read_off}", f"an {read_off}"), question


def test_the_index_holds_every_figure_once_by_shape_and_once_by_colour() -> None:
    rng = np.random.default_rng(2)
    for _ in range(100):
        scene = make_scene(rng, kind="figures")
        question = ask(scene, "count", rng)
        assert question is not None
        lines, index, _ = read(question.thought)
        assert list(index) == [*SHAPES, *COLOURS]
        things = [(place.lower(), colour, shape) for place, _, colour, shape in LINE.findall(lines)]
        for kind, entry in index.items():
            by_shape = kind in SHAPES
            wanted = [f"{colour if by_shape else shape} {place}" for place, colour, shape in things
                      if kind == (shape if by_shape else colour)]  # fmt: skip
            assert entry == (", ".join(wanted) or "none")


def test_a_chart_is_read_out_before_it_is_asked_about() -> None:
    scene = Scene(
        canvas=(112, 112), background="white", bars=(Bar(colour="red", height=4), Bar(colour="black", height=1))
    )
    rng = np.random.default_rng(0)
    for _ in range(20):
        question = ask(scene, "chart", rng)
        assert question is not None
        assert question.thought == caption(scene) == "A chart with two bars. Red: four. Black: one."
