"""The text side: facts about the language of this project, each with many phrasings of its question.

Facts lie in `data/domain/*.toml`; the README there gives the form. What is held out is phrasings, not facts: a model
of this size cannot know what it was never told. Of each fact's phrasings, sorted by the SHA-256 of the fact's id and
their plain words, the first tenth (at least one) is never trained on.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from workbench.base import ConfigError
from workbench.training.data.phrasing import plain_words, reword, vary

__all__ = ["DOMAIN_ROOT", "Fact", "Phrasing", "ask_fact", "read_facts"]

DOMAIN_ROOT = Path(__file__).resolve().parents[3] / "data" / "domain"

_TERM_PHRASINGS = (
    "What {is} {term}?", "Explain {term}.", "What {does} {term} mean?", "Define {term}.", "Tell me about {term}.",
    "Can you explain {term}?", "What do you mean by {term}?", "I do not know what {term} {is}.", "Describe {term}.",
    "Do you know what {term} {is}?",
)  # fmt: skip
_KEYS = {"id", "term", "is_plural", "answer", "accept", "ask"}
_MIN_PHRASINGS, _MAX_ANSWER_WORDS = 6, 30
_HELD_OUT_ONE_IN = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Phrasing:
    text: str
    is_templated: bool  # made from the term rather than written for this fact
    is_held_out: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    fact_id: str
    topic: str  # the file it stands in
    answer: str
    accepted: tuple[str, ...]
    phrasings: tuple[Phrasing, ...]

    def questions(self, *, is_held_out: bool) -> tuple[str, ...]:
        return tuple(phrasing.text for phrasing in self.phrasings if phrasing.is_held_out == is_held_out)


def read_facts(root: Path | str = DOMAIN_ROOT) -> tuple[Fact, ...]:
    """All facts of a folder, in the order of files and lines.

    Raises ConfigError for a missing folder, an unreadable file, an unknown or missing key, an id or a phrasing that
    stands twice (the same question cannot have two answers), too few phrasings or an answer that is too long.
    """
    root = Path(root)
    paths = sorted(root.glob("*.toml"))
    if not paths:
        raise ConfigError("no facts", where=root, expected="a folder with .toml files")
    facts = [fact for path in paths for fact in _read_file(path)]
    _refuse_twice(root, "id", [(fact.fact_id, fact) for fact in facts])
    _refuse_twice(root, "phrasing", [(plain_words(p.text), fact) for fact in facts for p in fact.phrasings])
    return tuple(facts)


def ask_fact(fact: Fact, rng: np.random.Generator, facts: Sequence[Fact] = ()) -> str:
    """A training question for the fact, most often slightly reworded, never into a held-out phrasing.

    Stray words come from the questions of `facts`: the model is to weigh all words, not to jump at one.
    """
    text = _training_question(fact, rng)
    if rng.random() < 0.7:
        strays = _training_question(facts[int(rng.integers(len(facts)))], rng).rstrip("?.!").split() if facts else [""]
        other = reword(text, rng, strays[int(rng.integers(len(strays)))])
        held_out = {plain_words(question) for question in fact.questions(is_held_out=True)}
        text = text if plain_words(other) in held_out else other
    return vary(text, rng)


def _training_question(fact: Fact, rng: np.random.Generator) -> str:
    questions = fact.questions(is_held_out=False)
    return questions[int(rng.integers(len(questions)))]


def _read_file(path: Path) -> list[Fact]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"facts cannot be read: {error}", where=path) from None
    entries = content.pop("fact", None)
    if not isinstance(entries, list) or content:
        raise ConfigError("not a list of facts", where=path, found=sorted(content), expected="only [[fact]] tables")
    return [_parse_fact(path, entry) for entry in entries]


def _parse_fact(path: Path, entry: dict[str, object]) -> Fact:
    name = entry.get("id")
    where = f"{path}, fact {name!r}"
    unknown = sorted(set(entry) - _KEYS)
    if unknown:
        raise ConfigError("unknown keys", where=where, found=unknown, expected=f"among {sorted(_KEYS)}")
    answer, term = entry.get("answer"), entry.get("term", "")
    if not (isinstance(name, str) and name and isinstance(answer, str) and isinstance(term, str)):
        raise ConfigError("id, answer and term are texts, the first two required", where=where)
    if len(answer.split()) > _MAX_ANSWER_WORDS or not answer.endswith((".", "!")):
        raise ConfigError("answer is too long or has no final stop", where=where, found=answer)
    own, accepted = (_texts(where, key, entry.get(key, [])) for key in ("ask", "accept"))
    is_plural = entry.get("is_plural", False) is True
    templated = _about_term(term, is_plural) if term else ()
    # By plain words: a text written for the fact replaces a templated one that says the same.
    phrasings = {plain_words(text): (text, True) for text in templated} | {plain_words(t): (t, False) for t in own}
    if len(phrasings) < _MIN_PHRASINGS:
        raise ConfigError("too few phrasings", where=where, found=len(phrasings), expected=f"at least {_MIN_PHRASINGS}")
    held_out = _held_out(name, tuple(phrasings))
    return Fact(
        fact_id=name,
        topic=path.stem,
        answer=answer,
        accepted=accepted,
        phrasings=tuple(
            Phrasing(text=text, is_templated=is_templated, is_held_out=words in held_out)
            for words, (text, is_templated) in phrasings.items()
        ),
    )


def _about_term(term: str, is_plural: bool) -> tuple[str, ...]:
    words = {"is": "are", "does": "do"} if is_plural else {"is": "is", "does": "does"}
    return tuple(pattern.format(term=term, **words) for pattern in _TERM_PHRASINGS)


def _held_out(fact_id: str, plain_texts: Sequence[str]) -> set[str]:
    ranked = sorted(plain_texts, key=lambda text: hashlib.sha256(f"{fact_id}: {text}".encode()).digest())
    return set(ranked[: max(1, len(ranked) // _HELD_OUT_ONE_IN)])


def _texts(where: str, key: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        raise ConfigError(f"{key} is a list of texts", where=where, found=value)
    return tuple(value)


def _refuse_twice(root: Path, what: str, named: list[tuple[str, Fact]]) -> None:
    seen: dict[str, Fact] = {}
    for name, fact in named:
        if name in seen:
            raise ConfigError(
                f"{what} stands twice", where=root, found=f"{name!r} in {seen[name].fact_id!r} and {fact.fact_id!r}"
            )
        seen[name] = fact
