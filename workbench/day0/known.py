"""Questions whose right answers are known: held-out scenes and phrasings, for a model that was trained on the others.

Which model that is, `exam.is_trained_here` reads from its own folder. Others are asked nothing of this.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from PIL import Image

from workbench.base import Table, WorkbenchError
from workbench.day0.gates import GateBook
from workbench.report import Picture, SampleAnswer, Section
from workbench.serving import Answer, MultimodalInferenceService
from workbench.training.answers import MAX_NEW_TOKENS
from workbench.training.data.domain import read_facts
from workbench.training.data.exam import ExamItem, fact_exam, picture_exam, with_blank_pictures
from workbench.training.data.questions import Kind
from workbench.training.data.scenes import scene_image
from workbench.training.data.score import BlindGuesser, is_right

__all__ = ["known_questions", "measure_known_answers"]

PICTURE_KINDS: tuple[Kind, ...] = ("shape", "colour", "count", "position", "digit", "word")
PER_KIND, NUM_FACTS = 3, 6
SEED = 1  # other scenes than those of `workbench exam`
NUM_TRAINING_QUESTIONS = 200  # of each kind, for the chance level
NUM_PARALLEL = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """One question, what came of it, and whether that was right."""

    item: ExamItem
    answer: Answer | None
    reason: str = ""

    @property
    def reply(self) -> str:
        return self.answer.text if self.answer else f"({self.reason})"

    @property
    def is_right(self) -> bool:
        return self.answer is not None and is_right(self.item, self.answer.text)


def known_questions() -> tuple[ExamItem, ...]:
    """The same ones every time: some of each kind about unseen scenes, and facts in phrasings not trained on."""
    facts = fact_exam(read_facts())
    return (
        *picture_exam(PER_KIND, seed=SEED, kinds=PICTURE_KINDS),
        *(facts[(2 * i + 1) * len(facts) // (2 * NUM_FACTS)] for i in range(NUM_FACTS)),
    )


def measure_known_answers(
    gates: GateBook,
    sections: list[Section],
    answers: list[SampleAnswer],
    service: MultimodalInferenceService,
    *,
    say: Callable[[str], None],
    blanked: Callable[[Sequence[ExamItem]], Sequence[ExamItem]] = with_blank_pictures,
) -> None:
    """Ask all of them, those about pictures once more with an empty picture, and enter both gates about it.

    `blanked` makes the questions of the second round.
    """
    items = known_questions()
    asked = _ask_all(service, items)
    blank = _ask_all(service, blanked(items))
    num_right = sum(one.is_right for one in asked)
    wrong = [f"{one.item.text!r} got {one.reply!r}, expected {one.item.answer!r}" for one in asked if not one.is_right]
    evidence = f"{num_right} of {len(asked)} right ({_by_kind(asked)})"
    gates.measured("answers.correct", num_right / len(asked), evidence="; ".join([evidence, *wrong]))
    num_guessed = sum(one.is_right for one in blank)
    guesser = BlindGuesser(picture_exam(NUM_TRAINING_QUESTIONS, split="train", kinds=PICTURE_KINDS))
    chance = sum(is_right(one.item, guesser.guess(one.item)) for one in blank)
    gates.measured(
        "answers.blank",
        num_guessed / len(blank),
        evidence=f"{num_guessed} of {len(blank)} right with an empty picture; the best guess without one: {chance}",
    )
    sections.append(_section(asked, blank))
    answers += [_sample(one) for one in asked if one.answer is not None]
    say(f"held-out questions: {evidence}; with an empty picture {num_guessed} of {len(blank)}")


def _ask_all(service: MultimodalInferenceService, items: Sequence[ExamItem]) -> list[Known]:
    with ThreadPoolExecutor(NUM_PARALLEL) as pool:
        return list(pool.map(lambda item: _ask(service, item), items))


def _ask(service: MultimodalInferenceService, item: ExamItem) -> Known:
    try:
        pictures = [_png(scene_image(item.scene))] if item.scene else None
        answer = service.infer(item.text, pictures, max_tokens=MAX_NEW_TOKENS, temperature=0.0)
    except WorkbenchError as error:
        return Known(item=item, answer=None, reason=f"{type(error).__name__}: {error}")
    return Known(item=item, answer=answer)


def _by_kind(asked: Sequence[Known]) -> str:
    kinds = dict.fromkeys(one.item.kind for one in asked)
    marks = {kind: [one.is_right for one in asked if one.item.kind == kind] for kind in kinds}
    return ", ".join(f"{kind} {sum(mark)}/{len(mark)}" for kind, mark in marks.items())


def _section(asked: Sequence[Known], blank: Sequence[Known]) -> Section:
    without = iter(blank)  # in the order of the questions that have a picture
    rows = tuple(
        (
            one.item.kind,
            one.item.text,
            one.item.answer,
            one.reply,
            "yes" if one.is_right else "NO",
            next(without).reply if one.item.scene else None,
        )
        for one in asked
    )
    columns = ("kind", "question", "expected", "answer", "right", "answer to an empty picture")
    return Section(
        title="Held-out questions",
        text="Scenes and phrasings that were never trained on. A reply is right only as a whole.",
        tables=(Table(columns=columns, rows=rows),),
    )


def _sample(known: Known) -> SampleAnswer:
    assert known.answer is not None
    pictures = (Picture.thumbnail(scene_image(known.item.scene)),) if known.item.scene else ()
    return SampleAnswer(
        question=known.item.text,
        answer=known.answer.text,
        expected=known.item.answer,
        is_right=known.is_right,
        pictures=pictures,
        num_prompt_tokens=known.answer.usage.prompt_tokens,
        num_tokens=known.answer.usage.completion_tokens,
        note=f"{known.item.kind}, held out" + (f"; thought: {known.answer.thinking}" if known.answer.thinking else ""),
    )


def _png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()
