"""Chats to train on: pictures with descriptions and questions, facts, and the mixtures of both that people type.

A chat is messages of the serving side and the scenes behind their pictures. Questions and answers alone leave a small
model blind: it learns the answers' frequencies first and stays there. Half of the picture chats therefore hold a dense
description, in which every attribute of every object is a token to be predicted from the picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np

from workbench.serving.inputs import ImagePart, Message, TextPart
from workbench.training.data.domain import Fact, ask_fact
from workbench.training.data.lists import ask_list
from workbench.training.data.looking import caption
from workbench.training.data.phrasing import one_of
from workbench.training.data.questions import Question, ask, describe, follow_up, kinds_of
from workbench.training.data.scenes import Scene, make_scene

__all__ = ["CHAT_KINDS", "NO_PICTURE_ANSWER", "Chat", "ChatKind", "Mixture", "make_chat", "picture_message"]

ChatKind = Literal["picture", "two_pictures", "told", "facts", "mixed", "no_picture"]
CHAT_KINDS: tuple[ChatKind, ...] = get_args(ChatKind)
NO_PICTURE_ANSWER = "I see no picture. Please add one."
_NO_PICTURE_FACT = "no-picture"  # its answer is wrong where there is a picture
_TOLD = ("There is a picture. {caption} {question}", "Read this: {caption} {question}", "{caption} {question}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """Shares of the kinds of chat, which sum to one, and how many of the picture chats hold a description, and a list.

    picture        one picture, described and asked about
    two_pictures   a second picture arrives later in the chat; questions are about the newest one
    told           the description stands in the question, there is no picture
    facts          one to three facts, no picture
    mixed          a picture and its question, and a fact
    no_picture     a question about a picture that is not there

    In `thinking_share` of the chats the assistant thinks before it answers; lists are asked for in the others only.
    """

    picture: float = 0.68
    two_pictures: float = 0.03
    told: float = 0.03
    facts: float = 0.22
    mixed: float = 0.03
    no_picture: float = 0.01
    description_share: float = 0.5
    list_share: float = 0.0
    thinking_share: float = 0.0

    def __post_init__(self) -> None:
        shares = [getattr(self, kind) for kind in CHAT_KINDS]
        parts = (self.description_share, self.list_share, self.thinking_share)
        if min(shares) < 0 or abs(sum(shares) - 1) > 1e-6 or not 0 <= min(parts) <= max(parts) <= 1:
            raise ValueError(f"shares {shares} do not sum to one, or one of {parts} is no share: {self}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """Messages in turns, user first; `scenes` are those of the ImageParts in order of appearance.

    `thinking` tells whether it is rendered with the channel of the assistant's thoughts, which its messages hold.
    """

    kind: ChatKind
    messages: tuple[Message, ...]
    scenes: tuple[Scene, ...] = ()
    thinking: bool = False


def make_chat(rng: np.random.Generator, facts: Sequence[Fact], mixture: Mixture) -> Chat:
    """A chat of the training side: scenes and phrasings that are held out do not occur."""
    shares = np.cumsum([getattr(mixture, kind) for kind in CHAT_KINDS])
    kind = CHAT_KINDS[min(int(np.searchsorted(shares, rng.random(), side="right")), len(CHAT_KINDS) - 1)]
    thinking = bool(mixture.thinking_share) and bool(rng.random() < mixture.thinking_share)
    if kind == "facts":
        turns = [_fact_turn(rng, facts) for _ in range(int(rng.integers(1, 4)))]
        return Chat(kind=kind, messages=_in_turns(turns), thinking=thinking)
    if kind == "no_picture":
        question = _some_question(make_scene(rng), rng)
        return Chat(kind=kind, messages=_in_turns([_Turn(question.text, NO_PICTURE_ANSWER)]), thinking=thinking)
    if kind == "told":
        scene = make_scene(rng)
        question = _some_question(scene, rng)
        text = one_of(rng, _TOLD).format(caption=caption(scene), question=question.text)
        turns = [_Turn(text, question.answer, question.thought)]
        return Chat(kind=kind, messages=_in_turns(turns), thinking=thinking)
    if kind == "mixed":
        scene, question = _asked_scene(rng)
        about_picture = int(rng.integers(2))  # turn of the question; its picture comes with it or earlier
        turns = [_fact_turn(rng, [fact for fact in facts if fact.fact_id != _NO_PICTURE_FACT])]
        turns.insert(about_picture, _asked(question))
        messages = _in_turns(turns, picture_at=[int(rng.integers(about_picture + 1))])
        return Chat(kind=kind, messages=messages, scenes=(scene,), thinking=thinking)
    if kind == "two_pictures":
        asked = [_asked_scene(rng) for _ in range(2)]
        messages = _in_turns([_asked(question) for _, question in asked], picture_at=[0, 1])
        return Chat(kind=kind, messages=messages, scenes=tuple(scene for scene, _ in asked), thinking=thinking)
    scene = make_scene(rng)
    has_description, has_list = rng.random() < mixture.description_share, rng.random() < mixture.list_share
    questions = _talk(
        scene, rng, has_description=has_description, has_list=has_list and not thinking, most=2 if thinking else 4
    )
    messages = _in_turns([_asked(q) for q in questions], picture_at=[0], picture_first=rng.random() < 0.85)
    return Chat(kind=kind, messages=messages, scenes=(scene,), thinking=thinking)


def picture_message(text: str, *, picture_first: bool = True) -> Message:
    """A user's message with one picture and a text."""
    parts = (ImagePart(), TextPart(text))
    return Message("user", parts if picture_first else parts[::-1])


