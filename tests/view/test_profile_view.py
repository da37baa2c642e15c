"""Profiles drawn: the finding stands in the title, units on the axes, and a live panel that does not grow."""

from __future__ import annotations

import math
import random
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest
from one_cell import run_cell

from workbench.view import (
    LoadHistory,
    category_bars,
    communication_bars,
    comparison_bars,
    draw_svg,
    expert_lines,
    latency_curves,
    request_timeline,
    roofline_bars,
)
from workbench.view.profile_panel import RING, Sketch, load_html


def request(first: float | None, end: float | None) -> dict[str, Any]:
    return {"first_token_s": first, "longest_pause_s": None, "end_to_end_s": end}


def load_record() -> dict[str, Any]:
    requests = [request(0.1 * n, 1.0 + n) for n in range(1, 11)] + [request(None, None)]
    first = {"count": 10, "p50": 0.5, "high": 1.0}
    summary = {"first_token_s": first, "num_failed": 1}
    return {"requests": requests, "summary": summary, "load": {"text": "11 requests, closed loop"}}


LEDGER = {
    "num_steps": 2,
    "seconds": 4.0,
    "by_category": {"grouped_gemm": 2.0, "gemm": 1.0, "communication": 0.5, "host gap": 0.75, "overlap": -0.25},
    "overlap_s": 0.25,
    "clock": "host",
    "operators": [
        {"name": "aten::mm", "shapes": [[4, 8], [8, 2]], "count": 10, "seconds": 2.0, "least_s": 0.05},
        {"name": "aten::add", "shapes": [[4]], "count": 1, "seconds": 0.1, "least_s": 0.09},
        {"name": "aten::exp", "shapes": [], "count": 1, "seconds": 1.0, "least_s": None},
    ],
}
COMMUNICATION = {
    "ranks": [
        {"rank": 0, "count": 4, "waiting_s": 3.0, "transfer_s": 1.0, "caused_s": 0.0},
        {"rank": 1, "count": 4, "waiting_s": 0.0, "transfer_s": 1.0, "caused_s": 3.0},
    ],
    "seconds": 10.0,
    "latest": 1,
    "share": 0.25,
    "waiting_share": 0.15,
    "mode": "entry times",
}


def test_latencies_are_curves_over_requests_and_failures_are_told() -> None:
    chart = latency_curves(load_record())
    assert [s.name for s in chart.series] == ["first token", "end to end"]
    assert chart.series[0].y == tuple(10.0 * n for n in range(1, 11))
    assert (chart.x_unit, chart.y_unit) == ("s", "%")
    assert "half of 10 first tokens within 500 ms" in chart.title
    assert "1 failed" in chart.note
    with pytest.raises(ValueError, match="no request"):
        latency_curves({**load_record(), "requests": [request(None, None)]})


def test_a_step_is_drawn_with_its_largest_part_in_the_title() -> None:
    chart = category_bars(LEDGER)
    assert chart.title == "experts (grouped GEMM) takes 50% of a step of 2 s"
    assert chart.values == (1.0, 0.5, 0.375, 0.25)
    assert "side by side" in chart.note
    with pytest.raises(ValueError, match="no step"):
        category_bars({**LEDGER, "num_steps": 0})


def test_the_operator_with_most_to_win_is_named_and_unknown_limits_are_left_out() -> None:
    chart = roofline_bars(LEDGER)
    assert chart.values == (pytest.approx(25.0), pytest.approx(90.0))
    assert chart.title.startswith("aten::mm at 25 %")
    with pytest.raises(ValueError, match="known limit"):
        roofline_bars({**LEDGER, "operators": LEDGER["operators"][2:]})


def test_communication_names_the_late_rank() -> None:
    chart = communication_bars(COMMUNICATION)
    assert "the others waited for rank 1" in chart.title
    assert "15% waiting" in chart.title
    assert dict(zip(chart.labels, chart.values, strict=True))["rank 0, waiting"] == 3.0
    assert "nobody waited" in communication_bars({**COMMUNICATION, "latest": None}).title


def test_experts_are_sorted_busiest_first_over_the_mean() -> None:
    layers = [
        {"layer": 3, "counts": [1, 6, 1, 0], "busiest": 3.0, "num_hit": 3},
        {"layer": 1, "counts": [0, 0], "busiest": 0},
    ]
    chart = expert_lines({"layers": layers})
    (line,) = chart.series
    assert line.y == (3.0, 0.5, 0.5, 0.0)
    assert "3.00 times its share (layer 3), 3 of 4 were hit" in chart.title


