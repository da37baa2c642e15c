"""Charts as data: what is drawn, in which unit, and the finding as title. `svg.py` and `figures.py` draw them.

Every function here takes plain numbers and returns a record, so that a figure in a notebook, in a report and in the
JSON beside it is the same figure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from workbench.base import human

__all__ = [
    "BarChart",
    "Chart",
    "LineChart",
    "Series",
    "bytes_by_role",
    "chart_from_json",
    "difference_by_layer",
    "latency_bars",
    "load_timeline",
]

MAX_POINTS = 200  # per line: what a page can show, and keeps live updates small


@dataclass(frozen=True, kw_only=True, slots=True)
class BarChart:
    """Horizontal bars. `texts` stand at their ends; without them the values do, with `unit`."""

    title: str
    labels: tuple[str, ...]
    values: tuple[float, ...]
    unit: str
    x_label: str
    texts: tuple[str, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        if len(self.labels) != len(self.values) or len(self.texts) not in (0, len(self.values)):
            raise ValueError(f"{len(self.labels)} labels, {len(self.values)} values, {len(self.texts)} texts")
        if not all(math.isfinite(value) and value >= 0 for value in self.values):
            raise ValueError(f"bars need finite values from 0 on, found {self.values}")

    def text(self, idx: int) -> str:
        return self.texts[idx] if self.texts else human(self.values[idx], self.unit)

    def to_json(self) -> dict[str, object]:
        return {"kind": "bars", **asdict(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError(f"series {self.name!r} has {len(self.x)} x and {len(self.y)} y values")
        if not all(map(math.isfinite, (*self.x, *self.y))):
            raise ValueError(f"series {self.name!r} holds a value that is not finite")


@dataclass(frozen=True, kw_only=True, slots=True)
class LineChart:
    """Lines over a common x axis. With `log_y`, values up to 0 are not drawn. `limit`: a horizontal line at that y."""

    title: str
    series: tuple[Series, ...]
    x_label: str
    x_unit: str
    y_label: str
    y_unit: str
    log_y: bool = False
    limit: float | None = None
    note: str = ""

    def to_json(self) -> dict[str, object]:
        return {"kind": "lines", **asdict(self)}


Chart = BarChart | LineChart


def chart_from_json(record: Mapping[str, Any]) -> Chart:
    """The chart that `to_json` wrote. Raises ValueError for another kind of record."""
    fields: dict[str, Any] = {key: value for key, value in record.items() if key != "kind"}
    if record.get("kind") == "bars":
        fields |= {key: tuple(fields[key]) for key in ("labels", "values", "texts")}
        return BarChart(**fields)
    if record.get("kind") == "lines":
        series = tuple(Series(name=s["name"], x=tuple(s["x"]), y=tuple(s["y"])) for s in fields.pop("series"))
        return LineChart(series=series, **fields)
    raise ValueError(f"not a chart: kind {record.get('kind')!r}")


def bytes_by_role(num_bytes: Mapping[str, int], *, what: str = "the checkpoint") -> BarChart:
    """Where the bytes are: one bar per role, largest first. Raises ValueError where there are none."""
    ordered = sorted(num_bytes.items(), key=lambda item: -item[1])
    total = sum(num_bytes.values())
    if not total:
        raise ValueError("no bytes to draw")
    largest, size = ordered[0]
    return BarChart(
        title=f"{largest.replace('_', ' ')}: {size / total:.1%} of the {human(total, 'B')} of {what}",
        labels=tuple(role.replace("_", " ") for role, _ in ordered),
        values=tuple(float(n) for _, n in ordered),
        texts=tuple(f"{human(n, 'B')} · {n / total:.1%}" for _, n in ordered),
        unit="B",
        x_label="bytes",
    )


def load_timeline(samples: Mapping[int, Sequence[tuple[float, int]]]) -> LineChart:
    """Bytes read over time, one line per rank; `samples` holds (seconds, bytes so far) in order. Raises ValueError
    where no rank has a sample."""
    if not any(samples.values()):
        raise ValueError("no progress to draw")
    series = tuple(
        Series(name=f"rank {rank}", x=tuple(s for s, _ in points), y=tuple(float(b) for _, b in points))
        for rank, points in ((rank, thin(points)) for rank, points in sorted(samples.items()))
    )
    total = sum(points[-1][1] for points in samples.values() if points)
    elapsed = max(points[-1][0] for points in samples.values() if points)
    rate = f", {human(total / elapsed, 'B/s')}" if elapsed > 0 else ""
    ranks = f"{len(series)} rank{'s' if len(series) > 1 else ''}"
    return LineChart(
        title=f"{ranks} read {human(total, 'B')} in {human(elapsed, 's')}{rate}",
        series=series,
        x_label="time since the start of the load",
        x_unit="s",
        y_label="bytes read",
        y_unit="B",
    )


def thin(points: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """At most MAX_POINTS of the points, evenly picked, the first and the last among them."""
    if len(points) <= MAX_POINTS:
        return list(points)
    step = (len(points) - 1) / (MAX_POINTS - 1)
    return [points[round(i * step)] for i in range(MAX_POINTS)]


def latency_bars(summary: Mapping[str, Any]) -> BarChart:
    """First token, per token and end to end at p50 and p99, from a latency summary's JSON. Raises ValueError where
    nothing was measured."""
    labels, values = [], []
    for key, name in (("first_token_s", "first token"), ("per_token_s", "per token"), ("end_to_end_s", "end to end")):
        if summary.get(key):
            for level in ("p50", "p99"):
                labels.append(f"{name}, {level}")
                values.append(float(summary[key][level]))
    if not labels:
        raise ValueError("no latency was measured")
    first, token = summary.get("first_token_s"), summary.get("per_token_s")
    finding = [f"first token after {human(first['p50'], 's')}"] if first else []
    finding += [f"then {human(token['p50'], 's')} per token"] if token else []
    return BarChart(
        title=", ".join(finding) or "latency",
        labels=tuple(labels),
        values=tuple(values),
        unit="s",
        x_label="time",
        note=f"{summary.get('num_requests', 0)} requests; per token: after the first",
    )


def difference_by_layer(worst: Mapping[int, float], *, limit: float | None = None) -> LineChart:
    """Largest relative difference per layer, on a logarithmic axis. Raises ValueError where there is no layer.

    A difference that is not finite cannot be drawn; the note names its layers.
    """
    if not worst:
        raise ValueError("no layer was compared")
    layers = [layer for layer in sorted(worst) if math.isfinite(worst[layer])]
    broken = [layer for layer in sorted(worst) if not math.isfinite(worst[layer])]
    layer = max(worst, key=lambda x: worst[x])
    against = "" if limit is None else f", limit {limit:.0e}"
    return LineChart(
        title=f"largest relative difference to the reference: {worst[layer]:.1e} in layer {layer}{against}",
        series=(Series(name="worst tensor", x=tuple(map(float, layers)), y=tuple(worst[x] for x in layers)),),
        x_label="layer",
        x_unit="",
        y_label="relative difference",
        y_unit="",
        log_y=True,
        limit=limit,
        note=f"not finite in layers {', '.join(map(str, broken))}" if broken else "",
    )
