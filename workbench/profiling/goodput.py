"""Goodput: requests that were answered as well as was promised, and how sure a share of so few requests is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from workbench.base import Table, human
from workbench.profiling.latency import RequestTiming

__all__ = ["Goodput", "Slo", "measure_goodput"]

Z = 1.96  # of a normal distribution: 95 % lie within


@dataclass(frozen=True, kw_only=True, slots=True)
class Slo:
    """What a good request keeps to, seconds; None where nothing is promised. Raises ValueError for limits up to 0."""

    first_token_s: float | None = None
    per_token_s: float | None = None
    end_to_end_s: float | None = None

    def __post_init__(self) -> None:
        if any(limit is not None and not limit > 0 for limit in asdict(self).values()):
            raise ValueError(f"a limit is above 0 seconds: {self}")

    @property
    def limits(self) -> dict[str, float]:
        return {name: limit for name, limit in asdict(self).items() if limit is not None}

    def broken_by(self, timing: RequestTiming) -> tuple[str, ...]:
        """Names of the limits that a request does not keep; ("error",) for one that failed.

        A limit on what the request does not have (time per token of a one-token answer) is kept; one on what could not
        be counted is broken, since nobody can say that it was kept.
        """
        if timing.error or timing.first_token_s is None:
            return ("error",)
        broken = []
        for name, limit in self.limits.items():
            value: float | None = getattr(timing, name)
            is_unknown = name == "per_token_s" and not timing.is_counted
            if is_unknown or (value is not None and value > limit):
                broken.append(name)
        return tuple(broken)

    def __str__(self) -> str:
        return ", ".join(f"{name.removesuffix('_s').replace('_', ' ')} ≤ {x:g} s" for name, x in self.limits.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """`share` of requests is good, between `low` and `high` with 95 % confidence (Wilson's interval).

    `broken` counts the requests by each limit that they broke; one request may break several.
    """

    slo: Slo
    num_requests: int
    num_good: int
    seconds: float
    broken: tuple[tuple[str, int], ...] = ()

    @property
    def share(self) -> float | None:
        return self.num_good / self.num_requests if self.num_requests else None

    @property
    def requests_per_s(self) -> float | None:
        return self.num_good / self.seconds if self.seconds > 0 else None

    @property
    def interval(self) -> tuple[float, float]:
        if not self.num_requests:
            return 0.0, 1.0
        n, p = self.num_requests, self.num_good / self.num_requests
        centre = (p + Z**2 / (2 * n)) / (1 + Z**2 / n)
        half = Z * math.sqrt(p * (1 - p) / n + Z**2 / (4 * n**2)) / (1 + Z**2 / n)
        return max(0.0, centre - half), min(1.0, centre + half)

    def to_json(self) -> dict[str, object]:
        return {
            "slo": asdict(self.slo),
            "num_requests": self.num_requests,
            "num_good": self.num_good,
            "share": self.share,
            "interval": list(self.interval),
            "requests_per_s": self.requests_per_s,
            "seconds": self.seconds,
            "broken": dict(self.broken),
        }

    def table(self) -> Table:
        low, high = self.interval
        rate = "–" if self.requests_per_s is None else f"{self.requests_per_s:.3g} good requests/s"
        share = "–" if self.share is None else f"{self.share:.1%} ({low:.1%} to {high:.1%} with 95 % confidence)"
        rows = [("good", f"{self.num_good} of {self.num_requests}"), ("share", share), ("goodput", rate)]
        rows += [(f"broke {name.removesuffix('_s').replace('_', ' ')}", str(count)) for name, count in self.broken]
        return Table(
            columns=("goodput", "value"), rows=tuple(rows), note=f"{self.slo}, over {human(self.seconds, 's')}"
        )

    def render(self) -> str:
        return self.table().render()

    def _repr_html_(self) -> str:
        return self.table().to_html()


def measure_goodput(timings: Sequence[RequestTiming], slo: Slo, *, seconds: float | None = None) -> Goodput:
    """`seconds` is the time that the requests took together; by default from the first submission to the last arrival.

    A request that failed, or that gave nothing, is not good.
    """
    if seconds is None:
        ends = [timing.arrivals[-1][0] for timing in timings if timing.arrivals]
        seconds = max(ends) - min(timing.submitted_s for timing in timings) if ends else 0.0
    broken = [slo.broken_by(timing) for timing in timings]
    names = dict.fromkeys(name for each in broken for name in each)
    return Goodput(
        slo=slo,
        num_requests=len(timings),
        num_good=sum(not each for each in broken),
        seconds=seconds,
        broken=tuple((name, sum(name in each for each in broken)) for name in names),
    )
