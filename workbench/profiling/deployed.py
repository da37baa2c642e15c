"""A running deployment profiled from its handle: every rank's operators and collectives, compared over the ranks.

with DeploymentProfiler(deployment, every=50) as profiler:
    ...                                     # questions through a service or an engine, as many as you like
print(profiler.profile.render())
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Protocol, cast

from workbench.base import Table, WorkbenchError, human
from workbench.deployment import Deployment
from workbench.operators.coverage import Roofline
from workbench.profiling.clocks import ClockReading, ClockSample, compare_clocks
from workbench.profiling.communication import Communication, split_communication
from workbench.profiling.experts import ExpertLoad, merge_counts
from workbench.profiling.rank_profile import ProfileOptions, RankProfile
from workbench.profiling.steps import StepLedger

__all__ = ["DeploymentProfile", "DeploymentProfiler", "profile_of"]

CLOCK_ROUNDS = 5
RANK = "workbench.profiling.rank"


class Caller(Protocol):
    """What can call a function on every rank; a `Deployment` does."""

    def call(self, function: str, args: Mapping[str, object] | None = None) -> list[object]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class DeploymentProfile:
    """`ranks` in order; `offsets` of their clocks from rank 0's. `conditions` say what it was taken from."""

    ranks: tuple[RankProfile, ...]
    communication: Communication
    experts: ExpertLoad
    offsets: Mapping[int, float]
    conditions: str = ""

    @property
    def ledgers(self) -> dict[int, StepLedger]:
        return {rank.rank: rank.ledger for rank in self.ranks if rank.ledger is not None}

    @property
    def overhead(self) -> float | None:
        """Of the rank that recording slowed most; None where no step ran without it."""
        return max((x.overhead for x in self.ranks if x.overhead is not None), default=None)

    def with_roofline(self, roofline: Roofline) -> DeploymentProfile:
        """Operators against the limits of the device, on the ranks that recorded their work."""
        ranks = tuple(
            replace(x, ledger=x.ledger.with_work(x.uses, roofline)) if x.ledger is not None and x.uses else x
            for x in self.ranks
        )
        return replace(self, ranks=ranks)

    def to_json(self) -> dict[str, Any]:
        return {
            "ledgers": {str(rank): ledger.to_json() for rank, ledger in self.ledgers.items()},
            "communication": self.communication.to_json(),
            "experts": self.experts.to_json(),
            "overhead": self.overhead,
            "num_recorded": [rank.num_recorded for rank in self.ranks],
            "recorded_step_s": [rank.recorded_step_s for rank in self.ranks],
            "num_plain": [rank.num_plain for rank in self.ranks],
            "plain_step_s": [rank.plain_step_s for rank in self.ranks],
            "problems": [rank.problem for rank in self.ranks if rank.problem],
            "conditions": self.conditions,
        }

    def tables(self) -> tuple[Table, ...]:
        """The slowest rank's operators, communication of all, experts."""
        tables: list[Table] = []
        if self.ledgers:
            rank, ledger = max(self.ledgers.items(), key=lambda item: item[1].seconds - item[1].communication_s)
            first, *rest = ledger.tables()
            tables = [replace(first, title=f"A step of rank {rank}, the one with most to do"), *rest]
        if any(share.count for share in self.communication.ranks):
            tables += self.communication.tables()
        if self.experts.layers:
            tables.append(self.experts.table())
        tables.append(self._cost())
        return tuple(tables)

    def render(self) -> str:
        return "\n\n".join(table.render() for table in self.tables())

    def _repr_html_(self) -> str:
        return "".join(table.to_html() for table in self.tables())

    def _cost(self) -> Table:
        rows = tuple(
            (x.rank, x.num_plain, human(x.plain_step_s, "s"), x.num_recorded, human(x.recorded_step_s, "s"))
            for x in self.ranks
        )
        cost = "not known: no step ran without it" if self.overhead is None else f"{self.overhead:.1%} of step time"
        notes = [f"recording cost {cost}", *(f"rank {x.rank}: {x.problem}" for x in self.ranks if x.problem)]
        columns = ("rank", "steps without", "mean", "steps recorded", "mean ")
        return Table(columns=columns, rows=rows, note="; ".join(notes))


class DeploymentProfiler:
    """Profiles while open; `profile` is there once it is closed. The deployment may serve meanwhile, and goes on after.

    Options are those of `ProfileOptions`. Raises DeploymentError where the deployment is being profiled already.
    """

    def __init__(self, deployment: Deployment | Caller, *, conditions: str = "", **options: Any) -> None:
        self._deployment: Caller = deployment
        self._options, self._conditions = ProfileOptions(**options), conditions
        self.profile: DeploymentProfile | None = None

    def __enter__(self) -> DeploymentProfiler:
        names = ProfileOptions.__slots__
        self._deployment.call(f"{RANK}:start", {name: getattr(self._options, name) for name in names})
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            ranks = cast(list[RankProfile], self._deployment.call(f"{RANK}:stop"))
            self.profile = profile_of(ranks, self._clocks(), conditions=self._conditions)
        except WorkbenchError:
            if error is None:
                raise  # else what ended the block is the news

    def _clocks(self) -> list[ClockSample]:
        samples = []
        for _ in range(CLOCK_ROUNDS):
            asked_s = time.monotonic()
            readings = cast(list[ClockReading], self._deployment.call(f"{RANK}:read_clock"))
            samples.append(ClockSample(asked_s=asked_s, answered_s=time.monotonic(), readings=tuple(readings)))
        return samples


def profile_of(ranks: list[RankProfile], samples: list[ClockSample], *, conditions: str = "") -> DeploymentProfile:
    """Ranks put together: collectives matched on one clock, experts added up."""
    offsets, error_s = compare_clocks(samples)
    return DeploymentProfile(
        ranks=tuple(ranks),
        communication=split_communication(
            {x.rank: x.collectives for x in ranks},
            seconds=_stepping_s(ranks),
            offsets=offsets,
            clock_error_s=error_s,
        ),
        experts=merge_counts([x.expert_counts for x in ranks]),
        offsets=offsets,
        conditions=conditions,
    )


def _stepping_s(ranks: list[RankProfile]) -> float:
    """Mean over ranks of the time spent in steps: a rank that nobody asked anything is not slow."""
    return sum(x.num_plain * x.plain_step_s + x.num_recorded * x.recorded_step_s for x in ranks) / max(1, len(ranks))
