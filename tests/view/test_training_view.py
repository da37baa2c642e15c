"""A training run drawn from its records: what is kept stays small, phases stay apart, and the panel moves."""

from __future__ import annotations

import json
from typing import Any

import nbformat
import pytest
from one_cell import run_cell

from workbench.view import TrainingHistory, balance_chart, draw_svg, exam_chart, loss_chart
from workbench.view.training import MAX_POINTS
from workbench.view.training_panel import training_html


def step(number: int, loss: float = 1.0, phase: str = "plain", load: dict[Any, float] | None = None) -> dict[str, Any]:
    return {
        "kind": "step",
        "step": number,
        "loss": loss,
        "phase": phase,
        "load": {1: 1.5, 3: 1.2} if load is None else load,
        "seconds": 0.5,
        "tokens_per_s": 1000.0,
    }


def run(steps: int, quantised_from: int) -> TrainingHistory:
    history = TrainingHistory()
    for i in range(steps):
        history.add(step(i, loss=8.0 / (i + 1), phase="plain" if i < quantised_from else "quantised"))
    return history


def test_a_short_run_is_kept_step_by_step() -> None:
    history = run(10, 7)
    assert [point.step for point in history.points] == list(range(1, 11))
    assert history.layers == (1, 3)
    assert history.version == 10


@pytest.mark.parametrize("steps", [MAX_POINTS + 1, 4000, 50_001])
def test_a_long_run_is_kept_in_a_few_hundred_points_that_average_all(steps: int) -> None:
    history = run(steps, steps * 3 // 4)
    points = history.points
    assert MAX_POINTS // 4 < len(points) <= MAX_POINTS
    assert sum(point.num for point in points) == steps
    assert points[-1].step == steps
    mean = sum(point.loss * point.num for point in points) / steps
    assert mean == pytest.approx(sum(8.0 / (i + 1) for i in range(steps)) / steps)


def test_the_change_of_phase_stays_where_it_was() -> None:
    history = run(3001, 2251)
    plain = [point for point in history.points if point.phase == "plain"]
    assert plain[-1].step == 2251
    assert sum(point.num for point in plain) == 2251


def test_records_of_a_file_and_of_a_running_loop_are_the_same() -> None:
    """A loop counts layers in numbers, JSON in text; and a curve has no kinds."""
    written = json.loads(json.dumps(step(4)))
    del written["kind"], written["seconds"]
    assert TrainingHistory([written]).points == TrainingHistory([step(4)]).points
    assert TrainingHistory([{"kind": "run", "step": 0, "layout": "dp2"}]).version == 0


def test_loss_is_drawn_by_phase_on_a_logarithmic_axis() -> None:
    chart = loss_chart(run(40, 30))
    assert [(s.name, s.x[0], s.x[-1]) for s in chart.series] == [("plain", 1, 30), ("quantised", 31, 40)]
    assert chart.log_y
    assert chart.title == "loss 8.00 at first, 0.200 after 40 steps"
    assert "published files" in chart.note
    assert "published files" not in loss_chart(run(40, 40)).note
    assert "nat" in draw_svg(chart)


def test_balance_has_a_line_a_layer_and_names_the_worst() -> None:
    history = TrainingHistory([step(0, load={2: 1.1, 5: 2.75})])
    chart = balance_chart(history)
    assert [(s.name, s.y) for s in chart.series] == [("layer 2", (1.1,)), ("layer 5", (2.75,))]
    assert "2.75" in chart.title
    assert chart.limit == 2.0


def test_exams_are_grouped_and_shown_in_percent() -> None:
    history = TrainingHistory()
    for number, right in ((499, 2), (999, 9)):
        history.add({"kind": "exam", "step": number, "scores": {"red": [right, 10], "blue": [1, 30], "word": [0, 10]}})
    chart = exam_chart(history, {"colours": ("red", "blue"), "reading": ("word", "digit"), "maths": ("sum",)})
    assert [(s.name, s.x, s.y) for s in chart.series] == [
        ("colours", (500.0, 1000.0), (7.5, 25.0)),
        ("reading", (500.0, 1000.0), (0.0, 0.0)),
    ]
    assert [s.name for s in exam_chart(history).series] == ["red", "blue", "word"]
    assert exam_chart(history).note == "50 questions an exam"


def test_nothing_to_draw_is_said() -> None:
    for chart in (loss_chart, balance_chart, exam_chart):
        with pytest.raises(ValueError, match="to draw"):
            chart(TrainingHistory())
    assert "step 0 of 30" in training_html(TrainingHistory(), 30)
    with pytest.raises(ValueError, match="no layer"):
        balance_chart(TrainingHistory([step(0, load={})]))


def test_panel_says_how_far_it_is_and_escapes_what_it_is_told() -> None:
    history = TrainingHistory([step(9, loss=0.25, phase="<b>")])
    history.add({"kind": "exam", "step": 9, "scores": {"<i>": [1, 2]}})
    drawn = training_html(history, 40, title="A & B")
    assert "A &amp; B: step 10 of 40" in drawn
    assert "loss 0.250 · &lt;b&gt; weights" in drawn
    assert "1.50 times its share · 15 s left" in drawn
    assert "held out after 10 steps: &lt;i&gt; 1/2" in drawn
    assert "width:25.0%" in drawn


def test_a_lesson_is_shown_until_the_next_step() -> None:
    history = TrainingHistory([step(4)])
    history.add({"kind": "tower", "step": 5, "lesson_step": 40, "seconds": 9.0, "loss": 0.5, "letter": 0.25})
    assert (history.version, len(history.points)) == (2, 1)
    assert "lesson of the tower: lesson_step 40, loss 0.5, letter 0.25" in training_html(history, 40)
    history.add(step(5))
    assert "lesson" not in training_html(history, 40)


CELL = """
import time
from workbench.view import TrainingView

with TrainingView(num_steps=2000) as view:
    for i in range(2000):
        view({"kind": "step", "step": i, "loss": 8 / (i + 1), "phase": "plain" if i < 1500 else "quantised",
              "load": {1: 1.5}, "seconds": 0.001, "tokens_per_s": 1000.0})
        time.sleep(0.0007)
    print("cell is done")
print("redraws", view.num_redraws)
view.close()
"""


@pytest.mark.notebook
def test_panel_moves_while_the_cell_is_busy_slowly_enough_for_a_page_and_leaves_pictures() -> None:
    book, messages = run_cell(CELL)
    printed = next(at for at, kind in messages if kind == "stream")
    updates = [at for at, kind in messages if kind == "comm_msg" and at < printed]
    assert len(updates) >= 5, "the panel stood still until the cell ended"
    assert all(b - a > 0.04 for a, b in zip(updates[::2], updates[2::2], strict=False)), "faster than 20 a second"
    states = book.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"].values()
    value = next(x["state"]["value"] for x in states if "step" in str(x["state"].get("value")))
    assert "step 2,000 of 2,000" in value
    pictures = [out["data"]["text/plain"] for out in book.cells[0].outputs if "image/svg+xml" in out.get("data", {})]
    assert len(pictures) == 2
    assert "after 2,000 steps" in pictures[0]
    assert pictures[1] == "the busiest expert takes 1.50 times its share in the worst layer at the end"
    assert len(nbformat.writes(book)) < 200_000
