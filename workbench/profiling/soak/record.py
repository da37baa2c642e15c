"""What came of a soak: a verdict per promise, counts before and after, memory over time, and the outage if any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from workbench.base import Cell, Table, human
from workbench.profiling.soak.memory import MemorySeries, MemoryTrend
from workbench.profiling.soak.questions import SoakSettings

__all__ = ["Outage", "SoakCheck", "SoakRecord", "Verdict"]

Verdict = Literal["good", "BAD", "not shown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakCheck:
    """One promise. What did not come about, such as a disconnect where nobody vanished, is "not shown", never good."""

    name: str
    verdict: Verdict
    found: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outage:
    """Seconds after a rank was killed: noticed, ranks started again, first answer. None for what did not happen.

    `phases` is where the restart spent its time, as `RestartEvent.phases`.
    """

    killed_after_s: float
    noticed_s: float | None
    restarted_s: float | None
    answered_s: float | None
    phases: Mapping[str, Mapping[str, float]]

    def table(self) -> Table:
        points = (("noticed", self.noticed_s), ("ranks there again", self.restarted_s), ("answers", self.answered_s))
        rows: list[tuple[Cell, ...]] = [(name, _text(value), None) for name, value in points]
        rows += [
            (f"  {name}", human(phase["seconds"], "s"), human(phase["processor_s"], "s"))
            for name, phase in self.phases.items()
        ]
        columns = ("after the kill", "time", "processor time of the slowest rank")
        return Table(columns=columns, rows=tuple(rows), title=f"a rank killed after {self.killed_after_s:g} s")


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakRecord:
    """`counts` and `kinds` are of the measured part; `before` and `after` have every pool by name."""

    place: str
    settings: SoakSettings
    num_streams: int
    num_set_aside: int
    counts: Mapping[str, int]
    kinds: Mapping[str, int]
    checks: tuple[SoakCheck, ...]
    before: Mapping[str, int]
    after: Mapping[str, int]
    memory: tuple[MemorySeries, ...]
    trends: tuple[MemoryTrend, ...]
    outage: Outage | None = None

    @property
    def ok(self) -> bool:
        return all(check.verdict == "good" for check in self.checks)

    def tables(self) -> tuple[Table, ...]:
        title = f"{self.num_streams} streams for {self.settings.seconds:g} s, {self.place}"
        checks: list[tuple[Cell, ...]] = [(check.name, check.found, check.verdict) for check in self.checks]
        counts = ((name, number) for name, number in sorted(self.counts.items()))
        asked = ", ".join(f"{number} {name}" for name, number in sorted(self.kinds.items()))
        tables = [
            Table(columns=("promise", "found", "verdict"), rows=tuple(checks), title=title),
            Table(columns=("requests", "number"), rows=tuple(counts), note=f"whole answers: {asked}"),
            Table(
                columns=("process", "samples", "resident", "a minute", "growth", "allowed"),
                rows=tuple(
                    (
                        trend.name,
                        trend.num_samples,
                        human(trend.median_bytes, "B"),
                        human(trend.bytes_per_s * 60, "B"),
                        human(trend.growth_bytes, "B"),
                        human(trend.allowed_bytes, "B"),
                    )
                    for trend in self.trends
                ),
                note="memory over the second half of each process's time",
            ),
        ]
        return tuple([*tables, self.outage.table()] if self.outage is not None else tables)

    def render(self) -> str:
        return "\n\n".join(table.render() for table in self.tables())

    def _repr_html_(self) -> str:
        return "".join(table.to_html() for table in self.tables())

    def to_json(self) -> dict[str, Any]:
        trends = [
            {**asdict(trend), "allowed_bytes": trend.allowed_bytes, "is_flat": trend.is_flat} for trend in self.trends
        ]
        return {**asdict(self), "ok": self.ok, "trends": trends}


def _text(value: float | None) -> str:
    return "never" if value is None else human(value, "s")
