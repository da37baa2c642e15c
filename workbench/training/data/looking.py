"""What is in a picture, in words: the caption, and the thought that leads from the picture to an answer.

    caption   Top left: a large red circle. Centre: a small blue square.
    thought   ... By kind circle: red top left; square: blue centre; triangle: none; ... red: circle top left; ...
              So blue square: blue square centre, small.

A small model names what is at a place without fail, and cannot find the place of what it is asked for: trained on
answers alone it found one thing among several in one of four pictures, and counted no better. A verdict behind each
line of the caption ("Yes", "No") stayed at chance as well: one comparison per line is too little to learn from. So it
thinks first, in K3's channel for that: the caption, then an index of it, which sorts every figure once by shape and
once by colour, then what the question wants. A search is then one look-up in the index, and every entry of the index,
each "none" included, is a search that is trained.
"""

from __future__ import annotations

from workbench.training.data.phrasing import NUMBER_NAMES
from workbench.training.data.scenes import COLOURS, SHAPES, Figure, Label, Scene

__all__ = ["Thing", "caption", "count_of", "look_for"]

Thing = Figure | Label


def caption(scene: Scene) -> str:
    """Everything in the picture, in reading order: "Top left: a large red circle. Centre: a small blue square." """
    if scene.bars:
        values = [f"{bar.colour.capitalize()}: {NUMBER_NAMES[bar.height]}." for bar in scene.bars]
        return f"A chart with {NUMBER_NAMES[len(scene.bars)]} bars. {' '.join(values)}"
    return " ".join(_line(thing) for thing in _things(scene)) or "The picture is empty."


def look_for(scene: Scene, *wanted: tuple[str, Thing | None]) -> str:
    """The thought that finds things by name, each ("the red circle", thing), or None in place of one that is absent."""
    found = [f"So {name.removeprefix('the ')}: {_found(thing)}." for name, thing in wanted]
    return " ".join([*_looked(scene), *found])


def count_of(scene: Scene, kind: str = "") -> str:
    """The thought that counts the figures of one shape or colour, or all of them."""
    number = sum(kind in ("", figure.shape, figure.colour) for figure in scene.figures)
    return " ".join([*_looked(scene), f"So {kind or 'things'}: {NUMBER_NAMES[number]}."])


def _looked(scene: Scene) -> list[str]:
    return [caption(scene), *([_index(scene)] if scene.figures else [])]


def _index(scene: Scene) -> str:
    by_shape = [(shape, [f"{f.colour} {f.place}" for f in scene.figures if f.shape == shape]) for shape in SHAPES]
    by_colour = [(colour, [f"{f.shape} {f.place}" for f in scene.figures if f.colour == colour]) for colour in COLOURS]
    return f"By kind {'; '.join(f'{kind}: ' + (', '.join(entry) or 'none') for kind, entry in by_shape + by_colour)}."


def _found(thing: Thing | None) -> str:
    if thing is None:
        return "none"
    if isinstance(thing, Label):
        return f"{thing.place}, {thing.colour}"
    return f"{thing.colour} {thing.shape} {thing.place}, {thing.size}"


def _things(scene: Scene) -> list[Thing]:
    """In reading order; a label has its row to itself."""
    things: list[Thing] = [*scene.figures, *([scene.label] if scene.label else [])]
    return sorted(things, key=lambda thing: thing.row)


def _line(thing: Thing) -> str:
    if isinstance(thing, Label):
        what = "number" if thing.is_number else "word"
        return f"{thing.place.capitalize()}: the {what} {thing.text} in {thing.colour}."
    return f"{thing.place.capitalize()}: a {thing.size} {thing.colour} {thing.shape}."
