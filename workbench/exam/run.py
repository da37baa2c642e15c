"""Examine a checkpoint folder: all questions are put to the model as it is loaded for serving, answered greedily."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from workbench.base import CheckpointError, ConfigError
from workbench.checkpoint import ORIGIN_NAME
from workbench.cluster import read_versions
from workbench.exam.masters import load_masters
from workbench.exam.paired import PairedMarks, compare_replies
from workbench.exam.record import CONTROLS, NUM_WRONG, TARGETS, Control, ExamReport, LayerLoad, WrongAnswer
from workbench.loading import load_sharded_weights
from workbench.nn.denormal import denormals_as_zero
from workbench.nn.model import Model
from workbench.parallel import RankContext
from workbench.serving.inputs import Tokenizer, read_tokenizer
from workbench.serving.open import thinks_first
from workbench.spec import read_json, read_spec
from workbench.training.answers import MAX_NEW_TOKENS, answer_items
from workbench.training.balance import LoadMeter
from workbench.training.data.domain import read_facts
from workbench.training.data.exam import (
    ExamItem,
    fact_exam,
    picture_exam,
    with_blank_pictures,
    with_shuffled_pictures,
)
from workbench.training.data.score import BlindGuesser, ScoreTable, score

__all__ = ["run_exam"]

ACTIVATIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NUM_TRAINING_QUESTIONS = 400  # of each kind, from which the blind guesser learns what is usual
WITHOUT_PICTURE = {"blank": with_blank_pictures, "shuffled": with_shuffled_pictures}


def run_exam(
    root: Path | str,
    *,
    per_kind: int = 100,
    num_facts: int | None = None,
    precision: str = "mxfp4",
    activations: str | None = None,
    controls: Sequence[Control] = CONTROLS,
    against: Path | str | None = None,
    max_new_tokens: int = MAX_NEW_TOKENS,
    device: str | None = None,
    say: Callable[[str], None] | None = None,
) -> ExamReport:
    """`per_kind` held-out questions of each kind about pictures, and `num_facts` about facts (None: every phrasing).

    `precision` is how the weights are held, as in `load_sharded_weights`, and `activations` what is computed in
    ("float32", "bfloat16"; None: as `precision` says). `against`: the folder of the training run that this checkpoint
    was exported from; its weights before rounding, in bf16, answer the same questions with the same activations. An
    answer, thoughts included, ends after `max_new_tokens`. `say` gets a line per round. One process does it all. Raises
    as `load_sharded_weights`, `read_tokenizer` and
    `load_masters` do, ConfigError for a model that takes no pictures, and CheckpointError where `against` has gone on
    training since the export.
    """
    began, root, tell = time.perf_counter(), Path(root), say or (lambda line: None)
    spec = read_spec(root)
    if spec.vision is None or spec.image is None:
        raise ConfigError("the exam is about pictures, and this model takes none", where=root)
    tokenizer = read_tokenizer(root, spec)  # before the weights, which may take an hour
    dtype = None if activations is None else ACTIVATIONS[activations]
    loaded = load_sharded_weights(root, precision=precision, dtype=dtype, device=device)
    with denormals_as_zero():
        try:
            masters = None
            if against is not None:  # before the questions, which may take an hour
                masters, step = load_masters(against, loaded.spec, loaded.ctx, dtype=loaded.model.dtype)
                _check_same_step(root, Path(against), step)
            pictures = picture_exam(per_kind)
            items = [*pictures, *_spread(fact_exam(read_facts()), num_facts)]
            guesser = BlindGuesser(picture_exam(NUM_TRAINING_QUESTIONS, split="train"))
            asker = _Asker(loaded.ctx, tokenizer, tell, thinks_first(root), max_new_tokens)
            meter = LoadMeter(loaded.model)
            try:
                replies = asker.ask(loaded.model, items, "held-out questions")
                loads = tuple(LayerLoad(layer=x.layer, counts=x.counts) for x in meter.loads(loaded.ctx))
            finally:
                meter.close()
            exam = score(items, replies, guesser)
            blind = {name: WITHOUT_PICTURE[name](pictures) for name in controls}
            without: dict[str, ScoreTable] = {
                name: score(others, asker.ask(loaded.model, others, f"{name} pictures"), guesser)
                for name, others in blind.items()
            }
            paired: tuple[PairedMarks, ...] = ()
            if masters is not None:
                paired = _pair(items, replies, asker.ask(masters, items, "held-out questions, weights before rounding"))
        finally:
            loaded.ctx.close()
    return ExamReport(
        model=str(root),
        exam=ScoreTable(marks=exam.marks, wrong=()),
        controls=without,
        loads=loads,
        wrong=_examples(exam),
        paired=paired,
        settings=_settings(precision, loaded.model, asker),
        seconds=time.perf_counter() - began,
    )


class _Asker:
    """Puts questions to models, says how long that took and counts the answers."""

    def __init__(
        self, ctx: RankContext, tokenizer: Tokenizer, tell: Callable[[str], None], thinking: bool, max_new_tokens: int
    ) -> None:
        self.ctx, self.tokenizer, self.tell = ctx, tokenizer, tell
        self.thinking, self.max_new_tokens = thinking, max_new_tokens
        self.num_answers, self.seconds = 0, 0.0

    def ask(self, model: Model, items: Sequence[ExamItem], what: str) -> list[str]:
        began = time.perf_counter()
        replies = answer_items(
            model, self.ctx, self.tokenizer, items, thinking=self.thinking, max_new_tokens=self.max_new_tokens
        )
        seconds = time.perf_counter() - began
        self.num_answers, self.seconds = self.num_answers + len(items), self.seconds + seconds
        self.tell(f"{len(items):,} {what}: {seconds:.0f} s")
        return replies


def _spread(items: Sequence[ExamItem], number: int | None) -> list[ExamItem]:
    """That many of the items, evenly out of all."""
    if number is None or number >= len(items):
        return list(items)
    return [items[i * len(items) // number] for i in range(number)]


def _pair(items: Sequence[ExamItem], replies: Sequence[str], others: Sequence[str]) -> tuple[PairedMarks, ...]:
    """Over all kinds first, then by target."""
    asked = {item.kind for item in items}
    groups = [("all kinds", tuple(sorted(asked))), *((target.name, target.kinds) for target in TARGETS)]
    return tuple(
        compare_replies(items, replies, others, kinds, name=name) for name, kinds in groups if asked & set(kinds)
    )


def _examples(exam: ScoreTable) -> tuple[WrongAnswer, ...]:
    step = max(1, -(-len(exam.wrong) // NUM_WRONG))
    return tuple(
        WrongAnswer(kind=item.kind, question=item.text, reply=reply, expected=item.answer)
        for item, reply in exam.wrong[::step]
    )


def _check_same_step(root: Path, run: Path, step: int) -> None:
    origin = root / ORIGIN_NAME
    exported = read_json(origin).get("steps") if origin.is_file() else None
    if exported != step:
        raise CheckpointError(
            "the run's last state is not the one this checkpoint was exported from",
            where=run,
            found=f"step {step}",
            expected=f"step {exported}",
            next_step="Export the run again, or give the run that made this checkpoint",
        )


def _settings(precision: str, model: Model, asker: _Asker) -> dict[str, object]:
    versions = read_versions()
    return {
        "precision": precision,
        "thinking": asker.thinking,
        "max_new_tokens": asker.max_new_tokens,
        "activations": str(model.dtype).removeprefix("torch."),
        "device": str(asker.ctx.device),
        "answers": asker.num_answers,
        "answers_per_s": round(asker.num_answers / asker.seconds, 1) if asker.seconds else 0.0,
        "torch": dict(versions.packages).get("torch"),
        "commit": versions.git_commit,
        "taken_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
