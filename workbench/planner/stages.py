"""Where a pipeline is cut: every layer in exactly one stage, and no stage heavier than it must be."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf, nextafter

from workbench.base import LayoutError

__all__ = ["cut_stages"]

ROUNDING = 1 + 1e-9  # sums taken in another order differ by less


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
    sums = [0.0, *accumulate(weights)]
    limit = _lightest_maximum(sums, max(weights), num_stages)
    ends_at_most = _latest_starts(weights, num_stages, limit)
    cuts = [0]
    for stage in range(1, num_stages):
        start = cuts[-1]
        goal = sums[start] + (sums[-1] - sums[start]) / (num_stages - stage + 1)
        # Cut where the stage comes nearest to its even share, among the cuts that leave the rest within the limit.
        allowed = range(max(start + 1, ends_at_most[stage]), len(weights) - (num_stages - stage) + 1)
        fitting = [end for end in allowed if sums[end] - sums[start] <= limit * ROUNDING]
        cuts.append(min(fitting, key=lambda end: (abs(sums[end] - goal), -end)))
    cuts.append(len(weights))
    return tuple(stop - start for start, stop in pairwise(cuts))


def _latest_starts(weights: Sequence[float], num_stages: int, limit: float) -> list[int]:
    """For each stage the earliest layer at which it may start, so that it and what follows keep within the limit."""
    starts = [0] * (num_stages + 1)
    starts[num_stages] = at = len(weights)
    for stage in range(num_stages - 1, -1, -1):
        total = 0.0
        while at > stage and total + weights[at - 1] <= limit * ROUNDING:
            at -= 1
            total += weights[at]
        starts[stage] = at
    return starts


def _lightest_maximum(sums: Sequence[float], largest: float, num_stages: int) -> float:
    """The smallest load that some partition's heaviest stage can have. `sums` of the loads before each layer."""
    low, high = max(largest, sums[-1] / num_stages), sums[-1]
    while low < high:
        limit = low + (high - low) / 2
        limit = limit if limit < high else low  # neighbours, whose mean is one of them
        needed, heaviest, next_limit = _filled(sums, limit)
        # Either bound goes on to a load that a stage can have; at least to the next number, whatever sums round to.
        if needed <= num_stages:
            high = min(heaviest, limit)
        else:
            low = max(next_limit, nextafter(limit, inf))
    return high


def _filled(sums: Sequence[float], limit: float) -> tuple[int, float, float]:
    """Stages that take layers up to `limit`: their number, the heaviest, and the limit at which one would take more."""
    stages, heaviest, next_limit, start, end = 0, 0.0, inf, 0, len(sums) - 1
    while start < end:
        stop = max(start + 1, bisect_right(sums, sums[start] + limit) - 1)
        heaviest = max(heaviest, sums[stop] - sums[start])
        if stop < end:
            next_limit = min(next_limit, sums[stop + 1] - sums[start])
        stages, start = stages + 1, stop
    return stages, heaviest, next_limit
