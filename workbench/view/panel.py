"""A live panel for notebooks: bars and a chart while ranks load, and a static picture of them when they are done.

The work runs elsewhere (worker processes, their reader thread); the panel is redrawn from a thread of its own.
"""

from __future__ import annotations

import html
from typing import Any

from workbench.base import human
from workbench.view.charts import Chart, LineChart, load_timeline
from workbench.view.figures import plotly_layout, plotly_traces
from workbench.view.live import INTERVAL_S, Redrawer
from workbench.view.progress import LoadSnapshot, LoadWatch, ProgressReport, TerminalProgress
from workbench.view.svg import draw_svg

__all__ = ["LoadProgressView", "load_progress", "progress_html"]

FIGURE_EVERY = 2  # the plotly chart is redrawn at half that rate


class LoadProgressView:
    """Use as a progress callback inside a `with` block:

        with LoadProgressView(num_ranks=4) as view:
            deployment = Deployment.start(path, layout, on_progress=view)

    `plotly` adds an interactive chart (five megabytes of script in a notebook that stores widget state); without it the
    panel draws the chart itself. On leaving, the final state is shown once more as a static output, which also viewers
    without widgets display.
    """

    def __init__(
        self,
        *,
        num_ranks: int | None = None,
        title: str = "Loading weights",
        plotly: bool = False,
        interval_s: float = INTERVAL_S,
    ) -> None:
        import ipywidgets

        self.watch = LoadWatch(num_ranks)
        self.title = title
        self.panel = ipywidgets.HTML(progress_html(self.watch.snapshot(), None, title=title))
        self.figure = self._new_figure() if plotly else None
        self._redrawer = Redrawer(self._redraw, lambda: self.watch.version, interval_s=interval_s, name="load-progress")

    @property
    def num_redraws(self) -> int:
        return self._redrawer.num_redraws

    def __call__(self, report: ProgressReport) -> None:
        self.watch(report)

    def __enter__(self) -> LoadProgressView:
        self.show()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def show(self) -> None:
        """Display the panel here and start redrawing it. Call from a cell, not from a thread."""
        if self._redrawer.is_started:
            return
        import ipywidgets
        from IPython.display import display

        display(self.panel if self.figure is None else ipywidgets.VBox([self.panel, self.figure]))
        self._redrawer.start()

    def close(self) -> None:
        """Stop redrawing, bring the panel up to date and leave a static picture. A second call does nothing."""
        if not self._redrawer.stop():
            return
        if self.figure is not None:
            self._redraw_figure(self.chart())
            # A figure widget's stored state is what was first displayed; this refreshes it, so that a saved notebook
            # and a reloaded page show the end and not the empty beginning.
            self.figure._repr_mimebundle_()
        self._display_static()

    def chart(self) -> LineChart | None:
        """Bytes over time per rank; None before the first report."""
        samples = self.watch.samples()
        return load_timeline(samples) if samples else None

    def summary(self) -> str:
        return f"{self.title}: {self.watch.snapshot().line()}"

    def _display_static(self) -> None:
        from IPython.display import display

        bundle = {"text/plain": self.summary()}
        if (chart := self.chart()) is not None:
            bundle["image/svg+xml"] = draw_svg(chart, standalone=True)
        display(bundle, raw=True)

    def _redraw(self) -> None:
        chart = self.chart()
        own_chart = chart if self.figure is None else None
        self.panel.value = progress_html(self.watch.snapshot(), own_chart, title=self.title)
        if self.figure is not None and self.num_redraws % FIGURE_EVERY == 0:
            self._redraw_figure(chart)

    def _new_figure(self) -> Any:
        import plotly.graph_objects as go

        return go.FigureWidget(layout={"height": 340, "template": "plotly_white"})

    def _redraw_figure(self, chart: LineChart | None) -> None:
        if self.figure is None or chart is None:
            return
        traces = plotly_traces(chart)
        with self.figure.batch_update():  # one redraw for all lines
            for trace, old in zip(traces, self.figure.data, strict=False):
                old.x, old.y = trace["x"], trace["y"]
            self.figure.layout.update(plotly_layout(chart))
        if len(traces) > len(self.figure.data):
            self.figure.add_traces(traces[len(self.figure.data) :])


def progress_html(snapshot: LoadSnapshot, chart: Chart | None, *, title: str = "Loading weights") -> str:
    """The panel's HTML, all text escaped: a bar over all ranks, one per rank with the tensor it is at, the chart."""
    bars = [_bar(title, snapshot.fraction, snapshot.line().partition(" · ")[2], is_bold=True)]
    for rank in snapshot.ranks:
        fraction = 1.0 if not rank.bytes_total else min(1.0, rank.bytes_read / rank.bytes_total)
        at = "done" if rank.is_done else rank.tensor
        bars.append(_bar(f"rank {rank.rank}", fraction, f"{human(rank.bytes_read, 'B')} · {at}"))
    drawing = draw_svg(chart) if chart is not None else ""
    return f'<div style="font:13px system-ui,sans-serif;line-height:1.5;max-width:800px">{"".join(bars)}{drawing}</div>'


def _bar(label: str, fraction: float, text: str, *, is_bold: bool = False) -> str:
    weight = "font-weight:600;" if is_bold else ""
    bar = "display:block;height:9px;border-radius:5px;"
    return (
        f'<div style="display:flex;gap:10px;align-items:center;{weight}">'
        f'<span style="flex:0 0 9em">{html.escape(label)}</span>'
        f'<span style="flex:0 0 14em;{bar}background:rgba(127,127,127,.25)">'
        f'<span style="{bar}background:#2f6fde;width:{fraction:.1%}"></span></span>'
        f'<span style="flex:0 0 3em;text-align:right">{fraction:.0%}</span>'
        f'<span style="overflow:hidden;white-space:nowrap;text-overflow:ellipsis">{html.escape(text)}</span></div>'
    )


def load_progress(
    *, num_ranks: int | None = None, title: str = "Loading weights"
) -> LoadProgressView | TerminalProgress:
    """The right watcher for where this runs: a panel in a notebook kernel that has ipywidgets, else a terminal bar."""
    if _in_notebook():
        try:
            return LoadProgressView(num_ranks=num_ranks, title=title)
        except ImportError:
            pass
    return TerminalProgress(num_ranks=num_ranks)


def _in_notebook() -> bool:
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    return hasattr(get_ipython(), "kernel")
