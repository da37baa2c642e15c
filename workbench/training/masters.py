"""Float32 masters and gradients of one rank's trained parameters, and where each gradient must be summed.

The model holds what the forward pass sees (bf16, or values as the published files will hold them); the optimiser steps
the masters. Gradients go straight through: that of a seen weight is taken as that of its master.

Parameters lie in regions, one run of memory each, so that a step is a handful of operations on long vectors:

    reach        held by                                     gradient is summed over
    replicated   every rank of a stage                       the replicas (dp)
    images       every rank of a stage, but each tp rank     tp, then the replicas
                 encodes other images
    split        one tp rank of each replica                 the replicas (dp)
    expert       the ranks that hold the same experts        those (the expert group's tokens are in it already)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from workbench.nn.model import Model
from workbench.parallel import RankContext
from workbench.placement import vision_is_sharded
from workbench.training.sharding import is_expert, is_split_over_tp

__all__ = ["Masters", "Reach", "Region", "Rule", "Seen", "is_of_tower", "rule_of"]

Reach = Literal["replicated", "images", "split", "expert"]
Rule = Literal["hidden", "matrix", "vector"]
Seen = Callable[[str, Tensor], Tensor]  # name and master -> what the forward pass is to see

_NOT_HIDDEN = ("embed.", "head.", "vision.patch_embed.", "vision.pos_embed.")


def is_of_tower(name: str) -> bool:
    """Whether a parameter belongs to the vision tower or its projector."""
    return name.startswith(("vision.", "projector."))


def rule_of(name: str, parameter: Tensor) -> Rule:
    """How a parameter is stepped: hidden matrices, other matrices (embedding, head, router, patches), vectors."""
    if parameter.ndim < 2 or parameter.shape[-1] == 1 or parameter.shape[0] == 1 or "_conv." in name:
        return "vector"
    if name.startswith(_NOT_HIDDEN) or ".router." in name:
        return "matrix"
    return "hidden"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Region:
    """Parameters of one reach and one rule, of the tower or of the rest: master and gradient, flat and by name."""

    reach: Reach
    rule: Rule
    is_tower: bool  # of the vision tower or its projector
    values: Tensor  # (P,) float32
    grad: Tensor  # (P,) float32
    views: dict[str, Tensor]
    grad_views: dict[str, Tensor]


class Masters:
    """Masters of the parameters of `model` that want gradients; others (the router bias) stay the model's own."""

    def __init__(self, model: Model, ctx: RankContext) -> None:
        self.ctx, self.layout = ctx, ctx.layout
        self.parameters: dict[str, nn.Parameter] = {n: p for n, p in model.named_parameters() if p.requires_grad}
        kinds: dict[tuple[Reach, Rule, bool], list[str]] = {}
        for name, parameter in self.parameters.items():
            reach: Reach = "replicated"
            if is_expert(name):
                reach = "expert"
            elif is_split_over_tp(model.spec, ctx.layout, name):
                reach = "split"
            elif is_of_tower(name) and not vision_is_sharded(model.spec, ctx.layout):
                reach = "images"
            kinds.setdefault((reach, rule_of(name, parameter), is_of_tower(name)), []).append(name)
        self.regions = tuple(self._region(*kind, names) for kind, names in kinds.items())
        # Where the dtypes agree autograd adds straight into the region; otherwise `collect` does.
        self._foreign: list[tuple[nn.Parameter, Tensor]] = []
        for name, grad in self._grads():
            parameter = self.parameters[name]
            if parameter.dtype == torch.float32:
                parameter.grad = grad
            else:
                self._foreign.append((parameter, grad))

    @property
    def views(self) -> dict[str, Tensor]:
        """All masters by name, views of the regions."""
        return {name: view for region in self.regions for name, view in region.views.items()}

    def zero_grad(self) -> None:
        for region in self.regions:
            region.grad.zero_()

    @torch.no_grad()
    def collect(self) -> None:
        """After each backward pass: bring gradients of another dtype into the float32 sums."""
        arrived = [(grad, p) for p, grad in self._foreign if p.grad is not None]
        if arrived:
            torch._foreach_add_(
                [grad for grad, _ in arrived], [p.grad.float() for _, p in arrived if p.grad is not None]
            )
            for _, parameter in arrived:
                parameter.grad = None

    @torch.no_grad()
    def sum_gradients(self, scale: float) -> None:
        """Sum over the ranks that saw other tokens, times `scale`."""
        for region in self.regions:
            groups = {"expert": (self.ctx.expert_replicas,), "images": (self.ctx.tp, self.ctx.dp)}
            for group in groups.get(region.reach, (self.ctx.dp,)):
                if group.size > 1:
                    region.grad.copy_(group.all_reduce(region.grad))
            region.grad.mul_(scale)

    @torch.no_grad()
    def grad_norm(self) -> float:
        """Euclidean norm of the whole model's gradient, each value counted once; the same on every rank."""
        layout = self.layout
        ranks = layout.dp * layout.tp
        expert_holders = ranks // (layout.ep * layout.expert_tp)
        holders = {"replicated": ranks, "images": ranks, "split": layout.dp, "expert": expert_holders}
        # Vector norms accumulate blockwise; float64 keeps the last sum exact enough to be the same everywhere.
        squares = sum(float(torch.linalg.vector_norm(r.grad)) ** 2 / holders[r.reach] for r in self.regions)
        total = torch.tensor([squares], dtype=torch.float64, device=self.ctx.device)
        for group in (self.ctx.tp, self.ctx.dp, self.ctx.pp):
            total = group.all_reduce(total)
        return math.sqrt(float(total))

    @torch.no_grad()
    def scale_gradients(self, factor: float) -> None:
        for region in self.regions:
            region.grad.mul_(factor)

    @torch.no_grad()
    def publish(self, seen: Seen | None = None) -> None:
        """Give the model its weights: the masters, through `seen` where given, rounded to the model's dtypes."""
        for name, value in self.views.items():
            self.parameters[name].copy_(value if seen is None else seen(name, value))

    @torch.no_grad()
    def take_from_model(self) -> None:
        """Begin with what the model holds."""
        for name, value in self.views.items():
            value.copy_(self.parameters[name])

    def _grads(self) -> Iterator[tuple[str, Tensor]]:
        for region in self.regions:
            yield from region.grad_views.items()

    def _region(self, reach: Reach, rule: Rule, is_tower: bool, names: Iterable[str]) -> Region:
        shapes = {name: self.parameters[name].shape for name in names}
        size = sum(shape.numel() for shape in shapes.values())
        device = self.ctx.device
        values = torch.zeros(size, dtype=torch.float32, device=device)
        grad = torch.zeros(size, dtype=torch.float32, device=device)
        return Region(
            reach=reach,
            rule=rule,
            is_tower=is_tower,
            values=values,
            grad=grad,
            views=_views(values, shapes),
            grad_views=_views(grad, shapes),
        )


def _views(flat: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    pieces = flat.split([shape.numel() for shape in shapes.values()])
    return {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}
