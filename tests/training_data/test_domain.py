"""The facts: well formed, unambiguous, and their held-out phrasings never reach training."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from workbench.base import ConfigError
from workbench.training.data.domain import Fact, ask_fact, read_facts
from workbench.training.data.phrasing import plain_words, reword, vary

GOOD = """
[[fact]]
id = "rank"
term = "a rank"
answer = "A rank is one process."
accept = ["one process"]
ask = ["Is a rank a process?", "What is a RANK?"]
"""


def test_there_are_enough_facts_and_phrasings(facts: tuple[Fact, ...]) -> None:
    assert 150 <= len(facts) <= 300
    assert min(len(fact.phrasings) for fact in facts) >= 6
    assert len({fact.answer for fact in facts}) == len(facts), "two facts share an answer"


def test_each_fact_keeps_back_a_tenth_and_at_least_one_phrasing(facts: tuple[Fact, ...]) -> None:
    for fact in facts:
        held_out, train = (fact.questions(is_held_out=side) for side in (True, False))
        assert len(held_out) == max(1, len(fact.phrasings) // 10)
        assert len(train) > len(held_out)


def test_no_phrasing_is_on_both_sides_or_of_two_facts(facts: tuple[Fact, ...]) -> None:
    seen = Counter(plain_words(phrasing.text) for fact in facts for phrasing in fact.phrasings)
    assert max(seen.values()) == 1


def test_training_never_asks_a_held_out_phrasing(facts: tuple[Fact, ...]) -> None:
    rng = np.random.default_rng(0)
    held_out = {plain_words(question) for fact in facts for question in fact.questions(is_held_out=True)}
    for fact in facts:
        for _ in range(60):
            assert plain_words(ask_fact(fact, rng)) not in held_out


def test_the_split_does_not_depend_on_the_order_of_phrasings(tmp_path: Path) -> None:
    sides = []
    for order in (1, -1):
        asks = [f"Is the rank number {n} a process?" for n in range(20)][::order]
        quoted = ", ".join(f'"{text}"' for text in asks)
        (tmp_path / "a.toml").write_text(f'[[fact]]\nid = "r"\nanswer = "Yes."\nask = [{quoted}]\n')
        (fact,) = read_facts(tmp_path)
        sides.append(set(fact.questions(is_held_out=True)))
    assert sides[0] == sides[1]
    assert len(sides[0]) == 2


def test_a_phrasing_written_for_the_fact_replaces_the_templated_one(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(GOOD)
    (fact,) = read_facts(tmp_path)
    by_words = {plain_words(p.text): p for p in fact.phrasings}
    assert by_words["what is a rank"].text == "What is a RANK?"
    assert not by_words["what is a rank"].is_templated
    assert by_words["define a rank"].is_templated


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('id = "rank"', 'name = "rank"', "unknown keys"),
        ('id = "rank"\n', "", "required"),
        ("answer", "answers", "unknown keys"),
        ("A rank is one process.", "A rank is one process", "final stop"),
        ("A rank is one process.", " ".join(["long"] * 31) + ".", "too long"),
        ('term = "a rank"\n', "", "too few phrasings"),
        ('["one process"]', '"one process"', "accept is a list"),
        ("[[fact]]", "[[facts]]", "not a list of facts"),
        ("[[fact]]", "[[fact", "cannot be read"),
        ('ask = ["Is', 'ask = [1, "Is', "ask is a list"),
    ],
)
def test_a_malformed_file_is_refused_by_name(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    (tmp_path / "a.toml").write_text(GOOD.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message) as caught:
        read_facts(tmp_path)
    assert "a.toml" in str(caught.value)


def test_a_question_with_two_answers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(GOOD)
    (tmp_path / "b.toml").write_text(GOOD.replace('id = "rank"', 'id = "other"'))
    with pytest.raises(ConfigError, match=r"phrasing stands twice.*'rank' and 'other'"):
        read_facts(tmp_path)
    (tmp_path / "b.toml").write_text(GOOD)
    with pytest.raises(ConfigError, match="id stands twice"):
        read_facts(tmp_path)


def test_a_folder_without_facts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no facts"):
        read_facts(tmp_path)


def test_typing_keeps_the_words_and_rewording_keeps_most_of_them() -> None:
    rng = np.random.default_rng(1)
    text = "What happens if a shard of the checkpoint is missing?"
    typed = {vary(text, rng) for _ in range(200)}
    assert len(typed) > 4
    assert all(plain_words(other).endswith(plain_words(text)) for other in typed)
    reworded = [reword(text, rng) for _ in range(300)]
    assert len(set(reworded)) > 10
    assert all(len(set(plain_words(r).split()) & {"shard", "checkpoint", "missing"}) >= 2 for r in reworded)
    assert "What if a shard of the checkpoint is missing?" in reworded


def test_abbreviations_and_i_keep_their_capitals() -> None:
    rng = np.random.default_rng(2)
    for text in ("MXFP4 is what?", "I do not know what a rank is.", "K3 has how many layers?"):
        first = text.split()[0]
        assert all(first in vary(text, rng).split() for _ in range(60))
