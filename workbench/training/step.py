"""One training step's gradient: packs through the sharded model, forward and backward, whatever the layout.

    loss = mean over all learnt tokens of all packs of all replicas of -log p(token)

Each rank computes the gradient of the *sum* over its own packs; `Masters.sum_gradients` adds the replicas' and divides
by the number of learnt tokens. Hook points of the model see to tensor and expert parallelism; stages exchange payloads
and, backwards, their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from workbench.nn.batch import TokenBatch
from workbench.nn.model import Model
from workbench.parallel import Pipeline, RankContext, encode_images
from workbench.serving.inputs import normalise
from workbench.training.data.samples import PackedBatch
from workbench.training.masters import Masters

__all__ = ["StepSums", "compute_gradients", "token_batch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSums:
    """Sums over all packs of a step on all replicas; the same on every rank."""

    loss: float  # natural logarithms
    num_learnt: int
    num_tokens: int
    num_samples: int

    @property
    def mean_loss(self) -> float:
        return self.loss / self.num_learnt if self.num_learnt else 0.0


def compute_gradients(
    model: Model, masters: Masters, ctx: RankContext, packs: Sequence[PackedBatch], *, tower_learns: bool = True
) -> StepSums:
    """Gradients of the mean loss into `masters`, ready to be clipped and stepped.

    `packs` are this replica's share, the same on all its ranks; every replica has the same number of packs. All stages
    run all forward passes, then all backward passes: activations of every pack are held until its backward. Without
    `tower_learns` no gradient reaches the vision tower.
    """
    masters.zero_grad()
    pipeline = Pipeline(model.spec, ctx, model.dtype)
    received: list[Tensor | None] = []
    outputs: list[Tensor] = []
    for pack in packs:
        payload = pipeline.receive(pack.num_tokens)
        if payload is not None:
            payload.requires_grad_()
        output = model(token_batch(model, ctx, pack, tower_learns=tower_learns), payload)
        if ctx.is_last_stage:
            targets = torch.from_numpy(pack.targets).to(ctx.device)
            output = F.cross_entropy(output.float(), targets, reduction="sum")
        else:
            pipeline.send(output)
        received.append(payload)
        outputs.append(output)

    loss = torch.zeros((), dtype=torch.float64, device=ctx.device)
    for idx, pack in enumerate(packs):
        output, payload = outputs[idx], received[idx]
        if ctx.is_last_stage:
            loss += output.detach().double()
            output.backward()
        else:
            output.backward(pipeline.receive_gradient(pack.num_tokens))
        masters.collect()
        if payload is not None:
            assert payload.grad is not None
            pipeline.send_gradient(payload.grad)
        outputs[idx], received[idx] = output.detach(), None  # this pack's activations may go

    counts = [sum(len(p.targets) for p in packs), sum(p.num_tokens for p in packs), sum(len(p.lengths) for p in packs)]
    sums = torch.cat([loss[None], torch.tensor(counts, dtype=torch.float64, device=ctx.device)])
    sums = ctx.dp.all_reduce(ctx.pp.broadcast(sums, ctx.pp.size - 1))
    total, num_learnt, num_tokens, num_samples = sums.tolist()
    masters.sum_gradients(1 / max(1.0, num_learnt))
    return StepSums(loss=total, num_learnt=int(num_learnt), num_tokens=int(num_tokens), num_samples=int(num_samples))


def token_batch(model: Model, ctx: RankContext, pack: PackedBatch, *, tower_learns: bool = True) -> TokenBatch:
    """The pack as the model takes it, pictures encoded on the first stage (differentiably where the tower learns)."""
    image_rows: Tensor | None = None
    features: Tensor | None = None
    if pack.grids and ctx.is_first_stage:
        assert model.spec.image is not None
        assert model.spec.vision is not None
        patches, grids, rows = _by_size(pack, model.spec.vision.merge_size**2)
        pixels = torch.from_numpy(normalise(patches, model.spec.image)).to(ctx.device)
        with torch.set_grad_enabled(tower_learns and torch.is_grad_enabled()):
            features = encode_images(model, ctx, pixels, grids)
        image_rows = torch.from_numpy(rows).to(ctx.device)
    return TokenBatch(
        token_ids=torch.from_numpy(pack.token_ids).to(ctx.device),
        lengths=pack.lengths,
        starts=(0,) * len(pack.lengths),
        slots=tuple(range(len(pack.lengths))),
        logit_rows=torch.from_numpy(pack.logit_rows).to(ctx.device),
        image_rows=image_rows,
        image_features=features,
    )


def _by_size(
    pack: PackedBatch, patches_per_token: int
) -> tuple[NDArray[np.uint8], list[tuple[int, int, int]], NDArray[np.int64]]:
    """Patches, grids and image rows with pictures of one size side by side: the tower attends to those in one call."""
    order = sorted(range(len(pack.grids)), key=lambda i: pack.grids[i])
    sizes = np.array([math.prod(grid) for grid in pack.grids])
    patches = np.split(pack.patches, np.cumsum(sizes)[:-1])
    rows = np.split(pack.image_rows, np.cumsum(sizes // patches_per_token)[:-1])
    grids = [pack.grids[i] for i in order]
    return np.concatenate([patches[i] for i in order]), grids, np.concatenate([rows[i] for i in order])
