"""Plans in pictures: the memory of a rank, the time of a step, and what a longer context costs.

Drawn from the JSON of the planner's records. Their figures are predictions, and the charts say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.base import human
from workbench.view.charts import BarChart, LineChart, Series

__all__ = ["cache_lines", "memory_bars", "step_bars"]

SMALL = 0.01  # of the peak: lines below it are drawn together
MOST_LINES = 10


def memory_bars(ledger: Mapping[str, Any]) -> BarChart:
    """What fills a rank at its peak, largest first, and what is left; from a memory ledger's record.

    Lines of the phase that is not the peak (loading or serving) are left out, so the bars add up to the peak.
    """
    is_serving = ledger["serving_peak"] >= ledger["load_peak"]
    lines = [x for x in ledger["lines"] if _counts(x, is_serving)]
    peak, capacity, free = sum(x["bytes"] for x in lines), ledger["capacity"], ledger["free"]
    parts = sorted(((_label(x), x["bytes"]) for x in lines), key=lambda part: -part[1])
    bars = _with_rest(parts, sum(size >= SMALL * peak for _, size in parts))
    if free is not None and free > 0:
        bars.append(("free", free))
    if capacity is None or free is None:
        finding = f"{human(peak, 'B')} on each rank"
    elif free >= 0:
        finding = f"{human(free, 'B')} of {human(capacity, 'B')} stay free on each rank"
    else:
        finding = f"{human(-free, 'B')} more than the {human(capacity, 'B')} of a device"
    whole = capacity or peak
    return BarChart(
        title=f"{ledger['layout']}: {finding}",
        labels=tuple(name for name, _ in bars),
        values=tuple(float(size) for _, size in bars),
        texts=tuple(f"{human(size, 'B')} · {size / whole:.1%}" for _, size in bars),
        unit="B",
        x_label="memory of each rank",
        note=f"stage {ledger['stage']}, {ledger['precision']}, predicted peak while "
        + ("serving" if is_serving else "loading"),
    )


def _counts(line: Mapping[str, Any], is_serving: bool) -> bool:
    """Whether a line is part of the peak: caches come after loading, the staging window is gone by then."""
    if is_serving:
        return bool(line["phase"] != "load")
    return line["phase"] == "load" or line["group"] in ("weights", "other")


def _label(line: Mapping[str, Any]) -> str:
    name = str(line["role"]).replace("_", " ")
    if line["group"] == "cache":
        return f"cache: {name}"
    return "runtime" if name == "other" else name


def step_bars(step: Mapping[str, Any]) -> BarChart:
    """Where a predicted step goes, longest work first, from a step cost's record. Raises ValueError for one without
    work."""
    lines = sorted(step["lines"], key=lambda x: -x["estimate_s"])
    whole = sum(x["estimate_s"] for x in lines)
    if not whole:
        raise ValueError("no step to draw")
    top = lines[0]
    times = f", {step['seconds'] / step['lower_s']:,.0f} times its lower bound" if step["lower_s"] else ""
    bars = _with_rest([(x["name"].replace("_", " "), x["estimate_s"]) for x in lines], MOST_LINES)
    return BarChart(
        title=f"{top['name']} takes {top['estimate_s'] / whole:.0%} of a predicted {step['phase']} step of "
        f"{human(step['seconds'], 's')}{times}",
        labels=tuple(name for name, _ in bars),
        values=tuple(seconds for _, seconds in bars),
        texts=tuple(f"{human(seconds, 's')} · {seconds / whole:.1%}" for _, seconds in bars),
        unit="s",
        x_label="predicted time, all stages together",
        note=f"basis: {step['basis']}; at least {human(step['lower_s'], 's')}",
    )


def cache_lines(caches: Mapping[int, int], state_bytes: int) -> LineChart:
    """Bytes of one sequence over its length: `caches` holds (tokens, bytes of keys, values or latents), ascending;
    `state_bytes` is what linear attention keeps at any length. Raises ValueError where there is no length."""
    if not caches:
        raise ValueError("no context to draw")
    lengths = list(caches)
    longest = lengths[-1]
    x = tuple(tokens / 1000 for tokens in lengths)
    larger = next((tokens for tokens in lengths if caches[tokens] > state_bytes), None)
    where = "nowhere here" if larger is None else f"from {larger:,} tokens on, of the lengths drawn"
    return LineChart(
        title=f"At {longest:,} tokens a sequence keeps {human(caches[longest], 'B')} of cache and "
        f"{human(state_bytes, 'B')} of state",
        series=(
            Series(name="cache of full attention", x=x, y=tuple(float(caches[tokens]) for tokens in lengths)),
            Series(name="state of linear attention", x=x, y=(float(state_bytes),) * len(lengths)),
        ),
        x_label="context",
        x_unit="1,000 tokens",
        y_label="bytes of one sequence",
        y_unit="B",
        log_y=True,
        note=f"whole model, before any split; the cache is larger {where}",
    )


def _with_rest(parts: Sequence[tuple[str, float]], most: int) -> list[tuple[str, float]]:
    """The first `most` parts, and the sum of the others."""
    shown, rest = list(parts[:most]), parts[most:]
    return [*shown, (f"{len(rest)} smaller ones", sum(size for _, size in rest))] if rest else shown
