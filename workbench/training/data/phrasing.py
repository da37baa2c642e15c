"""Small words: number names, places in a sentence, and the surface variety of typed questions.

Two kinds of variety. `vary` changes how a question is typed and keeps every word. `reword` exchanges phrases that mean
the same and now and then loses a word, so that a model learns which words matter and copes with one it does not know.
"""

from __future__ import annotations

import re

import numpy as np

__all__ = ["NUMBER_NAMES", "articled", "at_place", "one_of", "plain_words", "plural", "reword", "vary"]

NUMBER_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_OPENERS = ("please tell me: ", "tell me, ", "hello, ", "hi. ", "quick question: ", "so, ", "ok, ")
_AMERICAN = (("colour", "color"), ("centre", "center"))

_SAME = (  # phrases that can stand for one another in a question
    ("how do i", "how can i", "how could i", "how should i"),
    ("what happens if", "what happens when", "what if"),
    ("can i", "may i", "could i", "am i able to"),
    ("do i need", "must i have", "is there a need for"),
    ("which command", "what command"),
    ("which part", "what part"),
    ("picture", "image"),
    ("pictures", "images"),
    ("large", "big"),
    ("k3", "kimi k3"),
    ("is called", "is named"),
    ("begin", "start"),
    ("fast", "quick"),
    ("find", "detect"),
    ("choose", "pick"),
    ("chosen", "picked"),
    ("need", "require"),
    ("several", "many", "multiple"),
    ("show", "display"),
    ("hold", "contain", "keep"),
    ("broken", "damaged"),
    ("a mistake", "an error"),
    ("why is", "for what reason is", "how come that"),
    ("device", "card"),
    ("stop", "end"),
    ("quantised", "quantized"),
    ("allowed", "permitted"),
    ("split", "divided"),
    ("compute", "calculate"),
    ("takes", "needs"),
)
_SAME_BY_PHRASE = {phrase: group for group in _SAME for phrase in group}
_PLURAL = re.compile(r"^([a-z]{3,}[^sui])s([?.!,]?)$")
_ANY_PHRASE = re.compile(r"\b(" + "|".join(sorted(map(re.escape, _SAME_BY_PHRASE), key=len, reverse=True)) + r")\b")
_FUNCTION_WORDS = frozenset(
    """
    a an the is are was be do does did has have had can could may must should will would what which who whom whose how
    why when where to of in on for from with at by as and it its this that there i you we my your me please any some
    """.split()  # noqa: SIM905 - a column of words
)
_STRAY_WORDS = ("really", "exactly", "now", "here", "just", "actually", "then", "usually", "today", "again", "please")


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
        text = one_of(rng, _OPENERS) + _lowered(text)
        text = text[0].upper() + text[1:] if rng.random() < 0.5 else text
    if rng.random() < 0.25:
        text = _lowered(text)
    if rng.random() < 0.2:
        text = text.rstrip("?.")
    return text


def reword(text: str, rng: np.random.Generator, stray: str = "") -> str:
    """The question in slightly other words: phrases exchanged, a word lost or added, plurals cut, or only key words.

    `stray` is a word from elsewhere that may be thrown in where enough of the question is left to outvote it.
    """

    def exchanged(match: re.Match[str]) -> str:
        return one_of(rng, _SAME_BY_PHRASE[match[0]]) if rng.random() < 0.4 else match[0]

    is_capital = text[0].isupper()
    text = _ANY_PHRASE.sub(exchanged, _lowered(text))
    words = text.split()
    if rng.random() < 0.15:
        words = [_PLURAL.sub(r"\1\2", word) for word in words]
    key_words = [word for word in words if word.lower().rstrip("?.!,") not in _FUNCTION_WORDS]
    if len(key_words) > 1 and rng.random() < 0.2:
        words = key_words
    elif len(words) > 4 and rng.random() < 0.3:
        place = int(rng.integers(1, len(words)))
        if rng.random() < 0.6:
            mark = words[place][-1] if words[place][-1] in "?.!" else ""
            words[place - 1] += mark if place == len(words) - 1 else ""
            del words[place]
        else:
            words.insert(place, one_of(rng, _STRAY_WORDS))
    if stray and len(key_words) > 2 and rng.random() < 0.3:
        place = int(rng.integers(len(words)))
        if rng.random() < 0.5 and place < len(words) - 1:
            words[place] = stray
        else:
            words.insert(place, stray)
    text = " ".join(words)
    return text[0].upper() + text[1:] if is_capital else text


def _lowered(text: str) -> str:
    """First letter small, unless the first word is an abbreviation or a lone "I"."""
    first = text.split(" ", 1)[0]
    keeps = first == "I" or sum(letter.isupper() for letter in first) > 1 or any(letter.isdigit() for letter in first)
    return text if keeps else text[0].lower() + text[1:]
