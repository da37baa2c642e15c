"""The load panel in a real notebook kernel: it moves while the cell is busy, and what is saved shows the end."""

from __future__ import annotations

from typing import Any

import nbformat
import pytest
from one_cell import run_cell

pytestmark = pytest.mark.notebook

CELL = """
import threading, time
from types import SimpleNamespace
from workbench.view import LoadProgressView, load_progress

def load(view, rank):
    for i in range(1, 31):
        time.sleep(0.03)
        view(SimpleNamespace(rank=rank, bytes_read=i * 1000 * (rank + 1), bytes_total=30_000 * (rank + 1),
                             seconds=i * 0.03, tensor=f"layers.{{i}}.w"))

with LoadProgressView(num_ranks=2, plotly={plotly}) as view:
    threads = [threading.Thread(target=load, args=(view, rank)) for rank in range(2)]
    [thread.start() for thread in threads]
    time.sleep(1.5)
    [thread.join() for thread in threads]
    print("cell is done")
assert isinstance(load_progress(), LoadProgressView)
assert view.num_redraws <= 25, view.num_redraws
"""


def widget_states(book: Any) -> list[dict[str, Any]]:
    return [x["state"] for x in book.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"].values()]


def test_panel_moves_while_the_cell_is_busy_and_leaves_a_static_picture() -> None:
    book, messages = run_cell(CELL.format(plotly=False))
    printed = next(at for at, kind in messages if kind == "stream")
    updates = [at for at, kind in messages if kind == "comm_msg"]
    assert sum(at < printed for at in updates) >= 5, "the panel stood still until the cell ended"
    value = next(state["value"] for state in widget_states(book) if "rank 1" in str(state.get("value")))
    assert "100%" in value
    assert "60 kB · done" in value
    static = book.cells[0].outputs[-1]["data"]
    assert "<svg" in static["image/svg+xml"]
    assert static["text/plain"].startswith("Loading weights: ████")
    assert "in 900 ms · 2 of 2 ranks" in static["text/plain"]
    assert len(nbformat.writes(book)) < 100_000


def test_stored_figure_widget_shows_the_end_and_not_the_beginning() -> None:
    book, _ = run_cell(CELL.format(plotly=True))
    (figure,) = (state for state in widget_states(book) if "_widget_data" in state)
    assert figure["_widget_layout"]["title"]["text"].startswith("2 ranks read 90 kB")
    ends = [trace["y"][-1] for trace in figure["_widget_data"]]
    assert ends == [30_000, 60_000]
