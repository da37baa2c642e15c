"""The exam: held-out questions about unseen pictures and in unseen phrasings, and controls without the picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from workbench.serving.inputs import Message
from workbench.training.data.chats import picture_message
from workbench.training.data.domain import Fact
from workbench.training.data.questions import KINDS, Kind, Question, ask
from workbench.training.data.scenes import Scene, SceneKind, Split, blank_scene, make_scene

__all__ = ["FACT_KIND", "ExamItem", "fact_exam", "picture_exam", "with_blank_pictures", "with_shuffled_pictures"]

FACT_KIND = "fact"
_SCENE_KINDS: dict[Kind, tuple[SceneKind, ...]] = {
    "digit": ("number",),
    "word": ("word",),
    "chart": ("chart",),
    "colour": ("figures", "figures", "number", "word"),
    "position": ("figures", "figures", "number", "word"),
    "caption": ("figures", "figures", "number", "word", "chart"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExamItem:
    """One question with the answers that count as right. `scene` is None for a question without a picture.

    `form` is the finer kind: the template family of a picture question, "templated" or "own words" for a fact.
    """

    kind: str
    form: str
    text: str
    answer: str
    accepted: tuple[str, ...]
    scene: Scene | None = None

    @property
    def messages(self) -> tuple[Message, ...]:
        """The chat to put before the model; the scene's picture belongs to its only ImagePart."""
        return (picture_message(self.text) if self.scene else Message("user", self.text),)


def picture_exam(
    num_per_kind: int, *, seed: int = 0, split: Split = "held_out", kinds: Sequence[Kind] = KINDS
) -> tuple[ExamItem, ...]:
    """`num_per_kind` questions of each kind about scenes of that split, none twice; depends on its arguments alone."""
    items: list[ExamItem] = []
    for kind in kinds:
        rng = np.random.default_rng((seed, KINDS.index(kind)))
        scene_kinds = _SCENE_KINDS.get(kind, ("figures",))
        seen: set[tuple[str, str]] = set()
        while len(seen) < num_per_kind:
            scene = make_scene(rng, split=split, kind=scene_kinds[int(rng.integers(len(scene_kinds)))])
            question = ask(scene, kind, rng)
            if question is None or (scene.content, question.form) in seen:
                continue
            seen.add((scene.content, question.form))
            items.append(_item(scene, question))
    return tuple(items)


def fact_exam(facts: Sequence[Fact]) -> tuple[ExamItem, ...]:
    """Every held-out phrasing of every fact, as it stands in the files."""
    return tuple(
        ExamItem(
            kind=FACT_KIND,
            form="templated" if phrasing.is_templated else "own words",
            text=phrasing.text,
            answer=fact.answer,
            accepted=fact.accepted,
        )
        for fact in facts
        for phrasing in fact.phrasings
        if phrasing.is_held_out
    )


def with_blank_pictures(items: Sequence[ExamItem]) -> tuple[ExamItem, ...]:
    """The same questions and answers with nothing to see: what is still right was guessed."""
    return tuple(replace(item, scene=blank_scene(item.scene)) for item in items if item.scene)


def with_shuffled_pictures(items: Sequence[ExamItem], *, seed: int = 0) -> tuple[ExamItem, ...]:
    """The same questions and answers, each with the picture of another question of its kind.

    The pictures of a kind change places in one ring, so that none stays where it was. Raises ValueError for a kind
    with a single picture question.
    """
    rng = np.random.default_rng(seed)
    shuffled: list[ExamItem] = []
    by_kind: dict[str, list[ExamItem]] = {}
    for item in items:
        if item.scene:
            by_kind.setdefault(item.kind, []).append(item)
    for kind, group in by_kind.items():
        if len(group) < 2:
            raise ValueError(f"one {kind} question alone has no other picture to take")
        ring = [group[idx] for idx in rng.permutation(len(group))]
        shuffled += [replace(a, scene=b.scene) for a, b in zip(ring, ring[1:] + ring[:1], strict=True)]
    return tuple(shuffled)


def _item(scene: Scene, question: Question) -> ExamItem:
    return ExamItem(
        kind=question.kind,
        form=question.form,
        text=question.text,
        answer=question.answer,
        accepted=question.accepted,
        scene=scene,
    )
