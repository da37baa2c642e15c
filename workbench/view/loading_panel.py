"""A live panel for notebooks while ranks load: how far each is, and what its time goes into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from workbench.view.charts import BarChart, Chart
from workbench.view.history_panel import HistoryPanel
from workbench.view.live import INTERVAL_S
from workbench.view.loading import load_stage_bars
from workbench.view.panel import progress_html
from workbench.view.progress import LoadWatch, ProgressReport

__all__ = ["LoadStagesView"]


class StagesReport(ProgressReport, Protocol):
    """A rank's progress with its seconds so far by stage."""

    @property
    def stages(self) -> Mapping[str, float]: ...


class LoadStagesView(HistoryPanel):
    """Use as a progress callback inside a `with` block:

        with LoadStagesView(num_ranks=2) as view:
            deployment = Deployment.start(path, layout, on_progress=view)

    Reports may come from any thread; the latest of each rank is kept. On leaving, the stages are shown once more as a
    static chart.
    """

    def __init__(self, *, num_ranks: int | None = None, title: str = "Loading", interval_s: float = INTERVAL_S) -> None:
        self.watch, self.title = LoadWatch(num_ranks), title
        self._stages: dict[int, dict[str, object]] = {}
        super().__init__(self.watch, interval_s=interval_s, name="load-stages")

    def __call__(self, report: StagesReport) -> None:
        with self._lock:
            own = {"rank": report.rank, "seconds": report.seconds, "seconds_by_stage": dict(report.stages)}
            self._stages[report.rank] = own
            self.watch(report)

    def chart(self) -> BarChart | None:
        """Seconds by stage and rank; None before the first report."""
        begun = [own for own in self._stages.values() if own["seconds"]]
        return load_stage_bars(begun) if begun else None

    def _drawing(self) -> str:
        return progress_html(self.watch.snapshot(), self.chart(), title=self.title)

    def _charts(self) -> Sequence[Chart]:
        chart = self.chart()
        return [] if chart is None else [chart]
