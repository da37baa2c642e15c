"""Pictures of records: tables, charts as SVG or plotly figures, load progress. Nothing here imports torch."""

from workbench.view.charts import (
    BarChart,
    Chart,
    LineChart,
    Series,
    bytes_by_role,
    chart_from_json,
    difference_by_layer,
    latency_bars,
    load_timeline,
)
from workbench.view.figures import plotly_figure
from workbench.view.panel import LoadProgressView, load_progress
from workbench.view.progress import LoadSnapshot, LoadWatch, ProgressReport, TerminalProgress, terminal_progress
from workbench.view.svg import draw_svg
from workbench.view.tables import bytes_table, facts_table, latency_table, matmul_table

__all__ = [
    "BarChart",
    "Chart",
    "LineChart",
    "LoadProgressView",
    "LoadSnapshot",
    "LoadWatch",
    "ProgressReport",
    "Series",
    "TerminalProgress",
    "bytes_by_role",
    "bytes_table",
    "chart_from_json",
    "difference_by_layer",
    "draw_svg",
    "facts_table",
    "latency_bars",
    "latency_table",
    "load_progress",
    "load_timeline",
    "matmul_table",
    "plotly_figure",
    "terminal_progress",
]
