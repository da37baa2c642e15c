"""Where a pipeline is cut: every layer in exactly one stage, and no stage heavier than it must be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from workbench.base import LayoutError

__all__ = ["cut_stages"]


def cut_stages(loads: Sequence[float], num_stages: int, *, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Layers of each stage, so that the heaviest stage is as light as possible, then the rest even.

    `loads` of the layers in order; `first` and `last` is what the outer stages carry besides (embedding and vision,
    head). Stages are disjoint, complete and in order. Raises LayoutError for more stages than layers.
    """
    if not 1 <= num_stages <= len(loads):
        raise LayoutError(f"pp={num_stages} stages for {len(loads)} layers leaves empty stages")
    weights = [*loads]
    weights[0] += first
    weights[-1] += last
    limit = _lightest_maximum(weights, num_stages)
    sums = [0.0, *accumulate(weights)]
    ends_at_most = _latest_starts(weights, num_stages, limit)
    cuts = [0]
    for stage in range(1, num_stages):
        start = cuts[-1]
        goal = sums[start] + (sums[-1] - sums[start]) / (num_stages - stage + 1)
        # Cut where the stage comes nearest to its even share, among the cuts that leave the rest within the limit.
        allowed = range(max(start + 1, ends_at_most[stage]), len(weights) - (num_stages - stage) + 1)
        fitting = [end for end in allowed if sums[end] - sums[start] <= limit * (1 + 1e-12)]
        cuts.append(min(fitting, key=lambda end: (abs(sums[end] - goal), -end)))
    cuts.append(len(weights))
    return tuple(stop - start for start, stop in pairwise(cuts))


def _latest_starts(weights: Sequence[float], num_stages: int, limit: float) -> list[int]:
    """For each stage the earliest layer at which it may start, so that it and what follows keep within the limit."""
    starts = [0] * (num_stages + 1)
    starts[num_stages] = at = len(weights)
    for stage in range(num_stages - 1, -1, -1):
        total = 0.0
        while at > stage and total + weights[at - 1] <= limit * (1 + 1e-12):
            at -= 1
            total += weights[at]
        starts[stage] = at
    return starts


def _lightest_maximum(weights: Sequence[float], num_stages: int) -> float:
    """The smallest load that some partition's heaviest stage can have."""
    low, high = max(max(weights), sum(weights) / num_stages), sum(weights)
    for _ in range(60):
        middle = (low + high) / 2
        if _stages_needed(weights, middle) <= num_stages:
            high = middle
        else:
            low = middle
        if high - low <= 1e-12 * high:
            break
    return high


def _stages_needed(weights: Sequence[float], limit: float) -> int:
    stages, total = 1, 0.0
    for weight in weights:
        if total + weight > limit * (1 + 1e-12):
            stages, total = stages + 1, 0.0
        total += weight
    return stages