def test_a_comparison_shows_both_and_names_what_changed_most() -> None:
    changes = [
        {"name": "first_token_s", "before": 1.0, "after": 1.5, "verdict": "worse"},
        {"name": "per_token_s", "before": 0.1, "after": 0.1, "verdict": "no difference seen"},
    ]
    chart = comparison_bars({"changes": changes, "differences": [["commit", "a", "b"]]})
    assert chart.title == "first token changed most: +50% (worse)"
    assert chart.note == "commit: a → b"


def test_every_chart_is_drawn_with_its_unit() -> None:
    timeline = request_timeline([5.0, 6.0], [0.1, 0.9], [1.0, 2.0])
    assert "of the request due at 1 s" in timeline.title
    for chart in (latency_curves(load_record()), category_bars(LEDGER), communication_bars(COMMUNICATION), timeline):
        drawn = draw_svg(chart)
        assert "[s]" in drawn
        assert chart.title[:20] in drawn


def timing(n: int, *, first: float = 0.5, **fields: Any) -> SimpleNamespace:
    known = {"submitted_s": 10.0 + n, "arrivals": ((10.0 + n + first, 1), (11.0 + n, 9)), "num_tokens": 10}
    known |= {"first_token_s": first, "per_token_s": 0.05, "end_to_end_s": 1.0, "error": "", "is_warm_up": False}
    return SimpleNamespace(**{**known, **fields})


def test_a_sketch_knows_percentiles_to_within_a_step() -> None:
    rng, sketch = random.Random(3), Sketch()
    values = [math.exp(rng.gauss(-2, 1.5)) for _ in range(5000)]
    for value in values:
        sketch.add(value)
    values.sort()
    for level in (1, 50, 90, 99):
        exact = values[math.ceil(level / 100 * len(values)) - 1]
        assert sketch.percentile(level) == pytest.approx(exact, rel=0.05)
    assert Sketch().percentile(50) is None
    sketch.add(0.0)
    sketch.add(1e9)


def test_the_panel_counts_what_it_is_told_and_escapes_it() -> None:
    history = LoadHistory()
    history.add(timing(0, is_warm_up=True))
    for n in range(4):
        history.add(timing(n))
    history.add(timing(9, error="<b>full</b>", first_token_s=None))
    drawn = load_html(history, 10, title="A & B")
    assert "A &amp; B: 5 of 10 requests, after 1 to warm up" in drawn
    assert "1 failed, the last with &lt;b&gt;full&lt;/b&gt;" in drawn
    assert "width:50.0%" in drawn
    assert history.tokens_per_s == 40 / 4.0
    assert "p50 about" in drawn
    assert "(n = 4)" in drawn


def test_memory_is_flat_over_as_many_requests_as_hours_bring() -> None:
    """An hour at 20 redraws a second is 72,000 news; after the ring is full nothing more is kept."""
    history = LoadHistory()
    for n in range(2 * RING):
        history.add(timing(n))
    load_html(history, 10)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for n in range(72_000):
            history.add(timing(n))
        load_html(history, 10)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(history.latest) == RING
    assert grown < 200_000, f"{grown} bytes more after 72,000 requests"


CELL = """
import time
from types import SimpleNamespace
from workbench.view import LoadView

with LoadView(num_requests=600) as view:
    for i in range(600):
        view(SimpleNamespace(submitted_s=i, arrivals=((i + 0.5, 1), (i + 1.0, 9)), num_tokens=10, first_token_s=0.5,
                             per_token_s=0.05, end_to_end_s=1.0, error="", is_warm_up=i < 2))
        time.sleep(0.002)
    print("cell is done")
view.close()
"""


@pytest.mark.notebook
def test_panel_moves_while_the_cell_is_busy_and_leaves_a_picture() -> None:
    book, messages = run_cell(CELL)
    printed = next(at for at, kind in messages if kind == "stream")
    assert sum(kind == "comm_msg" and at < printed for at, kind in messages) >= 5, "the panel stood still"
    states = book.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"].values()
    assert any("598 of 600 requests, after 2 to warm up" in str(x["state"].get("value")) for x in states)
    pictures = [out["data"] for out in book.cells[0].outputs if "image/svg+xml" in out.get("data", {})]
    assert len(pictures) == 1
    assert "slowest first token took 500 ms" in pictures[0]["text/plain"]
