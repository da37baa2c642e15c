"""Marks: is a reply right, how often, how sure is that, and what would guessing have given."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from workbench.training.data.exam import ExamItem
from workbench.training.data.phrasing import NUMBER_NAMES, plain_words

__all__ = ["BlindGuesser", "Mark", "ScoreTable", "is_right", "normalise_answer", "score", "wilson_interval"]

_NUMBER_OF_NAME = {name: str(number) for number, name in enumerate(NUMBER_NAMES)}
_ARTICLES = {"a", "an", "the"}
_SAME_SPELLING = {"color": "colour", "colors": "colours", "center": "centre", "gray": "grey"}
_WORD = re.compile(r"[a-z0-9]+(?:[.,'/-][a-z0-9]+)*")  # "27,648", "1.56" and "don't" are one word each


def normalise_answer(text: str) -> str:
    """What counts of an answer: its words in lower case, without articles and marks, small numbers as digits."""
    words = (_SAME_SPELLING.get(word, word) for word in _WORD.findall(text.lower().replace("’", "'")))
    return " ".join(_NUMBER_OF_NAME.get(word, word) for word in words if word not in _ARTICLES)


def is_right(item: ExamItem, reply: str) -> bool:
    """True where the whole reply is the answer or an accepted one; a right word inside another reply is not enough."""
    return normalise_answer(reply) in {normalise_answer(text) for text in (item.answer, *item.accepted)}


def wilson_interval(num_right: int, num: int, z: float = 1.959964) -> tuple[float, float]:
    """Confidence interval of a share, by default of 95 %: right for shares near 0 and 1 as well, where others are not.

    Source: E. B. Wilson, Journal of the American Statistical Association 22 (1927), 209-212.
    """
    if num == 0:
        return 0.0, 1.0
    share = num_right / num
    scale = 1 + z * z / num
    middle = (share + z * z / (2 * num)) / scale
    half = z * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num)) / scale
    return max(0.0, middle - half), min(1.0, middle + half)


class BlindGuesser:
    """The best that can be done without the picture: the most frequent answer to the words of a question.

    Fitted on training questions. A question whose words were not seen often falls back to its form, then to its kind.
    Its accuracy on an exam is the chance level of that exam.
    """

    _MIN_SEEN = 20  # below it the most frequent answer to exactly these words is an accident

    def __init__(self, items: Iterable[ExamItem]) -> None:
        self._answers: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        for item in items:
            for key in self._keys(item):
                self._answers[key][item.answer] += 1

    def guess(self, item: ExamItem) -> str:
        """The answer; empty for a kind never seen."""
        for key in self._keys(item):
            seen = self._answers.get(key)
            if seen and (seen.total() >= self._MIN_SEEN or key[0] == "kind"):
                return seen.most_common(1)[0][0]
        return ""

    @staticmethod
    def _keys(item: ExamItem) -> tuple[tuple[str, str], ...]:
        return ("words", plain_words(item.text)), ("form", item.form), ("kind", item.kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """Accuracy of one kind of question; `low` and `high` bound it with 95 % confidence, `chance` is blind guessing."""

    kind: str
    num: int
    num_right: int
    low: float
    high: float
    chance: float | None

    @property
    def accuracy(self) -> float:
        return self.num_right / self.num if self.num else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreTable:
    """Marks by kind, in order of appearance, and the replies that were wrong as (item, reply)."""

    marks: tuple[Mark, ...]
    wrong: tuple[tuple[ExamItem, str], ...]

    def pooled(self, kinds: Iterable[str] | None = None) -> Mark:
        """One mark over several kinds (all by default). Raises KeyError for a kind that was not examined."""
        by_kind = {mark.kind: mark for mark in self.marks}
        chosen = [by_kind[kind] for kind in (by_kind if kinds is None else kinds)]
        chances = [(mark.chance, mark.num) for mark in chosen]
        total = sum(mark.num for mark in chosen)
        chance = sum(c * n for c, n in chances if c is not None) / total if total else None
        return _mark(
            "+".join(mark.kind for mark in chosen),
            total,
            sum(mark.num_right for mark in chosen),
            None if any(c is None for c, _ in chances) else chance,
        )

    def as_records(self) -> list[dict[str, object]]:
        return [{**asdict(mark), "accuracy": mark.accuracy} for mark in self.marks]

    def __str__(self) -> str:
        lines = [f"{'kind':<12}{'right':>12}{'accuracy':>10}{'95 % interval':>18}{'chance':>9}"]
        for mark in self.marks:
            chance = "-" if mark.chance is None else f"{mark.chance:.1%}"
            span = f"{mark.low:.1%} .. {mark.high:.1%}"
            lines.append(
                f"{mark.kind:<12}{f'{mark.num_right} / {mark.num}':>12}{mark.accuracy:>10.1%}{span:>18}{chance:>9}"
            )
        return "\n".join(lines)


def score(items: Sequence[ExamItem], replies: Sequence[str], guesser: BlindGuesser | None = None) -> ScoreTable:
    """Marks of `replies`, one for each item in the same order. Raises ValueError where their numbers differ."""
    if len(items) != len(replies):
        raise ValueError(f"{len(replies)} replies to {len(items)} questions")
    by_kind: dict[str, list[tuple[ExamItem, str]]] = {}
    for item, reply in zip(items, replies, strict=True):
        by_kind.setdefault(item.kind, []).append((item, reply))
    marks = []
    for kind, pairs in by_kind.items():
        chance = None
        if guesser:
            chance = sum(is_right(item, guesser.guess(item)) for item, _ in pairs) / len(pairs)
        marks.append(_mark(kind, len(pairs), sum(is_right(item, reply) for item, reply in pairs), chance))
    wrong = [(item, reply) for item, reply in zip(items, replies, strict=True) if not is_right(item, reply)]
    return ScoreTable(marks=tuple(marks), wrong=tuple(wrong))


def _mark(kind: str, num: int, num_right: int, chance: float | None) -> Mark:
    low, high = wilson_interval(num_right, num)
    return Mark(kind=kind, num=num, num_right=num_right, low=low, high=high, chance=chance)
