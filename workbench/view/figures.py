"""The same charts drawn by plotly, for notebooks: hover, zoom, units on every axis, the finding as title."""

from __future__ import annotations

from typing import Any

from workbench.base import human
from workbench.view.charts import BarChart, Chart, LineChart
from workbench.view.svg import COLOURS

__all__ = ["plotly_figure", "plotly_traces"]


def plotly_figure(chart: Chart) -> Any:
    """A `plotly.graph_objects.Figure` of the chart."""
    import plotly.graph_objects as go

    return go.Figure(plotly_traces(chart), plotly_layout(chart))


def plotly_traces(chart: Chart) -> list[dict[str, Any]]:
    """Traces as plain dictionaries. Scatter and not Scattergl: software WebGL stalls a page."""
    if isinstance(chart, BarChart):
        texts = [chart.text(i) for i in range(len(chart.values))]
        bars = {"type": "bar", "orientation": "h", "x": list(chart.values), "y": list(chart.labels), "text": texts}
        hover = "%{y}: %{text}<extra></extra>"
        return [{**bars, "textposition": "auto", "hovertemplate": hover, "marker": {"color": COLOURS[0]}}]
    return [
        {
            "type": "scatter",
            "mode": "lines+markers" if len(series.x) <= 40 else "lines",
            "name": series.name,
            "x": list(series.x),
            "y": list(series.y),
            "text": [human(y, chart.y_unit) if chart.y_unit else f"{y:.2e}" for y in series.y],
            "hovertemplate": f"{series.name}<br>%{{x}} {chart.x_unit}: %{{text}}<extra></extra>",
            "line": {"color": COLOURS[i % len(COLOURS)]},
        }
        for i, series in enumerate(chart.series)
    ]


def plotly_layout(chart: Chart) -> dict[str, Any]:
    """Layout as a plain dictionary: title, axis names with units, room for the labels."""
    common = {"title": {"text": chart.title, "font": {"size": 15}}, "template": "plotly_white"}
    margin = {"l": 70, "r": 30, "t": 50, "b": 50}
    if isinstance(chart, BarChart):
        return {
            **common,
            "margin": margin,
            "height": 130 + 26 * len(chart.values),
            "xaxis": {"title": {"text": f"{chart.x_label} [{chart.unit}]"}, "exponentformat": "SI"},
            "yaxis": {"autorange": "reversed", "automargin": True},
        }
    return {
        **common,
        "margin": margin,
        "height": 340,
        "xaxis": {"title": {"text": _axis_name(chart.x_label, chart.x_unit)}},
        "yaxis": {
            "title": {"text": _axis_name(chart.y_label, chart.y_unit)},
            "type": "log" if chart.log_y else "linear",
            "exponentformat": "power" if chart.log_y else "SI",
        },
        "showlegend": len(chart.series) > 1,
        "shapes": _limit_line(chart),
    }


def _axis_name(label: str, unit: str) -> str:
    return f"{label} [{unit}]" if unit else label


def _limit_line(chart: LineChart) -> list[dict[str, Any]]:
    if chart.limit is None:
        return []
    line = {"color": COLOURS[5], "dash": "dash"}
    return [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": chart.limit, "y1": chart.limit, "line": line}]
