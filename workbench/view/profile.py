"""Profiles in pictures: latencies of a load, where a step goes, waiting against transfer, experts, two runs.

Drawn from the JSON of records, so that a figure of a run that has just ended and one of a file are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.base import human
from workbench.view.charts import MAX_POINTS, BarChart, LineChart, Series

__all__ = [
    "category_bars",
    "communication_bars",
    "comparison_bars",
    "expert_lines",
    "latency_curves",
    "request_timeline",
    "roofline_bars",
]

NAMES = {
    "gemm": "GEMM",
    "grouped_gemm": "experts (grouped GEMM)",
    "linear_attention": "recurrent attention",
    "host gap": "gap: nothing ran",
}
CURVES = {"first_token_s": "first token", "longest_pause_s": "longest pause", "end_to_end_s": "end to end"}


def latency_curves(load: Mapping[str, Any]) -> LineChart:
    """Share of requests that were at most so slow, one curve a figure, from a load's record. Raises ValueError where
    nothing was answered."""
    curves = []
    for key, name in CURVES.items():
        values = sorted(request[key] for request in load["requests"] if request[key] is not None)
        if values:
            picked = _picked(len(values))
            x = tuple(values[i] for i in picked)
            curves.append(Series(name=name, x=x, y=tuple(100 * (i + 1) / len(values) for i in picked)))
    if not curves:
        raise ValueError("no request was answered")
    first = load["summary"]["first_token_s"]
    failed = load["summary"]["num_failed"]
    return LineChart(
        title=f"half of {first['count']} first tokens within {human(first['p50'], 's')}, the slowest after "
        f"{human(first['high'], 's')}",
        series=tuple(curves),
        x_label="time since the request was due",
        x_unit="s",
        y_label="requests at most so slow",
        y_unit="%",
        note=str(load["load"]["text"]) + (f"; {failed} failed and are not drawn" if failed else ""),
    )


def request_timeline(starts: Sequence[float], firsts: Sequence[float], ends: Sequence[float]) -> LineChart:
    """First token and end to end of each request over the time that it was due, all in seconds of one clock; `starts`
    ascending. Raises ValueError where there is none."""
    if not starts:
        raise ValueError("no request to draw")
    picked = _picked(len(starts))
    zero = starts[0]
    x = tuple(starts[i] - zero for i in picked)
    worst = max(range(len(firsts)), key=lambda i: firsts[i])
    return LineChart(
        title=f"the slowest first token took {human(firsts[worst], 's')}, "
        f"of the request due at {starts[worst] - zero:.3g} s",
        series=(
            Series(name="first token", x=x, y=tuple(firsts[i] for i in picked)),
            Series(name="end to end", x=x, y=tuple(ends[i] for i in picked)),
        ),
        x_label="time since the first request was due",
        x_unit="s",
        y_label="latency",
        y_unit="s",
    )


def category_bars(ledger: Mapping[str, Any]) -> BarChart:
    """Where a step goes, from a ledger's record. Raises ValueError for one without steps."""
    steps, whole = ledger["num_steps"], ledger["seconds"]
    parts = {name: seconds for name, seconds in ledger["by_category"].items() if seconds > 0}
    if not steps or not parts:
        raise ValueError("no step to draw")
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    most, seconds = ordered[0]
    overlap = ledger["overlap_s"]
    return BarChart(
        title=f"{NAMES.get(most, most.replace('_', ' '))} takes {seconds / whole:.0%} of a step of "
        f"{human(whole / steps, 's')}",
        labels=tuple(NAMES.get(name, name.replace("_", " ")) for name, _ in ordered),
        values=tuple(value / steps for _, value in ordered),
        texts=tuple(f"{human(value / steps, 's')} · {value / whole:.1%}" for _, value in ordered),
        unit="s",
        x_label=f"time a step, of the {ledger['clock']}",
        note=f"mean of {steps} steps" + (f"; {human(overlap / steps, 's')} side by side" if overlap else ""),
    )


