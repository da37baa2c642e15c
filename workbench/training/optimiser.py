"""Stepping the masters: AdamW for embeddings, head and vectors, Muon for hidden matrices, one schedule for both."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from workbench.training.config import OptimiserConfig
from workbench.training.masters import Masters, is_of_tower
from workbench.training.muon import Matrix, Muon

__all__ = ["Optimiser", "learning_rate_share"]


def learning_rate_share(step: int, steps: int, config: OptimiserConfig) -> float:
    """Share of the peak learning rate at `step` (from 0): linear up over the warm-up, then half a cosine down."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps)
    return config.final_share + (1 - config.final_share) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


class Optimiser:
    """AdamW over whole regions at once, and Muon over their hidden matrices where its rate is not 0."""

    def __init__(self, masters: Masters, config: OptimiserConfig) -> None:
        self.masters, self.config = masters, config
        self._adam_grads: list[tuple[Tensor, Tensor]] = []  # value and gradient of each AdamW parameter
        groups: list[dict[str, Any]] = []
        matrices: dict[str, Matrix] = {}
        for region in masters.regions:
            if region.rule == "hidden" and config.muon_lr:
                replicas = masters.ctx.expert_replicas if region.reach == "expert" else masters.ctx.dp
                for name, view in region.views.items():
                    matrices[name] = Matrix(view, region.grad_views[name], replicas)
                continue
            decay = 0.0 if region.rule == "vector" else config.weight_decay
            groups.append({"params": [region.values], "weight_decay": decay, "is_tower": region.is_tower})
            self._adam_grads.append((region.values, region.grad))
        self.adam = torch.optim.AdamW(
            groups, lr=config.adam_lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True
        )
        self.muon = Muon(matrices, momentum=config.momentum, weight_decay=config.weight_decay)

    @torch.no_grad()
    def step(self, share: float, *, tower_learns: bool = True) -> float:
        """Clip the gradients to the configured norm and step at that share of the peak rates.

        Without `tower_learns` the vision tower and its projector stay as they are, weight decay included. Returns the
        norm before clipping, the same on every rank.
        """
        norm = self.masters.grad_norm()
        if norm > self.config.clip_norm:
            self.masters.scale_gradients(self.config.clip_norm / norm)
        for value, grad in self._adam_grads:
            value.grad = grad
        for group in self.adam.param_groups:
            group["lr"] = self.config.adam_lr * share if tower_learns or not group["is_tower"] else 0.0
        self.adam.step()
        still = [] if tower_learns else [name for name in self.muon.matrices if is_of_tower(name)]
        self.muon.step(self.config.muon_lr * share, still=still)
        return norm

    def state_dict(self) -> dict[str, Any]:
        return {"adam": self.adam.state_dict()["state"], "muon": self.muon.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """State of an optimiser over the same masters. Raises ValueError where it does not fit."""
        groups = self.adam.state_dict()["param_groups"]
        self.adam.load_state_dict({"state": state["adam"], "param_groups": groups})
        self.muon.load_state_dict(state["muon"])
