"""Exams and whole runs under other layouts: the same answers, the same curve, and an export that joins all ranks."""

from __future__ import annotations

import dataclasses
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "parallel"))

import step_tasks
from ranks import shared_ranks
from tiny_runs import give_tokenizer, tiny_config, tokenizer_folder

from workbench.checkpoint import audit
from workbench.placement import Layout
from workbench.training.checkpointing import find_states
from workbench.training.data.domain import read_facts
from workbench.training.data.exam import ExamItem, fact_exam, picture_exam
from workbench.training.export import export_run, load_whole
from workbench.training.metrics import read_metrics

pytestmark = pytest.mark.ranks

CONFIG = tiny_config()


def items() -> list[ExamItem]:
    """Seven, so that two replicas get four and three."""
    return [*picture_exam(1, kinds=("colour", "digit", "count", "position", "shape")), *fact_exam(read_facts())[:2]]


@cache
def replies_of_one_rank() -> list[str]:
    return step_tasks.answer(CONFIG, Layout(), items(), tokenizer_folder())


@pytest.mark.parametrize("text", ["tp2", "pp2", "dp2xep2", "dp2xep2:all_to_all", "pp2xdp2"])
def test_an_exam_gets_the_same_replies_from_every_layout(text: str) -> None:
    layout, exam, folder, expected = Layout.parse(text), items(), tokenizer_folder(), replies_of_one_rank()
    ranks = shared_ranks().run(step_tasks.answer, CONFIG, layout, exam, folder, world_size=layout.world_size)
    for rank, replies in enumerate(ranks):
        assert replies == expected[layout.coords(rank).dp :: layout.dp], f"rank {rank}"


@pytest.mark.parametrize("text", ["pp2xdp2", pytest.param("tp2xep2", marks=pytest.mark.slow)])
def test_a_run_follows_the_curve_of_one_rank_and_exports_the_same_model(text: str, tmp_path: Path) -> None:
    layout = Layout.parse(text)
    config = tiny_config(steps=3, qat_start=0.67, exam_steps=2)
    outs = tmp_path / "one", tmp_path / "many"
    for out in outs:
        give_tokenizer(out)
    step_tasks.run_to_the_end(config, Layout(), outs[0])
    shared_ranks().run(step_tasks.run_to_the_end, config, layout, outs[1], world_size=layout.world_size)

    one, many = (read_metrics(out / "metrics.jsonl", "step") for out in outs)
    assert [r["samples"] for r in many] == [r["samples"] for r in one], "every layout sees the same data"
    for a, b in zip(one, many, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-3)
        assert b["load"].keys() == a["load"].keys() == {"1", "2", "3"}
        assert b["phase"] == a["phase"]
    exams = [read_metrics(out / "metrics.jsonl", "exam") for out in outs]
    assert [r["scores"] for r in exams[1]] == [r["scores"] for r in exams[0]]

    wholes = [load_whole(config.spec(), find_states(out / "states")[0]) for out in outs]
    for name, value in wholes[0].items():
        assert (wholes[1][name] - value).abs().max() < 0.2 * config.optimiser.adam_lr * config.steps, name
    assert not torch.equal(wholes[0]["head.weight"], torch.zeros(()))
    (outs[1] / "recipe.toml").write_text("name = 'tiny'")
    many_config = dataclasses.replace(config, run=dataclasses.replace(config.run, layout=layout))
    model = export_run(many_config, outs[1], outs[1] / "model")
    assert audit(model, deep=True).ok
