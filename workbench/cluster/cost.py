"""What a transfer costs: alpha + bytes / bandwidth, fitted to measurements or taken from a datasheet.

`num_bytes` of an operation is what one rank puts in, as `parallel.CollectiveRecord` counts it:

    all_reduce, broadcast, send_recv   the whole tensor
    all_gather                         the piece of one rank; it takes out n pieces
    reduce_scatter, all_to_all         the input of one rank: n pieces

The formulas at the end estimate a collective that was not measured, from the cost of one step between neighbours.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from workbench.base import Quantity

__all__ = ["OPERATIONS", "CollectiveFit", "LinkCost", "Operation", "estimate_flat", "fit_cost"]

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkCost:
    """`alpha` [s] + bytes / `bandwidth` [B/s]. `residual` is the worst relative misfit over `points`, the
    (num_bytes, seconds) that the two numbers were fitted to; both are empty for figures that nobody measured.

    Between two measured sizes the points speak, outside of them the two numbers: libraries change their algorithm with
    the size, which no straight line follows.
    """

    alpha: Quantity
    bandwidth: Quantity
    residual: float = 0.0
    points: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if self.alpha.unit != "s" or self.bandwidth.unit != "B/s":
            raise ValueError(f"alpha in s and bandwidth in B/s, found {self.alpha.unit!r} and {self.bandwidth.unit!r}")
        if not (0 <= self.alpha.value < math.inf and 0 < self.bandwidth.value < math.inf):
            raise ValueError(f"a cost needs alpha >= 0 and bandwidth > 0, found {self.alpha} and {self.bandwidth}")

    def time(self, num_bytes: float) -> Quantity:
        """Seconds to move that many bytes; the basis is the weaker of the two numbers'."""
        fitted = self.alpha + Quantity(num_bytes, "B", "exact") / self.bandwidth
        between = self._between_points(num_bytes)
        return fitted if between is None else replace(fitted, value=between)

    def _between_points(self, num_bytes: float) -> float | None:
        """On the straight line between the two measured sizes around; None outside of them."""
        times: dict[int, list[float]] = {}
        for size, seconds in self.points:
            times.setdefault(size, []).append(seconds)
        sizes = sorted(times)
        if len(sizes) < 2 or not sizes[0] <= num_bytes <= sizes[-1]:
            return None
        place = min(max(1, bisect_left(sizes, num_bytes)), len(sizes) - 1)
        low, high = sizes[place - 1], sizes[place]
        share = (num_bytes - low) / (high - low)
        first, second = (sum(times[size]) / len(times[size]) for size in (low, high))
        return first + share * (second - first)

    def scaled(self, scale: float, why: str) -> LinkCost:
        """A link `scale` times as fast: alpha divided and bandwidth multiplied. Basis "modelled"; no points."""
        if not 0 < scale < math.inf:
            raise ValueError(f"a scale is above 0 and finite, found {scale}")
        return LinkCost(
            alpha=Quantity(self.alpha.value / scale, "s", _at_least_modelled(self.alpha), why),
            bandwidth=Quantity(self.bandwidth.value * scale, "B/s", _at_least_modelled(self.bandwidth), why),
        )


def _at_least_modelled(quantity: Quantity) -> Literal["modelled", "assumed"]:
    return "assumed" if quantity.basis == "assumed" else "modelled"


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveFit:
    """Cost of one operation over one group of ranks (ascending), in one dtype (torch's name, "bfloat16")."""

    operation: Operation
    ranks: tuple[int, ...]
    dtype: str
    cost: LinkCost

    def algorithm_bandwidth(self, num_bytes: float) -> Quantity:
        """B/s of the whole operation: the larger of what a rank puts in and takes out, over its time."""
        size = num_bytes * (len(self.ranks) if self.operation == "all_gather" else 1)
        return Quantity(size, "B", "exact") / self.cost.time(num_bytes)

    def bus_bandwidth(self, num_bytes: float) -> Quantity:
        """B/s that must cross one rank's link in each direction: comparable with the link's own figure, whatever the
        number of ranks."""
        return self.algorithm_bandwidth(num_bytes) * bus_factor(self.operation, len(self.ranks))


