"""Questions about a scene, with the answer and the other answers that count as right.

Every question has one right answer that a person can read off the picture: a thing is named only by words that fit it
alone, "left of" means another column and "above" another row. Where a question has two answers (yes or no, a count),
the answer is drawn first and a question that has it is sought, so that guessing pays as little as the scene allows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast, get_args

import numpy as np

from workbench.training.data.looking import caption, count_of, look_for
from workbench.training.data.phrasing import NUMBER_NAMES, articled, at_place, one_of, plural, vary
from workbench.training.data.scenes import COLOURS, SHAPES, Figure, Scene

__all__ = ["KINDS", "Kind", "Question", "ask", "describe", "follow_up", "kinds_of", "own_names"]

Kind = Literal[
    "shape", "colour", "count", "position", "relation", "size", "presence", "digit", "word", "chart", "caption"
]
KINDS: tuple[Kind, ...] = get_args(Kind)

# Phrasings by form; the part before the dot is the kind. Slots: at = place in a sentence, ref = a thing by name.
_PHRASINGS: dict[str, tuple[str, ...]] = {
    "shape.at": ("What shape is {at}?", "Which shape is {at}?", "What is the shape {at}?", "Name the shape {at}."),
    "shape.colour": (
        "What shape is the {colour} object?", "Which shape is {colour}?", "What is the {colour} shape?",
        "What shape is the {colour} one?",
    ),
    "colour.at": (
        "What colour is the {noun} {at}?", "Which colour is the {noun} {at}?", "What is the colour of the {noun} {at}?",
    ),
    "colour.ref": ("What colour is {ref}?", "Which colour is {ref}?", "What is the colour of {ref}?",
                   "What colour does {ref} have?"),
    "count.all": (
        "How many shapes are there?", "How many objects are in the picture?", "How many shapes can you see?",
        "Count the shapes.", "How many objects are there?",
    ),
    "count.some": (
        "How many {what} are there?", "How many {what} can you see?", "Count the {what}.",
        "How many {what} are in the picture?",
    ),
    "position.ref": (
        "Where is {ref}?", "Where is {ref} in the picture?", "Where can you see {ref}?",
        "What is the position of {ref}?", "In which place is {ref}?",
    ),
    "relation.is": ("Is {ref} {side} {other}?", "Does {ref} lie {side} {other}?", "Can you see {ref} {side} {other}?"),
    "relation.what": ("What is {side} {other}?", "Which shape is {side} {other}?", "What lies {side} {other}?"),
    "size.ref": ("What size is {ref}?", "Is {ref} large or small?", "How big is {ref}?", "Is {ref} small or large?"),
    "size.larger": ("Which is larger, {ref} or {other}?", "Which one is bigger, {ref} or {other}?"),
    "size.smaller": ("Which is smaller, {ref} or {other}?",),
    "presence.is": ("Is there {what}?", "Can you see {what}?", "Is there {what} in the picture?",
                    "Does the picture show {what}?"),
    "digit.read": (
        "What number is shown?", "Which number is in the picture?", "Read the number.", "What number can you see?",
        "What is the number?", "What number does the picture show?",
    ),
    "word.read": (
        "What does the picture say?", "Which word is shown?", "Read the word.", "What word is written here?",
        "What is the word?", "What word can you see?", "What does the text say?",
    ),
    "chart.tallest": ("Which bar is the tallest?", "What colour is the tallest bar?", "Which bar is the highest?"),
    "chart.shortest": ("Which bar is the shortest?", "What colour is the shortest bar?", "Which bar is the lowest?"),
    "chart.count": ("How many bars are there?", "How many bars does the chart have?", "Count the bars."),
    "chart.value": ("How high is the {colour} bar?", "What is the value of the {colour} bar?",
                    "What value does the {colour} bar have?"),
    "chart.compare": ("Is the {colour} bar {side} than the {other} bar?",),
    "chart.end": ("What colour is the {end} bar?", "Which colour is the {end} bar?"),
    "caption.all": (
        "Describe the picture.", "What is in the picture?", "What do you see?", "Describe this image.",
        "What does the picture show?", "Name everything in the picture.",
    ),
    "follow.colour": ("What colour is it?", "And what colour is it?", "Which colour does it have?"),
    "follow.size": ("What size is it?", "Is it large or small?", "And how big is it?"),
    "follow.position": ("Where is it?", "And where is it?", "In which place is it?"),
    "follow.shape": ("What shape is it?", "And what shape is it?", "Which shape is it?"),
}  # fmt: skip

_SIDES: dict[str, tuple[tuple[int, int], tuple[str, ...]]] = {  # sign of (row, column) of the thing minus the other
    "left": ((0, -1), ("left of", "to the left of")),
    "right": ((0, 1), ("right of", "to the right of")),
    "above": ((-1, 0), ("above",)),
    "below": ((1, 0), ("below", "under")),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """`form` names the template family, e.g. "count.some"; `accepted` lists further right answers besides `answer`.

    `subject` is the figure the question is about, where there is one: the "it" of a follow-up. `thought` is what leads
    from the picture to the answer, where that takes more than one look at one place.
    """

    kind: Kind
    form: str
    text: str
    answer: str
    accepted: tuple[str, ...] = ()
    subject: Figure | None = None
    thought: str = ""


def ask(scene: Scene, kind: Kind, rng: np.random.Generator) -> Question | None:
    """A question of that kind, or None where the scene has none (no two figures to compare, no label to read)."""
    makers = _MAKERS[kind]
    for idx in rng.permutation(len(makers)):
        question = makers[idx](scene, rng)
        if question is not None:
            return question
    return None


def kinds_of(scene: Scene) -> tuple[Kind, ...]:
    """Kinds worth asking about such a scene; `ask` may still find none for this one."""
    if scene.kind == "chart":
        return ("chart",)
    if scene.kind == "empty":
        return ("count", "presence")
    figures: tuple[Kind, ...] = ("shape", "colour", "count", "position", "relation", "size", "presence")
    if scene.label is None:
        return figures
    read: Kind = "digit" if scene.label.is_number else "word"
    return (read, read, "colour", "position", "presence", *(("shape", "size") if scene.figures else ()))


def describe(scene: Scene, rng: np.random.Generator) -> Question:
    """The request for a description, answered by the caption."""
    return _question(rng, "caption.all", caption(scene))


def follow_up(question: Question, rng: np.random.Generator) -> Question | None:
    """A question about the "it" of the question before, not answered in it already; None where there is none."""
    figure = question.subject
    if figure is None:
        return None
    answers: dict[Kind, tuple[str, str, tuple[str, ...]]] = {
        "colour": (figure.colour, f"{figure.colour.capitalize()}.", ()),
        "size": (figure.size, f"{figure.size.capitalize()}.", _SIZE_WORDS[figure.size]),
        "position": (figure.place, f"{figure.place.capitalize()}.", _place_words(figure.place)),
        "shape": (figure.shape, f"{articled(figure.shape).capitalize()}.", ()),
    }
    said = f"{question.text} {question.answer}".lower()
    kinds = [kind for kind, (word, *_) in answers.items() if word not in said and kind != question.kind]
    if not kinds:
        return None
    kind = kinds[int(rng.integers(len(kinds)))]
    _, answer, accepted = answers[kind]
    form = f"follow.{kind}"
    text = vary(one_of(rng, _PHRASINGS[form]), rng)
    return Question(kind=kind, form=form, text=text, answer=answer, accepted=accepted, subject=figure)


def _question(
    rng: np.random.Generator,
    form: str,
    answer: str,
    accepted: tuple[str, ...] = (),
    subject: Figure | None = None,
    thought: str = "",
    **slots: str,
) -> Question:
    kind = cast(Kind, form.partition(".")[0])
    text = vary(one_of(rng, _PHRASINGS[form]).format(**slots), rng)
    return Question(kind=kind, form=form, text=text, answer=answer, accepted=accepted, subject=subject, thought=thought)


def own_names(scene: Scene, figure: Figure) -> list[str]:
    """Names that fit this figure and no other of the scene: "the red circle", "the circle"."""
    alike = [f for f in scene.figures if f.shape == figure.shape]
    names = [f"the {figure.colour} {figure.shape}"] if [f.colour for f in alike].count(figure.colour) == 1 else []
    return [*names, f"the {figure.shape}"] if len(alike) == 1 else names


def _named(scene: Scene, rng: np.random.Generator) -> tuple[Figure, str] | None:
    """A figure that has a name of its own, and one of its names."""
    options = [(figure, names) for figure in scene.figures if (names := own_names(scene, figure))]
    if not options:
        return None
    figure, names = options[int(rng.integers(len(options)))]
    return figure, one_of(rng, names)


def _place_words(place: str) -> tuple[str, ...]:
    if place == "centre":
        return ("middle", "center", "in the centre", "in the middle")
    first, second = place.split()
    short = {"top middle": ("top",), "bottom middle": ("bottom",), "middle left": ("left",), "middle right": ("right",)}
    return (f"at the {place}", f"{second} {first}", *short.get(place, ()))


_SIZE_WORDS = {"large": ("big", "it is large"), "small": ("little", "it is small")}


def _shape_at(scene: Scene, rng: np.random.Generator) -> Question | None:
    if not scene.figures:
        return None
    figure = scene.figures[int(rng.integers(len(scene.figures)))]
    answer = f"{articled(figure.shape).capitalize()}."
    return _question(rng, "shape.at", answer, (f"{figure.colour} {figure.shape}",), figure, at=at_place(figure.place))


def _shape_of_colour(scene: Scene, rng: np.random.Generator) -> Question | None:
    colours = [figure.colour for figure in scene.figures]
    only = [figure for figure in scene.figures if colours.count(figure.colour) == 1]
    if not only or scene.label:  # the label has a colour as well
        return None
    figure = only[int(rng.integers(len(only)))]
    answer = f"{articled(figure.shape).capitalize()}."
    accepted, thought = (f"{figure.colour} {figure.shape}",), look_for(scene, (figure.colour, figure))
    return _question(rng, "shape.colour", answer, accepted, figure, thought, colour=figure.colour)


def _colour_at(scene: Scene, rng: np.random.Generator) -> Question | None:
    if not scene.figures:
        return None
    figure = scene.figures[int(rng.integers(len(scene.figures)))]
    noun = one_of(rng, ("shape", "object", figure.shape))
    answer = f"{figure.colour.capitalize()}."
    return _question(rng, "colour.at", answer, (), figure, noun=noun, at=at_place(figure.place))


def _colour_of(scene: Scene, rng: np.random.Generator) -> Question | None:
    shapes = [figure.shape for figure in scene.figures]
    only = [figure for figure in scene.figures if shapes.count(figure.shape) == 1]
    if scene.label and (not only or rng.random() < 0.6):
        noun = one_of(rng, ("number", "text") if scene.label.is_number else ("word", "text"))
        thought = look_for(scene, (noun, scene.label))
        return _question(rng, "colour.ref", f"{scene.label.colour.capitalize()}.", thought=thought, ref=f"the {noun}")
    if not only:
        return None
    figure = only[int(rng.integers(len(only)))]
    answer, thought = f"{figure.colour.capitalize()}.", look_for(scene, (figure.shape, figure))
    return _question(rng, "colour.ref", answer, (), figure, thought, ref=f"the {figure.shape}")


def _count_all(scene: Scene, rng: np.random.Generator) -> Question | None:
    if scene.label:  # is a word an object? the picture does not say
        return None
    answer = f"{NUMBER_NAMES[len(scene.figures)].capitalize()}."
    return _question(rng, "count.all", answer, thought=count_of(scene))


def _count_some(scene: Scene, rng: np.random.Generator) -> Question | None:
    kinds = {plural(shape): shape for shape in SHAPES}
    if not scene.label:
        kinds |= {f"{colour} {one_of(rng, ('shapes', 'objects'))}": colour for colour in COLOURS}
    counts: dict[int, list[str]] = {}
    for what, kind in kinds.items():
        counts.setdefault(sum(kind in (f.shape, f.colour) for f in scene.figures), []).append(what)
    # The number is drawn first, larger ones twice as often: most shapes and colours occur once or not at all.
    numbers = [number for number in counts for _ in range(2 if number > 1 else 1)]
    number = numbers[int(rng.integers(len(numbers)))]
    accepted = ("none", "no", "there are none") if number == 0 else ()
    what = one_of(rng, counts[number])
    answer, thought = f"{NUMBER_NAMES[number].capitalize()}.", count_of(scene, kinds[what])
    return _question(rng, "count.some", answer, accepted, thought=thought, what=what)


def _position(scene: Scene, rng: np.random.Generator) -> Question | None:
    if scene.label and rng.random() < 0.5:
        noun = one_of(rng, ("number", "text") if scene.label.is_number else ("word", "text"))
        place = scene.label.place
        accepted = (at_place(place), f"{place} middle") if place != "middle" else ("centre", "in the middle")
        thought = look_for(scene, (noun, scene.label))
        return _question(rng, "position.ref", f"{place.capitalize()}.", accepted, thought=thought, ref=f"the {noun}")
    if (named := _named(scene, rng)) is None:
        return None
    figure, ref = named
    answer, thought = f"{figure.place.capitalize()}.", look_for(scene, (ref, figure))
    return _question(rng, "position.ref", answer, _place_words(figure.place), figure, thought, ref=ref)


def _lies(figure: Figure, side: str, other: Figure) -> bool:
    (row, column), _ = _SIDES[side]
    return (figure.row - other.row) * row > 0 or (figure.column - other.column) * column > 0


def _relation_is(scene: Scene, rng: np.random.Generator) -> Question | None:
    """Yes and no are equally likely; "no" is asked only where the opposite holds, never for things on one line."""
    first, second = _named(scene, rng), _named(scene, rng)
    if first is None or second is None or first[0] == second[0]:
        return None
    opposite = {"left": "right", "right": "left", "above": "below", "below": "above"}
    wanted = bool(rng.integers(2))
    sides = [side for side in _SIDES if _lies(first[0], side if wanted else opposite[side], second[0])]
    side = one_of(rng, _SIDES[one_of(rng, sides)][1])
    answer = "Yes." if wanted else "No."  # no subject: two things were named, "it" could be either
    thought = look_for(scene, first[::-1], second[::-1])
    return _question(rng, "relation.is", answer, thought=thought, ref=first[1], side=side, other=second[1])


def _relation_what(scene: Scene, rng: np.random.Generator) -> Question | None:
    if (named := _named(scene, rng)) is None or scene.label:
        return None
    other, ref = named
    by_side = {side: [f for f in scene.figures if f != other and _lies(f, side, other)] for side in _SIDES}
    sides = [side for side, found in by_side.items() if len(found) == 1]
    if not sides:
        return None
    side = one_of(rng, sides)
    (figure,) = by_side[side]
    name = f"{figure.colour} {figure.shape}"
    accepted = (figure.shape, f"{figure.size} {name}")
    answer = f"{articled(name).capitalize()}."
    thought = look_for(scene, (ref, other))
    side = one_of(rng, _SIDES[side][1])
    return _question(rng, "relation.what", answer, accepted, figure, thought, side=side, other=ref)


def _size_of(scene: Scene, rng: np.random.Generator) -> Question | None:
    if (named := _named(scene, rng)) is None:
        return None
    figure, ref = named
    answer, thought = f"{figure.size.capitalize()}.", look_for(scene, (ref, figure))
    return _question(rng, "size.ref", answer, _SIZE_WORDS[figure.size], figure, thought, ref=ref)


def _size_compared(scene: Scene, rng: np.random.Generator) -> Question | None:
    first, second = _named(scene, rng), _named(scene, rng)
    if first is None or second is None or first[0].size == second[0].size:
        return None
    form = one_of(rng, ("size.larger", "size.smaller"))
    figure, ref = first if (first[0].size == "large") == (form == "size.larger") else second
    accepted = [f"{figure.colour} {figure.shape}"]
    accepted += [figure.shape] if first[0].shape != second[0].shape else []
    accepted += [figure.colour] if first[0].colour != second[0].colour else []
    answer, thought = f"{ref.capitalize()}.", look_for(scene, first[::-1], second[::-1])
    return _question(rng, form, answer, tuple(accepted), figure, thought, ref=first[1], other=second[1])


def _presence(scene: Scene, rng: np.random.Generator) -> Question | None:
    """Is there such a thing? Half of the "no"s name a shape and a colour that are there, though not together."""
    if scene.label and rng.random() < 0.3:
        what = one_of(rng, ("number", "word"))
        is_there = (what == "number") == scene.label.is_number
        thought = look_for(scene, (what, scene.label if is_there else None))
        return _question(rng, "presence.is", "Yes." if is_there else "No.", thought=thought, what=articled(what))
    there = {(f.colour, f.shape) for f in scene.figures}
    shapes = {f.shape for f in scene.figures}
    wanted = bool(rng.integers(2)) and bool(there)
    if rng.random() < 0.4:  # by shape alone
        options = [shape for shape in SHAPES if (shape in shapes) == wanted]
    elif wanted:
        options = [f"{colour} {shape}" for colour, shape in sorted(there)]
    else:
        near = [(f.colour, g.shape) for f in scene.figures for g in scene.figures if (f.colour, g.shape) not in there]
        anywhere = [(colour, shape) for colour in COLOURS for shape in SHAPES if (colour, shape) not in there]
        options = [f"{colour} {shape}" for colour, shape in (near if near and rng.random() < 0.5 else anywhere)]
    name = one_of(rng, options)
    named = [figure for figure in scene.figures if name in (figure.shape, f"{figure.colour} {figure.shape}")]
    thought = look_for(scene, (name, named[0] if named else None))
    return _question(rng, "presence.is", "Yes." if wanted else "No.", thought=thought, what=articled(name))


def _read(scene: Scene, rng: np.random.Generator) -> Question | None:
    if scene.label is None:
        return None
    text, form = scene.label.text, "digit.read" if scene.label.is_number else "word.read"
    return _question(rng, form, f"It says {text}.", (text, f"the {'number' if text.isdigit() else 'word'} {text}"))


def _chart_extreme(scene: Scene, rng: np.random.Generator) -> Question | None:
    heights = [bar.height for bar in scene.bars]
    options = [(form, mark) for form, mark in (("tallest", max(heights)), ("shortest", min(heights)))
               if heights.count(mark) == 1]  # fmt: skip
    if not options:
        return None
    form, mark = options[int(rng.integers(len(options)))]
    colour = scene.bars[heights.index(mark)].colour
    return _question(rng, f"chart.{form}", f"{colour.capitalize()}.", (f"the {colour} bar",), thought=caption(scene))


def _chart_count(scene: Scene, rng: np.random.Generator) -> Question | None:
    return _question(rng, "chart.count", f"{NUMBER_NAMES[len(scene.bars)].capitalize()}.", thought=caption(scene))


def _chart_value(scene: Scene, rng: np.random.Generator) -> Question | None:
    bar = scene.bars[int(rng.integers(len(scene.bars)))]
    answer = f"{NUMBER_NAMES[bar.height].capitalize()}."
    return _question(rng, "chart.value", answer, thought=caption(scene), colour=bar.colour)


def _chart_compare(scene: Scene, rng: np.random.Generator) -> Question | None:
    first, second = (scene.bars[int(idx)] for idx in rng.permutation(len(scene.bars))[:2])
    if first.height == second.height:
        return None
    side = one_of(rng, ("taller", "shorter"))
    is_so = (first.height > second.height) == (side == "taller")
    answer, thought = "Yes." if is_so else "No.", caption(scene)
    return _question(rng, "chart.compare", answer, thought=thought, colour=first.colour, side=side, other=second.colour)


def _chart_end(scene: Scene, rng: np.random.Generator) -> Question | None:
    end = one_of(rng, ("first", "last", "left", "right"))
    bar = scene.bars[0 if end in ("first", "left") else -1]
    answer, accepted = f"{bar.colour.capitalize()}.", (f"the {bar.colour} bar",)
    return _question(rng, "chart.end", answer, accepted, thought=caption(scene), end=end)


_Maker = Callable[[Scene, np.random.Generator], Question | None]
_MAKERS: dict[Kind, tuple[_Maker, ...]] = {
    "shape": (_shape_at, _shape_of_colour),
    "colour": (_colour_at, _colour_of),
    "count": (_count_all, _count_some, _count_some),
    "position": (_position,),
    "relation": (_relation_is, _relation_what),
    "size": (_size_of, _size_compared),
    "presence": (_presence,),
    "digit": (_read,),
    "word": (_read,),
    "chart": (_chart_extreme, _chart_count, _chart_value, _chart_compare, _chart_end),
    "caption": (describe,),
}