def roofline_bars(ledger: Mapping[str, Any], *, most: int = 12) -> BarChart:
    """The costliest operators whose limit is known, as share of what the device was measured to do. Raises ValueError
    where none is known."""
    known = [x for x in ledger["operators"] if x["least_s"] is not None and x["seconds"] > 0]
    known = sorted(known, key=lambda x: -x["seconds"])[:most]
    if not known:
        raise ValueError("no operator with a known limit")
    shares = [100 * x["least_s"] * x["count"] / x["seconds"] for x in known]
    lost = max(range(len(known)), key=lambda i: known[i]["seconds"] * (1 - min(1.0, shares[i] / 100)))
    return BarChart(
        title=f"{known[lost]['name']} at {_percent(shares[lost])} of its limit is where most time could be won",
        labels=tuple(f"{x['name']} {'x'.join(map(str, x['shapes'][-1])) if x['shapes'] else ''}" for x in known),
        values=tuple(shares),
        texts=tuple(f"{_percent(s)} · {human(x['seconds'], 's')}" for s, x in zip(shares, known, strict=True)),
        unit="%",
        x_label="of the measured limit of the device",
        note="limits: large matrix products and a large copy, measured on this device",
    )


def _percent(share: float) -> str:
    return f"{share:.0f} %" if share >= 1 else f"{share:.2g} %"


def communication_bars(communication: Mapping[str, Any]) -> BarChart:
    """Waiting and transfer of every rank. Raises ValueError where no collective was seen."""
    ranks = [x for x in communication["ranks"] if x["count"]]
    if not ranks:
        raise ValueError("no collective to draw")
    whole = communication["seconds"]
    latest = communication["latest"]
    finding = "nobody waited" if latest is None else f"the others waited for rank {latest}"
    labels, values = [], []
    for x in ranks:
        for kind, name in (("waiting_s", "waiting"), ("transfer_s", "transfer")):
            labels.append(f"rank {x['rank']}, {name}")
            values.append(x[kind])
    title = finding
    if communication["share"] is not None:
        parts = f"{communication['share']:.0%} of the time in collectives, {communication['waiting_share']:.0%} waiting"
        title = f"{parts}: {finding}"
    return BarChart(
        title=title,
        labels=tuple(labels),
        values=tuple(values),
        texts=tuple(f"{human(v, 's')} · {v / whole:.1%}" if whole else human(v, "s") for v in values),
        unit="s",
        x_label="time in collectives",
        note=f"of {human(whole, 's')} of steps; measured by {communication['mode']}",
    )


def expert_lines(experts: Mapping[str, Any], *, most: int = 6) -> LineChart:
    """Share of the tokens that each expert got, busiest first, for the most uneven layers. Raises ValueError where
    nothing was routed."""
    layers = sorted((x for x in experts["layers"] if sum(x["counts"])), key=lambda x: -x["busiest"])[:most]
    if not layers:
        raise ValueError("no token was routed")
    worst = layers[0]
    lines = []
    for layer in sorted(layers, key=lambda x: int(x["layer"])):
        counts = sorted(layer["counts"], reverse=True)
        picked = _picked(len(counts))
        shares = tuple(counts[i] * len(counts) / sum(counts) for i in picked)
        lines.append(Series(name=f"layer {layer['layer']}", x=tuple(i + 1.0 for i in picked), y=shares))
    return LineChart(
        title=f"the busiest expert gets {worst['busiest']:.2f} times its share (layer {worst['layer']}), "
        f"{worst['num_hit']} of {len(worst['counts'])} were hit",
        series=tuple(lines),
        x_label="expert, busiest first",
        x_unit="",
        y_label="tokens over the mean",
        y_unit="",
        limit=1.0,
    )


def comparison_bars(comparison: Mapping[str, Any]) -> BarChart:
    """Medians before and after. Raises ValueError where nothing could be compared."""
    changes = comparison["changes"]
    if not changes:
        raise ValueError("nothing to compare")
    worst = max(changes, key=lambda x: x["after"] / x["before"] if x["before"] else 0.0)
    change = worst["after"] / worst["before"] - 1 if worst["before"] else 0.0
    labels, values = [], []
    for x in changes:
        name = x["name"].removesuffix("_s").replace("_", " ")
        labels += [f"{name}, before", f"{name}, after"]
        values += [x["before"], x["after"]]
    return BarChart(
        title=f"{worst['name'].removesuffix('_s').replace('_', ' ')} changed most: {change:+.0%} ({worst['verdict']})",
        labels=tuple(labels),
        values=tuple(values),
        unit="s",
        x_label="median",
        note="; ".join(f"{what}: {a} → {b}" for what, a, b in comparison["differences"][:4]),
    )


def _picked(number: int) -> list[int]:
    """At most MAX_POINTS of so many places, the first and the last among them."""
    if number <= MAX_POINTS:
        return list(range(number))
    return sorted({round(i * (number - 1) / (MAX_POINTS - 1)) for i in range(MAX_POINTS)})
