"""A live panel for notebooks while a load runs: how far it is, tokens a second, latencies as they come.

What is kept does not grow with the run: counters, a ring of the latest requests, and a sketch of all latencies in
fixed steps of a few percent, from which percentiles are read.
"""

from __future__ import annotations

import html
import math
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from workbench.base import human
from workbench.view.charts import Chart, LineChart
from workbench.view.history_panel import HistoryPanel
from workbench.view.live import INTERVAL_S
from workbench.view.profile import request_timeline
from workbench.view.svg import draw_svg

__all__ = ["LoadHistory", "LoadView", "Sketch", "load_html"]

RING = 200  # latest requests that are drawn
STEP = 1.05  # ratio of neighbouring steps of a sketch: percentiles are right to within 5 %
LEAST_S, MOST_S = 1e-6, 1e5


class Timing(Protocol):
    """What the panel reads of a request; a `RequestTiming` has it."""

    @property
    def submitted_s(self) -> float: ...
    @property
    def arrivals(self) -> Sequence[tuple[float, int]]: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def first_token_s(self) -> float | None: ...
    @property
    def per_token_s(self) -> float | None: ...
    @property
    def end_to_end_s(self) -> float | None: ...
    @property
    def error(self) -> str: ...
    @property
    def is_warm_up(self) -> bool: ...


class Sketch:
    """Percentiles of any number of times in a few hundred counters."""

    def __init__(self) -> None:
        self.count = 0
        self._counts = [0] * (self._place(MOST_S) + 1)

    def add(self, seconds: float) -> None:
        self._counts[self._place(seconds)] += 1
        self.count += 1

    def percentile(self, level: float) -> float | None:
        """The value below which `level` percent lie, to within 5 %; None where there is none."""
        wanted, seen = math.ceil(level / 100 * self.count), 0
        for place, count in enumerate(self._counts):
            seen += count
            if count and seen >= wanted:
                return LEAST_S * STEP ** (place + 0.5)
        return None

    @staticmethod
    def _place(seconds: float) -> int:
        return int(math.log(min(MOST_S, max(LEAST_S, seconds)) / LEAST_S) / math.log(STEP))


class LoadHistory:
    """What is kept of a load, however long."""

    def __init__(self) -> None:
        self.num_done = self.num_failed = self.num_warm_up = self.num_tokens = 0
        self.first_token, self.per_token = Sketch(), Sketch()
        self.latest: deque[tuple[float, float, float]] = deque(maxlen=RING)  # due, first token, end to end
        self.last_error = ""
        self.version = 0
        self._began_s = math.inf
        self._ended_s = -math.inf

    def add(self, timing: Timing) -> None:
        self.version += 1
        if timing.is_warm_up:
            self.num_warm_up += 1
            return
        self.num_done += 1
        self._began_s = min(self._began_s, timing.submitted_s)
        if timing.error or timing.first_token_s is None or timing.end_to_end_s is None:
            self.num_failed += 1
            self.last_error = timing.error or "no token came"
            return
        self._ended_s = max(self._ended_s, timing.arrivals[-1][0])
        self.num_tokens += timing.num_tokens
        self.first_token.add(timing.first_token_s)
        if timing.per_token_s is not None:
            self.per_token.add(timing.per_token_s)
        self.latest.append((timing.submitted_s, timing.first_token_s, timing.end_to_end_s))

    @property
    def tokens_per_s(self) -> float | None:
        elapsed = self._ended_s - self._began_s
        return self.num_tokens / elapsed if 0 < elapsed < math.inf else None

    def chart(self) -> LineChart:
        """Latencies of the latest requests. Raises ValueError before the first answer."""
        latest = sorted(self.latest)
        return request_timeline([x for x, _, _ in latest], [y for _, y, _ in latest], [z for _, _, z in latest])

    def lines(self) -> list[str]:
        """The state in words, most important first."""
        lines = []
        for name, sketch in (("first token", self.first_token), ("per token", self.per_token)):
            p50, p90 = sketch.percentile(50), sketch.percentile(90)
            if p50 is not None and p90 is not None:
                lines.append(f"{name}: p50 about {human(p50, 's')}, p90 about {human(p90, 's')} (n = {sketch.count:,})")
        if self.tokens_per_s is not None:
            lines.append(f"{self.tokens_per_s:,.1f} tokens/s together")
        if self.num_failed:
            lines.append(f"{self.num_failed:,} failed, the last with {self.last_error}")
        return lines


class LoadView(HistoryPanel):
    """Use as the `on_request` of a load inside a `with` block:

        with LoadView(num_requests=load.num_requests) as view:
            report = generate_load(target, plan, on_request=view)

    Requests may be told from any thread. On leaving, the chart is shown once more as a static output.
    """

    def __init__(self, *, num_requests: int, title: str = "Load", interval_s: float = INTERVAL_S) -> None:
        self.history = LoadHistory()
        self.num_requests, self.title = num_requests, title
        super().__init__(self.history, interval_s=interval_s, name="load")

    def __call__(self, timing: Timing) -> None:
        with self._lock:
            self.history.add(timing)

    def _drawing(self) -> str:
        return load_html(self.history, self.num_requests, title=self.title)

    def _charts(self) -> Sequence[Chart]:
        return [self.history.chart()] if self.history.latest else []


def load_html(history: LoadHistory, num_requests: int, *, title: str = "Load") -> str:
    """The panel's HTML, all text escaped: a bar, figures so far, the latest requests."""
    share = min(1.0, history.num_done / num_requests) if num_requests else 1.0
    head = f"{title}: {history.num_done:,} of {num_requests:,} requests"
    head += f", after {history.num_warm_up} to warm up" if history.num_warm_up else ""
    bar = "display:block;height:9px;border-radius:5px;"
    drawing = draw_svg(history.chart()) if history.latest else ""
    return (
        '<div style="font:13px system-ui,sans-serif;line-height:1.5;max-width:800px">'
        f'<div style="font-weight:600">{html.escape(head)}</div>'
        f'<span style="{bar}background:rgba(127,127,127,.25)"><span style="{bar}background:#2f6fde;width:{share:.1%}">'
        f"</span></span>{''.join(f'<div>{html.escape(line)}</div>' for line in history.lines())}{drawing}</div>"
    )
