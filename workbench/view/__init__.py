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
from workbench.view.experts import ExpertHeat, draw_expert_heat, expert_heat
from workbench.view.figures import plotly_figure
from workbench.view.loading import load_piece_table, load_stage_bars, load_stage_lines, load_stage_table
from workbench.view.loading_panel import LoadStagesView
from workbench.view.operators import error_bars, rate_bars
from workbench.view.panel import LoadProgressView, load_progress
from workbench.view.planning import cache_lines, memory_bars, step_bars
from workbench.view.precision import errors_by_layer, precision_pareto, sensitivity_bars
from workbench.view.profile import (
    category_bars,
    communication_bars,
    comparison_bars,
    expert_lines,
    latency_curves,
    request_timeline,
    roofline_bars,
)
from workbench.view.profile_panel import LoadHistory, LoadView
from workbench.view.progress import LoadSnapshot, LoadWatch, ProgressReport, TerminalProgress, terminal_progress
from workbench.view.soak import memory_over_time
from workbench.view.svg import draw_svg
from workbench.view.tables import bytes_table, facts_table, latency_table, matmul_table
from workbench.view.topology import HeatMap, LinkGraph, heat_figure, link_graph, link_heat, topology_figure
from workbench.view.training import TrainingHistory, balance_chart, exam_chart, loss_chart
from workbench.view.training_panel import TrainingView
from workbench.view.widgets import ChoicePanel

__all__ = [
    "BarChart",
    "Chart",
    "ChoicePanel",
    "ExpertHeat",
    "HeatMap",
    "LineChart",
    "LinkGraph",
    "LoadHistory",
    "LoadProgressView",
    "LoadSnapshot",
    "LoadStagesView",
    "LoadView",
    "LoadWatch",
    "ProgressReport",
    "Series",
    "TerminalProgress",
    "TrainingHistory",
    "TrainingView",
    "balance_chart",
    "bytes_by_role",
    "bytes_table",
    "cache_lines",
    "category_bars",
    "chart_from_json",
    "communication_bars",
    "comparison_bars",
    "difference_by_layer",
    "draw_expert_heat",
    "draw_svg",
    "error_bars",
    "errors_by_layer",
    "expert_heat",
    "exam_chart",
    "expert_lines",
    "facts_table",
    "heat_figure",
    "latency_bars",
    "latency_curves",
    "latency_table",
    "link_graph",
    "link_heat",
    "load_piece_table",
    "load_progress",
    "load_stage_bars",
    "load_stage_lines",
    "load_stage_table",
    "load_timeline",
    "loss_chart",
    "matmul_table",
    "memory_bars",
    "memory_over_time",
    "plotly_figure",
    "precision_pareto",
    "rate_bars",
    "request_timeline",
    "roofline_bars",
    "sensitivity_bars",
    "step_bars",
    "terminal_progress",
    "topology_figure",
]
