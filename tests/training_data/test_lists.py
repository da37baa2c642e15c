"""Every item of a list answer is looked up anew, from its own words and the figures alone."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from workbench.training.data.chats import CHAT_KINDS, Mixture, make_chat
from workbench.training.data.lists import MAX_ITEMS, ask_list
from workbench.training.data.phrasing import NUMBER_NAMES, plain_words
from workbench.training.data.questions import Question
from workbench.training.data.scenes import COLOURS, LABEL_PLACES, PLACES, SHAPES, Figure, Label, Scene, make_scene

PLACE_NAMES = {name for row in PLACES for name in row} | set(LABEL_PLACES)


def listed(num: int = 1500) -> list[tuple[Scene, Question]]:
    rng = np.random.default_rng(3)
    pairs = [(scene, ask_list(scene, rng)) for scene in (make_scene(rng) for _ in range(num))]
    return [(scene, question) for scene, question in pairs if question is not None]


def items_of(question: Question) -> list[tuple[str, str]]:
    items = [item.split(": ") for item in question.answer.removesuffix(".").split(". ")]
    return [(plain_words(name), value) for name, value in items]


def meant(scene: Scene, name: str) -> list[Figure]:
    words = name.split()
    colours = [w for w in words if w in COLOURS]
    shapes = [s for s in SHAPES if {s, f"{s}s", f"{s}es"} & set(words)]
    return [f for f in scene.figures if f.colour in (colours or [f.colour]) and f.shape in (shapes or [f.shape])]


def right_value(scene: Scene, form: str, name: str) -> str:
    if form == "count.each":
        return NUMBER_NAMES[len(meant(scene, name))]
    if form == "presence.named":
        return "yes" if meant(scene, name) else "no"
    thing: Figure | Label
    if name in ("the word", "the number"):
        assert scene.label is not None
        assert scene.label.is_number == (name == "the number")
        thing = scene.label
    elif form == "position.named" and not meant(scene, name):
        return "not there"
    else:
        (thing,) = meant(scene, name)
    if form.startswith("position"):
        return thing.place
    if form == "colour.each":
        return thing.colour
    assert form == "size.each"
    assert isinstance(thing, Figure)
    return thing.size


def test_every_item_of_every_list_is_right() -> None:
    forms = set()
    for scene, question in listed():
        items = items_of(question)
        assert 2 <= len(items) <= MAX_ITEMS
        assert len({name for name, _ in items}) == len(items), "a thing is named once"
        for name, value in items:
            assert value == right_value(scene, question.form, name), f"{name} in {scene.content}"
            if question.form.endswith(".named"):
                assert name.partition(" ")[2] in plain_words(question.text)
        forms.add(question.form)
    assert forms == {
        "position.each", "size.each", "colour.each", "count.each", "position.named", "presence.named"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("form", "one", "other"), [("presence.named", "yes", "no"), ("position.named", "", "not there")]
)
def test_absence_is_asked_for_but_not_always(form: str, one: str, other: str) -> None:
    values = [v for _, question in listed() if question.form == form for _, v in items_of(question)]
    share = values.count(other) / len(values)
    assert 0.1 < share < 0.6
    assert not one or values.count(one) + values.count(other) == len(values)


def test_items_stand_in_no_order_that_could_be_learnt_instead() -> None:
    """Places of a list rise and fall about as often; in reading order they would only rise."""
    rises = falls = 0
    for scene, question in listed():
        if question.form == "position.each":
            order = [f.place for f in scene.figures]
            ranks = [order.index(value) for _, value in items_of(question) if value in order]
            rises += sum(a < b for a, b in pairwise(ranks))
            falls += sum(a > b for a, b in pairwise(ranks))
    assert 0.8 < rises / falls < 1.25


@pytest.mark.parametrize("kind", ["chart", "empty"])
def test_a_picture_without_figures_has_no_list(kind: str) -> None:
    rng = np.random.default_rng(0)
    assert all(ask_list(make_scene(rng, kind=kind), rng) is None for _ in range(20))  # type: ignore[arg-type]


def test_a_form_is_not_asked_for_twice_in_a_row() -> None:
    rng = np.random.default_rng(1)
    scene = make_scene(rng, kind="figures")
    asked = [ask_list(scene, rng, unlike="position.each") for _ in range(60)]
    assert all(question is None or question.form != "position.each" for question in asked)


def test_the_share_of_chats_with_lists_is_that_of_the_mixture() -> None:
    shares = {**dict.fromkeys(CHAT_KINDS, 0.0), "picture": 1.0}
    counted = {}
    for share in (0.0, 0.5, 1.0):
        mixture, rng = Mixture(**shares, list_share=share), np.random.default_rng(5)
        chats = [make_chat(rng, [], mixture) for _ in range(400)]
        num = sum(any(m.role == "assistant" and _is_list(str(m.content)) for m in chat.messages) for chat in chats)
        counted[share] = num / len(chats)
    assert counted[0.0] == 0
    assert 0.3 < counted[0.5] < 0.5, "charts and single figures have few"
    assert counted[1.0] > 1.6 * counted[0.5]


def _is_list(answer: str) -> bool:
    """Lists begin with what is asked for; descriptions with a place or with "A chart"."""
    head, colon, _ = answer.partition(": ")
    return bool(colon) and head.lower() not in PLACE_NAMES and not head.startswith("A chart")
