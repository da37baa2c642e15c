"""What a trained model can do: held-out questions answered greedily, with chance levels, controls and expert load.

Controls: the same questions with an empty picture, and with the picture of another question. A model that looks at the
picture falls to about chance on both; one that guesses from the words does not fall.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from workbench.base import CheckpointError
from workbench.loading import load_sharded_weights
from workbench.nn.model import Model
from workbench.parallel import RankContext, attach, build_stage, single_context
from workbench.placement import Layout
from workbench.serving.inputs import Tokenizer, read_tokenizer
from workbench.training.answers import answer_items
from workbench.training.balance import ExpertLoad, LoadMeter
from workbench.training.checkpointing import newest_state
from workbench.training.config import read_config
from workbench.training.data.domain import read_facts
from workbench.training.data.exam import (
    FACT_KIND,
    ExamItem,
    fact_exam,
    picture_exam,
    with_blank_pictures,
    with_shuffled_pictures,
)
from workbench.training.data.score import BlindGuesser, Mark, ScoreTable, score
from workbench.training.export import load_whole

__all__ = ["Evaluation", "ExportLoss", "compare_export", "evaluate_checkpoint", "evaluate_model"]

SCENE_KINDS, READING_KINDS = ("shape", "colour", "count", "position"), ("digit", "word")
NUM_TRAINING_QUESTIONS = 400  # of each kind, for the chance level


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Marks of one model on the held-out exam. `blank` and `shuffled` are the controls without the right picture."""

    model: str
    exam: ScoreTable
    blank: ScoreTable
    shuffled: ScoreTable
    loads: tuple[ExpertLoad, ...]
    seconds: float

    @property
    def groups(self) -> dict[str, Mark]:
        """The figures that are asked for: scene questions, reading, facts."""
        groups = {"scene": SCENE_KINDS, "reading": READING_KINDS, "facts": (FACT_KIND,)}
        return {name: self.exam.pooled(kinds) for name, kinds in groups.items()}

    @property
    def max_over_mean(self) -> float:
        """Load of the busiest expert of any layer over the mean of its layer."""
        return max((load.max_over_mean for load in self.loads), default=1.0)

    @property
    def num_dead(self) -> int:
        return sum(len(load.dead) for load in self.loads)

    def to_json(self) -> dict[str, object]:
        return {
            "model": self.model,
            "exam": self.exam.as_records(),
            "blank": self.blank.as_records(),
            "shuffled": self.shuffled.as_records(),
            "load": {load.layer: load.max_over_mean for load in self.loads},
            "dead_experts": self.num_dead,
            "seconds": self.seconds,
        }

    def render(self) -> str:
        lines = [f"{self.model}: held-out exam, greedy answers", str(self.exam), ""]
        for name, mark in self.groups.items():
            lines.append(
                f"{name:<12}{mark.num_right} / {mark.num}  {mark.accuracy:.1%}  ({mark.low:.1%} .. {mark.high:.1%})"
            )
        for name, table in (("blank", self.blank), ("shuffled", self.shuffled)):
            mark, chance = table.pooled(), self.exam.pooled([m.kind for m in table.marks]).chance
            against = "" if chance is None else f", chance {chance:.1%}"
            lines.append(f"{name:<12}{mark.num_right} / {mark.num}  {mark.accuracy:.1%}{against}")
        loads = "  ".join(f"{load.layer}: {load.max_over_mean:.2f}" for load in self.loads)
        lines.append(f"expert load max / mean by layer  {loads}; {self.num_dead} dead experts")
        for item, reply in self.exam.wrong[:8]:
            lines.append(f"  wrong: {item.text!r} -> {reply!r}, expected {item.answer!r}")
        return "\n".join(lines)


