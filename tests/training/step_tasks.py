"""What a rank does in the equivalence tests: one training step under a layout, from fixed weights and packs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch

from workbench.parallel import Group, GroupTensorParallel, attach, build_stage, make_context
from workbench.placement import Layout
from workbench.training.balance import LoadMeter
from workbench.training.config import TrainConfig
from workbench.training.data.samples import PackedBatch
from workbench.training.initial import initialise
from workbench.training.masters import Masters
from workbench.training.optimiser import Optimiser
from workbench.training.step import compute_gradients

__all__ = ["FAULTS", "one_step"]

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
