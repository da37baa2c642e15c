"""Charts as small, self-contained SVG: no script, no font, no request. All text is escaped.

Inside a page the drawing takes its colours from the page (`currentColor`, CSS variables --series-1 …), so it follows a
dark theme; `standalone` paints its own light background, for viewers that show an image on whatever they have.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from workbench.base import human
from workbench.view.charts import BarChart, Chart, LineChart

__all__ = ["COLOURS", "draw_svg"]

COLOURS = ("#2f6fde", "#d9822b", "#2b9a66", "#b5509c", "#6b6f76", "#c23b3b", "#0f8ea3", "#8a6d1b")  # readable on both
WIDTH = 760
MARGIN = 14
LINE = 18  # height of a line of text
FONT = 'font-family="system-ui, -apple-system, Segoe UI, Roboto, sans-serif"'
BAR_HEIGHT, BAR_STEP = 16, 24
PLOT_HEIGHT = 220
CHAR = 6.7  # average advance of a character at 12 px, for margins


def draw_svg(chart: Chart, *, standalone: bool = False, width: int = WIDTH) -> str:
    """One `<svg>` element with title, axis labels and units."""
    body, height = _bars(chart, width) if isinstance(chart, BarChart) else _lines(chart, width)
    colour, background = "", ""
    if standalone:
        colour = ' color="#1c1f23"'
        background = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    label = html.escape(chart.title)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{label}" {FONT} font-size="12"{colour} style="max-width:100%;height:auto">'
        f"<title>{label}</title>{background}{body}</svg>"
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "", faint: bool = False) -> str:
    style = (f' font-weight="{weight}"' if weight else "") + (' fill-opacity="0.7"' if faint else "")
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor"{style}>{html.escape(text)}</text>'


def _fit(text: str, pixels: float) -> str:
    """`text` cut with an ellipsis to about that width."""
    most = max(4, int(pixels / CHAR))
    return text if len(text) <= most else text[: most - 1] + "…"


def _colour(idx: int) -> str:
    return f"var(--series-{idx % len(COLOURS) + 1}, {COLOURS[idx % len(COLOURS)]})"


def _title(chart: Chart, width: int) -> str:
    return _text(MARGIN, MARGIN + 12, _fit(chart.title, width - 2 * MARGIN), weight="600")


def _bars(chart: BarChart, width: int) -> tuple[str, int]:
    texts = [chart.text(i) for i in range(len(chart.values))]
    left = MARGIN + min(260, 8 + CHAR * max(map(len, chart.labels), default=0))
    right = width - MARGIN - 8 - CHAR * max(map(len, texts), default=0)
    top, most = MARGIN + 2 * LINE, max(chart.values, default=0.0) or 1.0
    parts = [_title(chart, width)]
    for i, (label, value) in enumerate(zip(chart.labels, chart.values, strict=True)):
        y = top + i * BAR_STEP
        length = max(0.0, right - left) * value / most
        parts.append(_text(left - 8, y + 12, _fit(label, left - MARGIN), anchor="end"))
        parts.append(
            f'<rect x="{left:.1f}" y="{y}" width="{length:.1f}" height="{BAR_HEIGHT}" rx="2" fill="{_colour(0)}">'
            f"<title>{html.escape(f'{label}: {texts[i]}')}</title></rect>"
        )
        parts.append(_text(left + length + 6, y + 12, texts[i], faint=True))
    bottom = top + len(chart.values) * BAR_STEP + LINE
    parts.append(_text(left, bottom, f"{chart.x_label} [{chart.unit}]", faint=True))
    return "".join(parts) + _note(chart.note, bottom + LINE, width), bottom + LINE * (2 if chart.note else 1)


def _note(note: str, y: float, width: int) -> str:
    return _text(MARGIN, y, _fit(note, width - 2 * MARGIN), faint=True) if note else ""


def _lines(chart: LineChart, width: int) -> tuple[str, int]:
    xs = [x for s in chart.series for x in s.x]
    ys = [y for s in chart.series for y in s.y if y > 0 or not chart.log_y]
    if chart.limit is not None and (chart.limit > 0 or not chart.log_y):
        ys.append(chart.limit)
    x_ticks = ticks(min(xs, default=0.0), max(xs, default=1.0))
    y_ticks = decades(ys) if chart.log_y else ticks(min([0.0, *ys]), max(ys, default=1.0))
    left, right = MARGIN + 74, width - MARGIN - 10
    top = MARGIN + 3 * LINE + (LINE if len(chart.series) > 1 else 0)
    bottom = top + PLOT_HEIGHT

    def at_x(x: float) -> float:
        return left + (right - left) * (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])

    def at_y(y: float) -> float:
        low, high, value = y_ticks[0], y_ticks[-1], y
        if chart.log_y:
            low, high, value = math.log10(low), math.log10(high), math.log10(y)
        return bottom - (bottom - top) * (value - low) / (high - low)

    parts = [_title(chart, width), *_legend(chart, width)]
    for tick in y_ticks:
        y = at_y(tick)
        parts.append(f'<path d="M{left} {y:.1f}H{right}" stroke="currentColor" stroke-opacity="0.15"/>')
        parts.append(_text(left - 6, y + 4, _tick_text(tick, chart.y_unit, chart.log_y), anchor="end", faint=True))
    for tick in x_ticks:
        parts.append(_text(at_x(tick), bottom + 16, _tick_text(tick, "", False), anchor="middle", faint=True))
    if chart.limit is not None and (chart.limit > 0 or not chart.log_y):
        y = at_y(chart.limit)
        parts.append(f'<path d="M{left} {y:.1f}H{right}" stroke="{_colour(5)}" stroke-dasharray="5 4"/>')
        parts.append(_text(right, y - 5, f"limit {chart.limit:g}", anchor="end", faint=True))
    for i, series in enumerate(chart.series):
        points = [(at_x(x), at_y(y)) for x, y in zip(series.x, series.y, strict=True) if y > 0 or not chart.log_y]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{_colour(i)}" stroke-width="2"/>')
        if len(points) <= 40:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{_colour(i)}"/>' for x, y in points]
    y_name = f"{chart.y_label} [{chart.y_unit}]" if chart.y_unit else chart.y_label
    x_name = f"{chart.x_label} [{chart.x_unit}]" if chart.x_unit else chart.x_label
    parts.append(_text(MARGIN, top - 12, y_name, faint=True))
    parts.append(_text((left + right) / 2, bottom + 34, x_name, anchor="middle", faint=True))
    end = bottom + 34
    return "".join(parts) + _note(chart.note, end + LINE, width), int(end + LINE * (2 if chart.note else 1) - 6)


def _legend(chart: LineChart, width: int) -> list[str]:
    if len(chart.series) < 2:
        return []
    parts, x, y = [], float(MARGIN), MARGIN + 12 + LINE
    for i, series in enumerate(chart.series):
        size = 22 + CHAR * len(series.name)
        if x + size > width - MARGIN:
            parts.append(_text(x, y, f"and {len(chart.series) - i} more", faint=True))
            break
        parts.append(f'<rect x="{x:.1f}" y="{y - 9}" width="10" height="10" rx="2" fill="{_colour(i)}"/>')
        parts.append(_text(x + 14, y, series.name, faint=True))
        x += size
    return parts


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values that cover [low, high]; at least two, also where low equals high."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1.0, 2.0, 2.5, 5.0, 10.0) if m * power >= raw)
    first, last = math.floor(low / step), math.ceil(high / step - 1e-9)
    return [n * step for n in range(first, last + 1)]


def decades(values: Sequence[float]) -> list[float]:
    """Powers of ten that cover the values, with at most about six of them."""
    low = math.floor(math.log10(min(values, default=0.1)))
    high = math.ceil(math.log10(max(values, default=1.0)))
    high = max(high, low + 1)
    step = max(1, math.ceil((high - low) / 6))
    high = low + step * math.ceil((high - low) / step)
    return [10.0**n for n in range(low, high + 1, step)]


def _tick_text(value: float, unit: str, is_log: bool) -> str:
    if is_log:
        return f"{value:.0e}"
    return human(value, unit) if unit else f"{value:g}"
