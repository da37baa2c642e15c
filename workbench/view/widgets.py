"""A slider over results: the reader moves it, the drawing below follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from workbench.base import Table
from workbench.view.charts import Chart
from workbench.view.svg import draw_svg

__all__ = ["ChoicePanel"]

Choice = TypeVar("Choice")


class ChoicePanel(Generic[Choice]):
    """Shows `function(choice)`, a chart or a table, for the choice that the slider stands at:

        panel = ChoicePanel(lambda tokens: memory_bars(ledgers[tokens]), ledgers, label="context", text="{:,}".format)
        panel                          # as the last line of a cell
        panel.slider.value = 131072    # what moving it does

    The function is called once for each choice, before anything is shown: moving the slider only selects. `results`
    keeps what it returned, for the static picture that has to follow every widget. `text` names a choice. Raises
    ValueError where there is nothing to choose.
    """

    def __init__(
        self,
        function: Callable[[Choice], Chart | Table],
        choices: Iterable[Choice],
        *,
        label: str,
        text: Callable[[Choice], str] = str,
    ) -> None:
        import ipywidgets

        self.results: dict[Choice, Chart | Table] = {choice: function(choice) for choice in choices}
        if not self.results:
            raise ValueError(f"nothing to choose for {label!r}")
        self.slider = ipywidgets.SelectionSlider(
            options=[(text(choice), choice) for choice in self.results],
            description=label,
            style={"description_width": "initial"},
        )
        self.drawing = ipywidgets.HTML()
        self._box = ipywidgets.VBox([self.slider, self.drawing])
        self.slider.observe(lambda change: self._draw(), names="value")
        self._draw()

    @property
    def result(self) -> Chart | Table:
        """What is shown."""
        return self.results[self.slider.value]

    def _draw(self) -> None:
        # A trait, since what a callback prints into an Output is lost where the notebook runs without a page.
        result = self.result
        self.drawing.value = result.to_html() if isinstance(result, Table) else draw_svg(result)

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        return self._box._repr_mimebundle_(**kwargs)
