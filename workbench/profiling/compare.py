"""Two runs beside each other: what changed, whether it is more than noise, and whether the runs are comparable at all.

The noise of a median is found by drawing from each run's own requests again and again (bootstrap). A difference counts
only where the whole 95 % interval lies on one side of none; few requests make it wide, which is the honest answer.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from workbench.base import Cell, ConfigError, Table, human
from workbench.profiling.latency import FIGURES

__all__ = ["Comparison", "FigureChange", "Verdict", "compare_runs", "load_run"]

Verdict = Literal["better", "worse", "no difference seen", "too few"]
DRAWS = 500
LEAST_SAMPLES = 5
LEAST_CHANGE = 0.02  # below this share nobody cares, however sure it is
COMPARED = ("first_token_s", "per_token_s", "longest_pause_s", "end_to_end_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class FigureChange:
    """Medians [s] before and after; `low` to `high` is the 95 % interval of after / before - 1."""

    name: str
    num_before: int
    num_after: int
    before: float
    after: float
    low: float
    high: float
    verdict: Verdict

    @property
    def change(self) -> float:
        return self.after / self.before - 1 if self.before else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """`differences` are circumstances in which the runs differ: (what, before, after). Not all of them need matter."""

    changes: tuple[FigureChange, ...]
    differences: tuple[tuple[str, str, str], ...]
    goodput: tuple[float | None, float | None] = (None, None)
    failed: tuple[int, int] = (0, 0)

    @property
    def is_worse(self) -> bool:
        """Whether some figure got worse beyond noise, or requests fail that did not."""
        return any(change.verdict == "worse" for change in self.changes) or self.failed[1] > self.failed[0]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "is_worse": self.is_worse}

    def tables(self) -> tuple[Table, ...]:
        rows: list[tuple[Cell, ...]] = [
            (
                FIGURES[x.name],
                f"{x.num_before} / {x.num_after}",
                human(x.before, "s"),
                human(x.after, "s"),
                f"{x.change:+.1%}",
                f"{x.low:+.1%} to {x.high:+.1%}" if x.verdict != "too few" else "–",
                x.verdict,
            )
            for x in self.changes
        ]
        columns = ("median", "requests", "before", "after", "change", "95 % interval", "verdict")
        shares = ["–" if share is None else f"{share:.1%}" for share in self.goodput]
        note = f"good requests {shares[0]} before, {shares[1]} after; failed {self.failed[0]} and {self.failed[1]}"
        title = "Slower than before" if self.is_worse else "No figure got worse beyond noise"
        tables = [Table(title=title, columns=columns, rows=tuple(rows), note=note)]
        if self.differences:
            tables.append(
                Table(title="The runs differ in more", columns=("what", "before", "after"), rows=self.differences)
            )
        return tuple(tables)

    def render(self) -> str:
        return "\n\n".join(table.render() for table in self.tables())

    def _repr_html_(self) -> str:
        return "".join(table.to_html() for table in self.tables())


def load_run(records: Sequence[Mapping[str, Any]], *, where: object = None) -> Mapping[str, Any]:
    """The last load among records of a file. Raises ConfigError where there is none."""
    found = [record for record in records if record.get("kind") == "LoadReport"]
    if not found:
        raise ConfigError(
            "no record of a load", where=where, next_step="Make one with `workbench profile ... --record`"
        )
    return found[-1]


def compare_runs(before: Mapping[str, Any], after: Mapping[str, Any], *, seed: int = 0) -> Comparison:
    """Records of two loads, as `LoadReport.to_json` wrote them. Raises ConfigError for other records."""
    try:
        sides = [_samples(run) for run in (before, after)]
        goodput = [None if run["goodput"] is None else run["goodput"]["share"] for run in (before, after)]
        failed = [int(run["summary"]["num_failed"]) for run in (before, after)]
    except (KeyError, TypeError) as error:
        raise ConfigError(f"not the record of a load: {error!r}") from None
    rng = random.Random(seed)
    changes = tuple(
        _change(name, sides[0][name], sides[1][name], rng) for name in COMPARED if sides[0][name] and sides[1][name]
    )
    return Comparison(
        changes=changes,
        differences=tuple(_differences(before, after)),
        goodput=(goodput[0], goodput[1]),
        failed=(failed[0], failed[1]),
    )


def _samples(run: Mapping[str, Any]) -> dict[str, list[float]]:
    return {name: [x[name] for x in run["requests"] if x[name] is not None] for name in COMPARED}


def _change(name: str, before: list[float], after: list[float], rng: random.Random) -> FigureChange:
    medians = statistics.median(before), statistics.median(after)
    ratios = sorted(
        statistics.median(rng.choices(after, k=len(after)))
        / max(statistics.median(rng.choices(before, k=len(before))), 1e-12)
        - 1
        for _ in range(DRAWS)
    )
    low, high = ratios[int(0.025 * DRAWS)], ratios[int(0.975 * DRAWS)]
    verdict: Verdict = "no difference seen"
    if min(len(before), len(after)) < LEAST_SAMPLES:
        verdict = "too few"
    elif low > 0 and medians[1] > medians[0] * (1 + LEAST_CHANGE):
        verdict = "worse"
    elif high < 0 and medians[1] < medians[0] * (1 - LEAST_CHANGE):
        verdict = "better"
    return FigureChange(
        name=name,
        num_before=len(before),
        num_after=len(after),
        before=medians[0],
        after=medians[1],
        low=low,
        high=high,
        verdict=verdict,
    )


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Circumstances that are not equal, by dotted name; when and by which words it was started is always different."""
    flat = [_flat({"load": run.get("load", {}), **run.get("environment", {})}) for run in (before, after)]
    ignored = {"taken_at", "command", "load.text"}
    names = [name for name in dict.fromkeys([*flat[0], *flat[1]]) if name not in ignored]
    pairs = [(name, flat[0].get(name, "–"), flat[1].get(name, "–")) for name in names]
    return [(name, a, b) for name, a, b in pairs if a != b]


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            found.update(_flat(item, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = str(item)
    return found
