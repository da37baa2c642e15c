"""Showing a chart in a notebook so that it survives where the notebook is only read."""

from __future__ import annotations

from workbench.view.charts import Chart
from workbench.view.figures import plotly_figure
from workbench.view.svg import draw_svg

__all__ = ["chart_bundle", "show"]


def chart_bundle(chart: Chart) -> dict[str, object]:
    """One output in three forms: plotly for JupyterLab, SVG for viewers that run no script, the finding as text.

    A plotly figure alone is blank in an HTML export and on the web page of a repository; an embedded plotly.js would
    draw it there at the price of five megabytes per notebook.
    """
    return {
        "application/vnd.plotly.v1+json": plotly_figure(chart).to_plotly_json(),
        "image/svg+xml": draw_svg(chart, standalone=True),
        "text/plain": chart.title,
    }


def show(chart: Chart) -> None:
    """Display a chart as the output of the cell that calls this."""
    from IPython.display import display

    display(chart_bundle(chart), raw=True)
