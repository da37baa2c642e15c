"""What one rank holds of a whole parameter, by the rule of the placement table alone."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.placement import Layout, RankCoords, rule_for
from workbench.spec import ModelSpec

__all__ = ["local_piece"]


def local_piece(spec: ModelSpec, layout: Layout, at: RankCoords, name: str, whole: Tensor) -> Tensor:
    """The piece of `whole` (a parameter, its gradient, or a quantised part of it) on the rank at `at`."""
    rule = rule_for(spec, layout, name)
    first = 0
    if ".experts." in name:
        whole, first = whole.chunk(layout.ep, 0)[at.ep], 1
    if rule.dim is None:
        return whole
    degree, index = (layout.tp, at.tp) if rule.axis == "tp" else (layout.expert_tp, at.expert_tp)
    blocks = whole.chunk(rule.parts, first + rule.dim)
    return torch.cat([block.chunk(degree, first + rule.dim)[index] for block in blocks], first + rule.dim)