def _talk(
    scene: Scene, rng: np.random.Generator, *, has_description: bool, has_list: bool, most: int
) -> list[Question]:
    """At most `most` questions about one picture: where each brings a long thought, later ones only copy it.

    The description comes first or last: answers cannot always be copied from it.
    """
    count = int(rng.integers(0, 3)) if has_description or has_list else int(rng.integers(1, most + 1))
    questions: list[Question] = []
    while len(questions) < count:
        last = questions[-1] if questions else None
        after = follow_up(last, rng) if last and not last.form.startswith("follow") and rng.random() < 0.25 else None
        questions.append(after or _some_question(scene, rng))
    for _ in range(2 if has_list else 0):
        listed = ask_list(scene, rng, unlike=questions[0].form if questions else "")
        questions[:0] = [listed] if listed else []
    if has_description or not questions:
        questions.insert(0 if rng.random() < 0.6 else len(questions), describe(scene, rng))
    return questions


def _some_question(scene: Scene, rng: np.random.Generator) -> Question:
    kinds = kinds_of(scene)
    while True:  # every scene has a kind of question that never fails
        question = ask(scene, kinds[int(rng.integers(len(kinds)))], rng)
        if question is not None:
            return question


def _asked_scene(rng: np.random.Generator) -> tuple[Scene, Question]:
    scene = make_scene(rng)
    return scene, _some_question(scene, rng)


class _Turn(NamedTuple):
    question: str
    answer: str
    thought: str = ""


def _asked(question: Question) -> _Turn:
    return _Turn(question.text, question.answer, question.thought)


def _fact_turn(rng: np.random.Generator, facts: Sequence[Fact]) -> _Turn:
    fact = facts[int(rng.integers(len(facts)))]
    return _Turn(ask_fact(fact, rng, facts), fact.answer)


def _in_turns(
    turns: Sequence[_Turn], *, picture_at: Sequence[int] = (), picture_first: bool = True
) -> tuple[Message, ...]:
    messages: list[Message] = []
    for idx, (text, answer, thought) in enumerate(turns):
        user = picture_message(text, picture_first=picture_first) if idx in picture_at else Message("user", text)
        messages += (user, Message("assistant", answer, thinking=thought))
    return tuple(messages)
