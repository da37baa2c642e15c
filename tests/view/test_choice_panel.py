"""A slider over results: moving it selects, and nothing is computed twice."""

from __future__ import annotations

import pytest

from workbench.base import Table
from workbench.view import BarChart, ChoicePanel


def chart(tokens: int) -> BarChart:
    return BarChart(title=f"{tokens} <tokens>", labels=("a",), values=(float(tokens),), unit="B", x_label="bytes")


def test_moving_the_slider_draws_the_result_that_was_computed_before() -> None:
    asked: list[int] = []

    def function(tokens: int) -> BarChart:
        asked.append(tokens)
        return chart(tokens)

    panel = ChoicePanel(function, [8, 4096, 131072], label="context", text="{:,} tokens".format)
    assert "8 &lt;tokens&gt;" in panel.drawing.value
    panel.slider.value = 131072
    assert "131072 &lt;tokens&gt;" in panel.drawing.value
    assert panel.result == panel.results[131072] == chart(131072)
    assert asked == [8, 4096, 131072]
    assert [text for text, _ in panel.slider.options] == ["8 tokens", "4,096 tokens", "131,072 tokens"]
    assert "application/vnd.jupyter.widget-view+json" in panel._repr_mimebundle_()


def test_a_table_is_shown_as_one() -> None:
    panel = ChoicePanel(lambda name: Table(columns=("name",), rows=((name,),)), ["a&b", "c"], label="name")
    assert "<td>a&amp;b</td>" in panel.drawing.value


def test_nothing_to_choose_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to choose for 'context'"):
        ChoicePanel(chart, [], label="context")
