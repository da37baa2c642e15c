"""What is in a picture, in words: the caption, and a look through it for what a question asks about.

    caption       Top left: a large red circle. Centre: a small blue square.
    look_through  Top left: a large red circle. No. Centre: a small blue square. Yes.

A small model names what is at a place without fail, and cannot find the place of what it is asked for: trained on
answers alone it found one thing among several in one of four pictures, and counted no better. So it thinks first, in
K3's channel for that: each thing in reading order, as in the caption, and behind it what the question makes of it.
Every step then needs one place of the picture and the question, and every verdict is a token to learn from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from workbench.training.data.phrasing import NUMBER_NAMES
from workbench.training.data.scenes import Figure, Label, Scene

__all__ = ["NO", "YES", "caption", "count_through", "look_for", "look_through"]

YES, NO = "Yes", "No"
Thing = Figure | Label


def caption(scene: Scene) -> str:
    """Everything in the picture, in reading order: "Top left: a large red circle. Centre: a small blue square." """
    if scene.bars:
        values = [f"{bar.colour.capitalize()}: {NUMBER_NAMES[bar.height]}." for bar in scene.bars]
        return f"A chart with {NUMBER_NAMES[len(scene.bars)]} bars. {' '.join(values)}"
    return " ".join(_line(thing) for thing in _things(scene)) or "The picture is empty."


def look_through(scene: Scene, verdict: Callable[[Thing], str], *, until: int | None = None) -> str:
    """The caption with the verdict behind each thing; ends behind the `until`-th verdict that is not "No"."""
    lines: list[str] = []
    left = until
    for thing in _things(scene):
        said = verdict(thing)
        lines.append(f"{_line(thing)} {said}.")
        if left is not None and said != NO:
            left -= 1
            if left == 0:
                break
    return " ".join(lines) or caption(scene)


def look_for(scene: Scene, *wanted: Thing) -> str:
    """A look that ends where all wanted things are found: "Yes" at the one, "First" and "Second" at two."""
    names = (YES,) if len(wanted) == 1 else ("First", "Second")
    said = dict(zip(wanted, names, strict=True))
    return look_through(scene, lambda thing: said.get(thing, NO), until=len(wanted))


def count_through(scene: Scene, counted: Iterable[Thing]) -> str:
    """A look through all of the picture that counts: "... One. ... No. ... Two." """
    number = {thing: idx for idx, thing in enumerate((t for t in _things(scene) if t in set(counted)), start=1)}
    return look_through(scene, lambda thing: NUMBER_NAMES[number[thing]].capitalize() if thing in number else NO)


def _things(scene: Scene) -> list[Thing]:
    """In reading order; a label has its row to itself."""
    things: list[Thing] = [*scene.figures, *([scene.label] if scene.label else [])]
    return sorted(things, key=lambda thing: thing.row)


def _line(thing: Thing) -> str:
    if isinstance(thing, Label):
        what = "number" if thing.is_number else "word"
        return f"{thing.place.capitalize()}: the {what} {thing.text} in {thing.colour}."
    return f"{thing.place.capitalize()}: a {thing.size} {thing.colour} {thing.shape}."
