"""Pictures of alignments and precision sweeps: errors by layer, size against error, what a saved byte costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.base import human
from workbench.view.charts import BarChart, LineChart, Series

if TYPE_CHECKING:
    from workbench.align import AlignReport, SweepReport

__all__ = ["errors_by_layer", "precision_pareto", "sensitivity_bars"]

LEAST = 1e-12  # a logarithmic axis has no zero
BARS = 20


def errors_by_layer(report: AlignReport) -> LineChart:
    """The largest added and inherited error of each layer, beside the noise floor of the added one."""
    added: dict[int, float] = {}
    inherited: dict[int, float] = {}
    floor: dict[int, float] = {}
    for row in report.rows:
        if row.layer is None or row.added is None:
            continue
        added[row.layer] = max(added.get(row.layer, LEAST), min(row.added.relative, 1e6))
        inherited[row.layer] = max(inherited.get(row.layer, LEAST), min(row.inherited or 0.0, 1e6))
        floor[row.layer] = max(floor.get(row.layer, LEAST), row.floor or 0.0)
    layers = tuple(float(layer) for layer in sorted(added))
    series = tuple(
        Series(name=name, x=layers, y=tuple(values[int(layer)] for layer in layers))
        for name, values in (("added here", added), ("inherited", inherited), ("noise floor", floor))
    )
    return LineChart(
        title=report.verdict()[:120],
        series=series,
        x_label="layer",
        x_unit="",
        y_label="relative error, largest tensor",
        y_unit="",
        log_y=True,
        note=f"{report.served} against {report.reference}",
    )


def precision_pareto(report: SweepReport) -> LineChart:
    """Share of bf16 bytes against the measured KL: the mixes as a line, uniform precisions as points."""
    mixes = sorted((mix for mix in report.mixes if mix.kl is not None), key=lambda mix: mix.ratio)
    series = [
        Series(
            name="mixes",
            x=tuple(round(mix.ratio, 4) for mix in mixes),
            y=tuple(max(mix.kl or 0.0, LEAST) for mix in mixes),
        )
    ]
    series += [
        Series(name=mix.name, x=(round(mix.ratio, 4),), y=(max(mix.kl or 0.0, LEAST),))
        for mix in (*report.uniform, *([report.chosen] if report.chosen is not None else ()))
        if mix.kl is not None and mix.name != "mix"
    ]
    if report.chosen is not None and report.chosen.kl is not None:
        chosen = report.chosen
        point = max(chosen.kl or 0.0, LEAST)
        series.append(Series(name="chosen", x=(round(chosen.ratio, 4),), y=(point,)))
    return LineChart(
        title=report.verdict(),
        series=tuple(series),
        x_label="weights, share of bf16",
        x_unit="",
        y_label="mean KL to the unchanged model",
        y_unit="nats",
        log_y=True,
        note=f"{report.positions} positions",
    )


def sensitivity_bars(report: SweepReport) -> BarChart:
    """Nats per megabyte saved, the dearest pairs of group and format."""
    pairs = [x for x in report.sensitivities if x.bytes_saved > 0]
    pairs = sorted(pairs, key=lambda x: -x.kl_per_byte)[:BARS]
    return BarChart(
        title=f"{pairs[0].group} in {pairs[0].scheme} costs most per byte" if pairs else "nothing saves a byte",
        labels=tuple(f"{x.group}, {x.scheme}" for x in pairs),
        values=tuple(x.kl_per_byte * 1e6 for x in pairs),
        unit="nats/MB",
        x_label="KL per megabyte saved",
        texts=tuple(f"{x.kl_per_byte * 1e6:.2e} nats/MB, saves {human(x.bytes_saved, 'B')}" for x in pairs),
    )
