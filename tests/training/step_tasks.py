"""What a rank does in the tests of layouts: one training step, an exam, or a short run."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from workbench.parallel import Group, GroupTensorParallel, attach, build_stage, make_context
from workbench.placement import Layout
from workbench.serving.inputs import Tokenizer
from workbench.serving.inputs.tokenizer_files import read_tokenizer_json
from workbench.training.answers import answer_items
from workbench.training.balance import LoadMeter
from workbench.training.config import TrainConfig
from workbench.training.data.exam import ExamItem
from workbench.training.data.samples import PackedBatch
from workbench.training.initial import initialise
from workbench.training.loop import RankTrainer
from workbench.training.masters import Masters
from workbench.training.optimiser import Optimiser
from workbench.training.step import compute_gradients

__all__ = ["FAULTS", "answer", "one_step", "run_to_the_end", "taught_tower"]

FAULTS = ("enter sums nothing", "replicas keep their own gradient", "every replica takes the same packs")


def one_step(config: TrainConfig, layout: Layout, packs: list[PackedBatch], fault: str | None = None) -> dict[str, Any]:
    """Loss, norm, loads, and this rank's gradients and stepped masters by name; `fault` is one of FAULTS."""
    with _planted(fault):
        return _one_step(config, layout, packs[:1] * len(packs) if fault == FAULTS[2] else packs)


def _planted(fault: str | None) -> AbstractContextManager[object]:
    if fault == FAULTS[0]:
        return mock.patch.object(GroupTensorParallel, "enter", lambda _self, x: x)
    if fault == FAULTS[1]:
        original = Group.all_reduce
        return mock.patch.object(
            Group, "all_reduce", lambda self, x: x if x.ndim == 1 and len(x) > 1000 else original(self, x)
        )
    return nullcontext()


def _one_step(config: TrainConfig, layout: Layout, packs: list[PackedBatch]) -> dict[str, Any]:
    ctx = make_context(layout)
    try:
        spec = config.spec()
        model = build_stage(spec, layout, ctx.rank, precision="fp32", dtype=torch.float32)
        model.to_empty(device="cpu")
        initialise(model, layout, ctx.rank, config.seed)
        attach(model, ctx)
        masters = Masters(model, ctx)
        masters.take_from_model()
        optimiser, meter = Optimiser(masters, config.optimiser), LoadMeter(model)
        sums = compute_gradients(model, masters, ctx, packs[ctx.coords.dp :: layout.dp])
        grads = {n: g.clone() for region in masters.regions for n, g in region.grad_views.items()}
        loads = meter.loads(ctx)
        norm = optimiser.step(1.0)
        meter.update_biases(loads, config.balance_rate)
        biases = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
        return {
            "sums": sums,
            "norm": norm,
            "loads": loads,
            "grads": {**grads, **{n: torch.zeros_like(b) for n, b in biases.items()}},
            "masters": {**masters.views, **biases},
        }
    finally:
        ctx.close()


def answer(config: TrainConfig, layout: Layout, items: list[ExamItem], folder: Path) -> list[str]:
    """Replies of this replica to its share of the questions, from the freshly drawn model."""
    ctx = make_context(layout)
    try:
        model = build_stage(config.spec(), layout, ctx.rank, precision="fp32")
        model.to_empty(device="cpu")
        initialise(model, layout, ctx.rank, config.seed)
        attach(model, ctx)
        tokenizer = Tokenizer(read_tokenizer_json(folder / "tokenizer.json"))
        return answer_items(model, ctx, tokenizer, items[ctx.coords.dp :: layout.dp], max_new_tokens=10, batch_size=3)
    finally:
        ctx.close()


def run_to_the_end(config: TrainConfig, layout: Layout, out: Path) -> None:
    """The loop itself, as `train` runs it on every rank."""
    ctx = make_context(layout)
    try:
        RankTrainer(config, out, ctx).run()
    finally:
        ctx.close()


def taught_tower(config: TrainConfig, layout: Layout, out: Path, further_steps: int = 0) -> dict[str, torch.Tensor]:
    """This rank's tower and projector after the lesson and some steps of the run; nothing on a stage without them."""
    ctx = make_context(layout)
    try:
        trainer = RankTrainer(config, out, ctx)
        trainer.teach_tower()
        for _ in range(further_steps):
            trainer.train_step()
        views = trainer.masters.views
        return {name: views[name].clone() for name in views if name.startswith(("vision.", "projector."))}
    finally:
        ctx.close()
