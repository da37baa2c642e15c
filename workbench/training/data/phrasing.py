"""Small words: number names, places in a sentence, and the surface variety of typed questions."""

from __future__ import annotations

import re

import numpy as np

__all__ = ["NUMBER_NAMES", "articled", "at_place", "one_of", "plain_words", "plural", "vary"]

NUMBER_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_OPENERS = ("please tell me: ", "tell me, ", "hello, ", "hi. ", "quick question: ", "so, ", "ok, ")
_AMERICAN = (("colour", "color"), ("centre", "center"))


def one_of(rng: np.random.Generator, choices: tuple[str, ...] | list[str]) -> str:
    return choices[int(rng.integers(len(choices)))]


def articled(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def plural(noun: str) -> str:
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"


def at_place(place: str) -> str:
    """Where a figure is, as it stands in a sentence: "at the top left", "in the centre"."""
    return f"in the {place}" if place in ("centre", "middle") else f"at the {place}"


def plain_words(text: str) -> str:
    """Lower-case words with single blanks: what two questions have in common that differ only in their typing."""
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def vary(text: str, rng: np.random.Generator) -> str:
    """The question as another person would type it: spelling, opener, capitals, final mark. The words stay."""
    if rng.random() < 0.25:
        for british, american in _AMERICAN:
            text = text.replace(british, american)
    if rng.random() < 0.1:
        text = one_of(rng, _OPENERS) + text[0].lower() + text[1:]
        text = text[0].upper() + text[1:] if rng.random() < 0.5 else text
    if rng.random() < 0.25:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.2:
        text = text.rstrip("?.")
    return text
