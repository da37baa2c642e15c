"""Questions that many things answer: "Where is everything?" - "The star: top left. The red one: centre. ..."

A description leads from a place to what is there. A question mostly leads the other way, from a name to its place, its
size or how many of it there are, and that search is not learnt from descriptions: a model that named what is at a place
without fail found a named thing among several in one of four pictures, and counted no better. A lone question trains
one search with two or three tokens; here every item of an answer is one, and answers have up to MAX_ITEMS.
"""

from __future__ import annotations

import numpy as np

from workbench.training.data.phrasing import NUMBER_NAMES, articled, one_of, plural, vary
from workbench.training.data.questions import Kind, Question, own_names
from workbench.training.data.scenes import COLOURS, SHAPES, Figure, Scene

__all__ = ["MAX_ITEMS", "ask_list"]

MAX_ITEMS, MAX_NAMED = 12, 5
_PHRASINGS: dict[str, tuple[str, ...]] = {  # of everything there is, and of things that the question names
    "position.each": ("Where is everything?", "Where is each thing?", "Say where everything is."),
    "size.each": ("How big is everything?", "What size is each thing?"),
    "colour.each": ("What colour is everything?", "What colour is each thing?"),
    "count.each": ("How many are there of each?", "Count everything.", "Count shapes and colours."),
    "position.named": ("Where are {items}?", "Find {items}.", "Say where {items} are."),
    "presence.named": ("Which of these are there: {items}?", "Look for {items}."),
}
_Items = list[tuple[str, str]]  # (name, answer)


def ask_list(scene: Scene, rng: np.random.Generator, *, unlike: str = "") -> Question | None:
    """A question that two to MAX_ITEMS items answer, in any order; None where the scene holds too little for that.

    `unlike` is a form not to use: an answer given twice in one chat would be copied, not looked for.
    """
    if not scene.figures:
        return None
    makers = (_places, _places, _counts, _counts, _sizes, _colours, _named_places, _presences)
    for idx in rng.permutation(len(makers)):
        form, items = makers[idx](scene, rng)
        if len(items) < 2 or form == unlike:
            continue
        is_named = form.endswith(".named")
        items = [items[int(i)] for i in rng.permutation(len(items))[: MAX_NAMED if is_named else MAX_ITEMS]]
        names = [name for name, _ in items]
        text = one_of(rng, _PHRASINGS[form]).format(items=f"{', '.join(names[:-1])} and {names[-1]}")
        answer = " ".join(f"{name[0].upper()}{name[1:]}: {value}." for name, value in items)
        kind: Kind = _KIND_OF[form]
        return Question(kind=kind, form=form, text=vary(text, rng), answer=answer)
    return None


_KIND_OF: dict[str, Kind] = {
    "position.each": "position",
    "size.each": "size",
    "colour.each": "colour",
    "count.each": "count",
    "position.named": "position",
    "presence.named": "presence",
}


def _all_names(scene: Scene, figure: Figure) -> list[str]:
    """Every name that fits this figure alone, by shape, by both, or by colour where no label has one as well."""
    has_own_colour = [f.colour for f in scene.figures].count(figure.colour) == 1 and scene.label is None
    return [*own_names(scene, figure), *([f"the {figure.colour} one"] if has_own_colour else [])]


def _label_name(scene: Scene) -> str:
    return "the number" if scene.label and scene.label.is_number else "the word"


def _places(scene: Scene, _: np.random.Generator) -> tuple[str, _Items]:
    items = [(name, f.place) for f in scene.figures for name in _all_names(scene, f)]
    return "position.each", [*items, *([(_label_name(scene), scene.label.place)] if scene.label else [])]


def _sizes(scene: Scene, _: np.random.Generator) -> tuple[str, _Items]:
    return "size.each", [(name, f.size) for f in scene.figures for name in _all_names(scene, f)]


def _colours(scene: Scene, _: np.random.Generator) -> tuple[str, _Items]:
    shapes = [figure.shape for figure in scene.figures]
    items = [(f"the {f.shape}", f.colour) for f in scene.figures if shapes.count(f.shape) == 1]
    return "colour.each", [*items, *([(_label_name(scene), scene.label.colour)] if scene.label else [])]


def _counts(scene: Scene, rng: np.random.Generator) -> tuple[str, _Items]:
    """Of every shape and colour that is there, and of some that are not; nothing where a label has a colour too."""
    if scene.label:
        return "count.each", []
    noun = one_of(rng, ("shapes", "objects"))
    counts = [(plural(shape), sum(f.shape == shape for f in scene.figures)) for shape in SHAPES]
    counts += [(f"{colour} {noun}", sum(f.colour == colour for f in scene.figures)) for colour in COLOURS]
    return "count.each", [(name, NUMBER_NAMES[count]) for name, count in counts if count or rng.random() < 0.25]


def _named_places(scene: Scene, rng: np.random.Generator) -> tuple[str, _Items]:
    items = [(one_of(rng, names), f.place) for f in scene.figures if (names := own_names(scene, f))]
    return "position.named", [*items, *((f"the {name}", "not there") for name in _absent(scene, rng, 1))]


def _presences(scene: Scene, rng: np.random.Generator) -> tuple[str, _Items]:
    names = {f"{f.colour} {f.shape}" if rng.random() < 0.6 else f.shape for f in scene.figures}
    items = [(articled(name), "yes") for name in sorted(names)]
    return "presence.named", [*items, *((articled(name), "no") for name in _absent(scene, rng, len(items)))]


def _absent(scene: Scene, rng: np.random.Generator, count: int) -> list[str]:
    """Up to `count` names that nothing bears, half of them of a colour and a shape that are there, though apart."""
    there = {(f.colour, f.shape) for f in scene.figures}
    shapes = {f.shape for f in scene.figures}
    near = sorted({f"{f.colour} {g.shape}" for f in scene.figures for g in scene.figures} - _joined(there))
    far = sorted({f"{colour} {shape}" for colour in COLOURS for shape in SHAPES} - _joined(there))
    lone = [shape for shape in SHAPES if shape not in shapes]
    pools = [near or far, near or far, far, lone or far]
    return sorted({one_of(rng, pools[int(rng.integers(4))]) for _ in range(count)})


def _joined(pairs: set[tuple[str, str]]) -> set[str]:
    return {f"{colour} {shape}" for colour, shape in pairs}
