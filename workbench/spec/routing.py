"""Choosing experts, in plain numbers: the reference that a router block is held against.

One token, lists of floats, no tensor library. The order of the steps is where implementations differ silently:
the correction bias joins the choice and never the weights; a group out of the race is masked with minus infinity (a
zero would beat scores that a negative bias has pushed below it); weights are renormalised before they are scaled.
Source: arXiv 2412.19437, section 2.1.2, and the modelling files of the families that use each form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from workbench.spec.model import MoESpec

__all__ = ["choose_experts"]


def choose_experts(
    moe: MoESpec, logits: Sequence[float], correction: Sequence[float] | None = None
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Ids of the chosen experts, ascending, and their weights, for the router logits of one token.

    `correction` is the bias that joins the choice, for a router that has one. Ties go to the lower id. Raises
    ValueError for lists that are not as long as the experts are many.
    """
    if len(logits) != moe.num_experts or (correction is not None and len(correction) != moe.num_experts):
        raise ValueError(f"{len(logits)} logits for {moe.num_experts} experts")
    scores = _scores(moe, logits)
    choice = scores if correction is None else [s + b for s, b in zip(scores, correction, strict=True)]
    if moe.num_groups > 1:
        choice = _without_lost_groups(moe, choice)
    ids = sorted(sorted(range(moe.num_experts), key=lambda e: -choice[e])[: moe.top_k])
    weights = [scores[e] for e in ids]
    if moe.scoring == "softmax_topk":  # scores are the logits themselves
        weights = _softmax(weights)
    elif moe.renormalize:
        total = sum(weights) + 1e-20
        weights = [weight / total for weight in weights]
    return tuple(ids), tuple(weight * moe.routed_scale for weight in weights)


def _scores(moe: MoESpec, logits: Sequence[float]) -> list[float]:
    if moe.scoring == "sigmoid":
        return [1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x)) for x in logits]
    if moe.scoring == "softmax":
        return _softmax(logits)
    if moe.scoring == "sqrtsoftplus":
        return [math.sqrt(max(x, 0.0) + math.log1p(math.exp(-abs(x)))) for x in logits]
    return list(logits)


def _softmax(values: Sequence[float]) -> list[float]:
    top = max(values)
    shares = [math.exp(value - top) for value in values]
    return [share / sum(shares) for share in shares]


def _without_lost_groups(moe: MoESpec, choice: Sequence[float]) -> list[float]:
    size = moe.num_experts // moe.num_groups
    strength = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(moe.num_groups)]
    kept = sorted(range(moe.num_groups), key=lambda g: -strength[g])[: moe.top_groups]
    return [value if e // size in kept else -math.inf for e, value in enumerate(choice)]