def bus_factor(operation: Operation, size: int) -> float:
    """Bytes over a rank's link per byte of the operation. Source: the accounting of NVIDIA's nccl-tests."""
    if operation == "all_reduce":
        return 2 * (size - 1) / size
    if operation in ("all_gather", "reduce_scatter", "all_to_all"):
        return (size - 1) / size
    return 1.0


def fit_cost(points: Sequence[tuple[int, float]], source: str) -> LinkCost:
    """Least squares of alpha and 1 / bandwidth over (num_bytes, seconds), each point weighted by 1 / seconds.

    The weighting makes the relative misfit count, so that a few microseconds matter at small sizes and megabytes do not
    drown them. A negative alpha or slope, which noise can cause, is held at its bound and the other number refitted.
    Raises ValueError for fewer than two sizes or times that are not above zero.
    """
    if len({size for size, _ in points}) < 2:
        raise ValueError(f"a fit needs two sizes or more, found {len(points)} points")
    if not all(size >= 0 and 0 < seconds < math.inf for size, seconds in points):
        raise ValueError(f"a fit needs times above zero, found {points}")
    # Minimise sum((alpha + beta x - y)^2 / y^2): rows (1/y, x/y) against 1.
    ones = [1 / y for _, y in points]
    sizes = [x / y for x, y in points]
    s11, s12, s22 = (math.fsum(a * b for a, b in zip(u, v, strict=True)) for u, v in _pairs(ones, sizes))
    t1, t2 = math.fsum(ones), math.fsum(sizes)
    det = s11 * s22 - s12 * s12
    alpha, beta = (t1 * s22 - t2 * s12) / det, (t2 * s11 - t1 * s12) / det
    if alpha < 0:
        alpha, beta = 0.0, t2 / s22
    elif beta <= 0:
        # No slope to be seen: the largest size in its time is a bandwidth that the link reaches at the least.
        size, seconds = max(points)
        alpha, beta = t1 / s11, 0.0
        bandwidth = size / seconds
    bandwidth = 1 / beta if beta > 0 else bandwidth
    cost = LinkCost(
        alpha=Quantity(alpha, "s", "measured", source),
        bandwidth=Quantity(bandwidth, "B/s", "measured", source),
    )
    misfit = max(abs(cost.time(x).value - y) / y for x, y in points)
    return LinkCost(alpha=cost.alpha, bandwidth=cost.bandwidth, residual=misfit, points=tuple(sorted(points)))


def _pairs(u: list[float], v: list[float]) -> tuple[tuple[list[float], list[float]], ...]:
    return (u, u), (u, v), (v, v)


def estimate_flat(operation: Operation, num_bytes: float, size: int, alpha: float, bandwidth: float) -> float:
    """Seconds of an operation over `size` equal neighbours, by the better of two common algorithms.

    `alpha` [s] is the start of one message and `bandwidth` [B/s] what one rank sends in one direction. Sources: Thakur,
    Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH (2005).
    """
    if size == 1:
        return 0.0
    rounds = math.ceil(math.log2(size))
    others = size - 1
    whole, piece = num_bytes / bandwidth, num_bytes / size / bandwidth
    if operation == "all_reduce":
        ring = 2 * others * (alpha + piece)
        doubling = rounds * (alpha + whole)
        return min(ring, doubling)
    if operation == "all_gather":
        return rounds * alpha + others * whole
    if operation == "reduce_scatter":
        return rounds * alpha + others * piece
    if operation == "all_to_all":
        return others * (alpha + piece)
    if operation == "broadcast":
        tree = rounds * (alpha + whole)
        scatter_gather = (rounds + others) * alpha + 2 * others * piece
        return min(tree, scatter_gather)
    return alpha + whole
