"""A live panel over a history: drawn again while a block runs and news arrive, and left as static charts."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from workbench.view.charts import Chart
from workbench.view.live import Redrawer
from workbench.view.notebook import chart_bundle

__all__ = ["HistoryPanel"]


class History(Protocol):
    """Anything that counts its changes."""

    version: int


class HistoryPanel(ABC):
    """An HTML widget shown on entering a `with` block. News are added under `_lock`, from any thread; on leaving, the
    charts are shown once more as static outputs, which also viewers without widgets display."""

    def __init__(self, history: History, *, interval_s: float, name: str) -> None:
        import ipywidgets

        self._lock = threading.Lock()  # a chart is drawn from a history that stands still
        self._redrawer = Redrawer(self._redraw, lambda: history.version, interval_s=interval_s, name=name)
        self.panel = ipywidgets.HTML(self._drawing())

    @abstractmethod
    def _drawing(self) -> str:
        """The panel's HTML as things stand."""

    @abstractmethod
    def _charts(self) -> Sequence[Chart]:
        """What stays in the notebook; none where nothing came."""

    @property
    def num_redraws(self) -> int:
        return self._redrawer.num_redraws

    def __enter__(self) -> Self:
        from IPython.display import display

        if not self._redrawer.is_started:
            display(self.panel)
            self._redrawer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop redrawing and leave static pictures. A second call does nothing."""
        from IPython.display import display

        if self._redrawer.stop():
            for chart in self._charts():
                display(chart_bundle(chart), raw=True)

    def _redraw(self) -> None:
        with self._lock:
            drawing = self._drawing()
        self.panel.value = drawing
