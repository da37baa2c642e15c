"""How the ranks of a deployment are profiled, and what each of them found: plain data, read without torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from workbench.base import DeploymentError
from workbench.operators.inventory import OperatorUse
from workbench.profiling.communication import CollectiveTime
from workbench.profiling.steps import Span, StepLedger

__all__ = ["ProfileOptions", "RankProfile"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileOptions:
    """`every`-th step is recorded, up to `max_steps` of them or `max_events` events; of those the longest `max_spans`
    are kept for a trace. Up to `max_collectives` are timed. With `with_work` the first step is also run through the
    recorder of operators, which makes that one step slow. `barriers`: see `communication`.

    `budget` is the largest share of step time that recording may take: steps that are due are passed over until what
    the recorded ones cost, and one more would, is no more than that. The first one is recorded at once, so the budget
    holds over a run that is long enough to pay for it; None for no limit."""

    every: int = 1
    max_steps: int = 8
    max_events: int = 400_000
    max_spans: int = 20_000
    max_collectives: int = 100_000
    with_work: bool = True
    barriers: bool = False
    budget: float | None = None

    def __post_init__(self) -> None:
        if self.budget is not None and not 0 < self.budget <= 1:
            raise DeploymentError(
                "not a share of step time", found=f"budget {self.budget}", expected="above 0, up to 1"
            )
        if min(self.every, self.max_steps, self.max_events) < 1 or min(self.max_spans, self.max_collectives) < 0:
            raise DeploymentError("not a way to profile", found=self, expected="counts from 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankProfile:
    """What one rank saw between `start` and `stop`. `ledger` is None where no step was recorded.

    `plain_step_s` and `recorded_step_s` are the mean times of steps without and with the profiler, `num_plain` and
    `num_recorded` how many there were. `spans` count from the start of their own step, of which `span_steps` tells the
    start on the rank's clock. `read_s` is the processor time that reading the events took beside the steps.
    `expert_counts` is by layer, on ranks whose tokens no other rank reports.
    """

    rank: int
    seconds: float
    ledger: StepLedger | None = field(repr=False)  # thousands of entries, here and below
    uses: tuple[OperatorUse, ...] = field(repr=False)
    collectives: tuple[CollectiveTime, ...] = field(repr=False)
    num_collectives_left_out: int
    expert_counts: dict[int, tuple[int, ...]]
    spans: tuple[tuple[float, Span], ...] = field(repr=False)
    num_plain: int
    plain_step_s: float
    num_recorded: int
    recorded_step_s: float
    read_s: float = 0.0
    problem: str = ""

    @property
    def overhead(self) -> float | None:
        """Time that recording and reading added over the time of all steps as they would have been; None without a
        comparison. Reading counts in full, although it runs beside the steps."""
        if not self.num_plain or not self.num_recorded or not self.plain_step_s:
            return None
        added = max(0.0, self.recorded_step_s - self.plain_step_s) * self.num_recorded + self.read_s
        return added / (self.plain_step_s * (self.num_plain + self.num_recorded))