def evaluate_checkpoint(
    root: Path | str, *, per_kind: int = 100, num_facts: int | None = None, precision: str = "bf16"
) -> Evaluation:
    """Examine a checkpoint folder on this process alone; numbers as in `evaluate_model`.

    Raises as `load_sharded_weights` and `read_tokenizer`.
    """
    loaded = load_sharded_weights(root, precision=precision)
    try:
        tokenizer = read_tokenizer(root, loaded.spec)
        return evaluate_model(
            loaded.model, loaded.ctx, tokenizer, name=str(root), per_kind=per_kind, num_facts=num_facts
        )
    finally:
        loaded.ctx.close()


def evaluate_model(
    model: Model,
    ctx: RankContext,
    tokenizer: Tokenizer,
    *,
    name: str,
    per_kind: int = 100,
    num_facts: int | None = None,
) -> Evaluation:
    """Examine a whole model: `per_kind` questions of each kind of picture question and `num_facts` about facts, evenly
    out of all held-out phrasings (None: all of them)."""
    started = time.perf_counter()
    pictures = picture_exam(per_kind)
    items = [*pictures, *_spread(fact_exam(read_facts()), num_facts)]
    guesser = BlindGuesser(picture_exam(NUM_TRAINING_QUESTIONS, split="train"))
    meter = LoadMeter(model)
    try:
        exam = _answer(model, ctx, tokenizer, items, guesser)
        loads = meter.loads(ctx)
    finally:
        meter.close()
    return Evaluation(
        model=name,
        exam=exam,
        blank=_answer(model, ctx, tokenizer, with_blank_pictures(pictures), guesser),
        shuffled=_answer(model, ctx, tokenizer, with_shuffled_pictures(pictures), guesser),
        loads=loads,
        seconds=time.perf_counter() - started,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportLoss:
    """Right answers of the export and of the bf16 masters that it was made from, to the same questions."""

    num: int
    export_right: int
    masters_right: int

    @property
    def points_lost(self) -> float:
        """Percentage points; negative where the export is the better one."""
        return 100 * (self.masters_right - self.export_right) / self.num

    def to_json(self) -> dict[str, object]:
        return {"num": self.num, "export": self.export_right, "masters": self.masters_right, "lost": self.points_lost}

    def render(self) -> str:
        return (
            f"MXFP4 export {self.export_right} / {self.num} right, bf16 masters {self.masters_right} / {self.num}: "
            f"{self.points_lost:+.2f} points lost"
        )


def compare_export(out: Path | str, *, per_kind: int = 100, num_facts: int | None = None) -> ExportLoss:
    """The export `out/model` against the masters of the run in `out`, every weight in bf16 and nothing in MXFP4.

    Raises CheckpointError where the run has no sound state.
    """
    out = Path(out)
    config = read_config(out / "recipe.toml")
    spec, ctx = config.spec(), single_context()
    state = newest_state(out / "states", essence=config.essence, layout=None)
    if state is None:
        raise CheckpointError("no saved state to compare with", where=out)
    masters = build_stage(spec, Layout(), 0, precision="bf16")
    masters.to_empty(device=ctx.device)
    whole = load_whole(spec, state)
    with torch.no_grad():
        for name, parameter in masters.named_parameters():
            parameter.copy_(whole[name])
    attach(masters, ctx)
    items = [*picture_exam(per_kind), *_spread(fact_exam(read_facts()), num_facts)]
    tokenizer = read_tokenizer(out / "model", spec)
    exported = load_sharded_weights(out / "model", precision="bf16", device=ctx.device).model
    right = [_answer(model, ctx, tokenizer, items).pooled().num_right for model in (exported, masters)]
    return ExportLoss(num=len(items), export_right=right[0], masters_right=right[1])


def _spread(items: Sequence[ExamItem], number: int | None) -> list[ExamItem]:
    if number is None or number >= len(items):
        return list(items)
    return [items[i * len(items) // number] for i in range(number)]


def _answer(
    model: Model,
    ctx: RankContext,
    tokenizer: Tokenizer,
    items: Sequence[ExamItem],
    guesser: BlindGuesser | None = None,
) -> ScoreTable:
    return score(items, answer_items(model, ctx, tokenizer, items), guesser)
