"""A live panel for notebooks while a model is trained: how far it is, its loss, and how evenly the experts are used."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from workbench.view.charts import Chart
from workbench.view.history_panel import HistoryPanel
from workbench.view.live import INTERVAL_S
from workbench.view.svg import draw_svg
from workbench.view.training import TrainingHistory, balance_chart, loss_chart

__all__ = ["TrainingView", "training_html"]


class TrainingView(HistoryPanel):
    """Use as the `on_record` of a training run inside a `with` block:

        with TrainingView(num_steps=config.steps) as view:
            report = train(recipe, out, on_record=view)

    Records may come from any thread. What is kept of them does not grow with the run. On leaving, both charts are shown
    once more as static outputs, which also viewers without widgets display.
    """

    def __init__(self, *, num_steps: int, title: str = "Training", interval_s: float = INTERVAL_S) -> None:
        self.history = TrainingHistory()
        self.num_steps, self.title = num_steps, title
        super().__init__(self.history, interval_s=interval_s, name="training")

    def __call__(self, record: Mapping[str, Any]) -> None:
        with self._lock:
            self.history.add(record)

    def _drawing(self) -> str:
        return training_html(self.history, self.num_steps, title=self.title)

    def _charts(self) -> Sequence[Chart]:
        return [loss_chart(self.history), balance_chart(self.history)] if self.history.points else []


def training_html(history: TrainingHistory, num_steps: int, *, title: str = "Training") -> str:
    """The panel's HTML, all text escaped: a bar, the last step in figures, the last exam, two charts."""
    last = history.last
    done = 0 if last is None else int(last["step"]) + 1
    share = min(1.0, done / num_steps) if num_steps else 1.0
    lines = [f"{title}: step {done:,} of {num_steps:,}"]
    if last is not None:
        left_s = (num_steps - done) * float(last["seconds"])
        lines.append(
            f"loss {last['loss']:.3f} · {last['phase']} weights · {last['tokens_per_s']:,.0f} tokens/s · "
            f"busiest expert {max(last['load'].values(), default=1.0):.2f} times its share · {left_s:.0f} s left"
        )
    if history.lesson is not None:
        facts = {key: value for key, value in history.lesson.items() if key not in ("kind", "step", "seconds")}
        lines.append(f"lesson of the {history.lesson['kind']}: " + ", ".join(f"{k} {v:g}" for k, v in facts.items()))
    if history.exams:
        step, scores = history.exams[-1]
        marks = ", ".join(f"{kind} {right}/{num}" for kind, (right, num) in scores.items())
        lines.append(f"held out after {step:,} steps: {marks}")
    bar = "display:block;height:9px;border-radius:5px;"
    drawings = [draw_svg(loss_chart(history)), draw_svg(balance_chart(history))] if history.points else []
    return (
        '<div style="font:13px system-ui,sans-serif;line-height:1.5;max-width:800px">'
        f'<div style="font-weight:600">{html.escape(lines[0])}</div>'
        f'<span style="{bar}background:rgba(127,127,127,.25)"><span style="{bar}background:#2f6fde;width:{share:.1%}">'
        f"</span></span>{''.join(f'<div>{html.escape(line)}</div>' for line in lines[1:])}{''.join(drawings)}</div>"
    )
