"""Efficiencies fitted to operators that were measured, valid inside the measured range and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from workbench.base import Basis, Cell, ConfigError, Quantity, Table, human
from workbench.planner.cost import HOST_LINE, Efficiency

if TYPE_CHECKING:
    from workbench.operators import Coverage, OperatorUse
    from workbench.planner.check import PlanCheck

__all__ = ["CalibratedEfficiency", "CategoryFit", "calibrate", "calibrate_host"]

REACH = 2.0  # a fit is used up to twice beyond the smallest and the largest work it has seen


@dataclass(frozen=True, kw_only=True, slots=True)
class CategoryFit:
    """seconds = `launch_s` + roofline / `share`, fitted to `num_points` operators whose roofline time lay between
    `low_s` and `high_s`; `residual` is the worst relative misfit."""

    launch_s: float
    share: float
    low_s: float
    high_s: float
    residual: float
    num_points: int

    def covers(self, roofline_s: float) -> bool:
        return self.low_s / REACH <= roofline_s <= self.high_s * REACH


@dataclass(frozen=True, kw_only=True)
class CalibratedEfficiency(Efficiency):
    """Fits by category of operator; what lies outside of them is estimated, and marked, as without calibration."""

    fits: Mapping[str, CategoryFit] = field(default_factory=dict)

    def seconds(self, use: OperatorUse, compute_s: float, memory_s: float) -> tuple[float, Basis, str]:
        fit, roofline = self.fits.get(use.category), max(compute_s, memory_s)
        if fit is None or not fit.covers(roofline):
            return super().seconds(use, compute_s, memory_s)
        source = f"fit over {fit.num_points} measured operators, off by at most {fit.residual:.0%}"
        return fit.launch_s + roofline / fit.share, "modelled", source

    def table(self) -> Table:
        rows: list[tuple[Cell, ...]] = [
            (
                name,
                fit.num_points,
                human(fit.launch_s, "s"),
                f"{fit.share:.1%}",
                f"{human(fit.low_s, 's')} to {human(fit.high_s, 's')}",
                f"{fit.residual:.0%}",
            )
            for name, fit in self.fits.items()
        ]
        columns = ("category", "operators", "to start", "of roofline", "measured range", "worst misfit")
        return Table(title="Efficiencies fitted to measurements", columns=columns, rows=tuple(rows))


def calibrate(coverage: Coverage, otherwise: Efficiency | None = None) -> CalibratedEfficiency:
    """Fits to the operators of a coverage, against the roofline that was measured with it.

    A category with fewer than two sizes stays as `otherwise` has it. Raises ConfigError where the coverage has no
    roofline.
    """
    from workbench.cluster.cost import fit_cost

    if coverage.roofline.memory is None:
        raise ConfigError("efficiencies need a measured roofline", next_step="Probe operators with roofline=True")
    points: dict[str, list[tuple[int, float]]] = {}
    for result in coverage.results:
        least = coverage.roofline.least_seconds(result.use)
        if result.seconds and least:
            # In picoseconds, because sizes of the fit are whole numbers.
            points.setdefault(result.use.category, []).append((max(1, round(least * 1e12)), result.seconds))
    fits = {}
    for category, own in points.items():
        if len({size for size, _ in own}) < 2:
            continue
        cost = fit_cost(own, "operators")
        sizes = [size for size, _ in own]
        fits[category] = CategoryFit(
            launch_s=cost.alpha.value,
            share=cost.bandwidth.value / 1e12,
            low_s=min(sizes) / 1e12,
            high_s=max(sizes) / 1e12,
            residual=cost.residual,
            num_points=len(own),
        )
    base = otherwise or Efficiency()
    return CalibratedEfficiency(
        compute=base.compute,
        memory=base.memory,
        launch=base.launch,
        host=base.host,
        basis=base.basis,
        source=base.source,
        fits=fits,
    )


def calibrate_host(check: PlanCheck, phase: str = "decode") -> Quantity:
    """Seconds between two operator calls, from a step whose operators were all measured: what is left, per call.

    A small model on one rank tells most, since little else is in its step. Raises ConfigError for a check without that
    phase, or one whose operators were mostly not measured.
    """
    cost = next((x for x in check.costs if x.phase == phase), None)
    line = next((x for x in check.lines if x.what.startswith(f"{phase}:")), None)
    if cost is None or line is None:
        raise ConfigError(f"no {phase} step in this check")
    if min(stage.measured_share for stage in cost.stages) < 0.9:
        raise ConfigError("operators were not measured, so what is left says nothing")
    calls = sum(stage.num_calls for stage in cost.stages)
    counted = sum(x.estimate.value for x in cost.lines() if x.name == HOST_LINE)
    left = line.measured.value - (line.predicted.value - counted)
    source = f"what is left of a {phase} step of {check.model}, {check.layout}, over {calls:,} calls"
    return Quantity(max(0.0, left) / calls, "s", "measured", source)
