"""A soak in pictures, drawn from the JSON of its record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.base import human
from workbench.view.charts import MAX_POINTS, LineChart, Series

__all__ = ["memory_over_time"]


def memory_over_time(soak: Mapping[str, Any]) -> LineChart:
    """Resident memory of every process over the measured part. Raises ValueError where nothing was sampled."""
    series = []
    for each in soak["memory"]:
        step = max(1, -(-len(each["times_s"]) // MAX_POINTS))
        name = f"{each['name']} (process {each['pid']})"
        series.append(Series(name=name, x=tuple(each["times_s"][::step]), y=tuple(each["num_bytes"][::step])))
    if not series:
        raise ValueError("no process was sampled")
    worst = max(soak["trends"], key=lambda trend: trend["growth_bytes"])
    title = f"{worst['name']} grew most: {human(worst['growth_bytes'], 'B')} in its second half, "
    return LineChart(
        title=title + f"{human(worst['allowed_bytes'], 'B')} allowed",
        series=tuple(series),
        x_label="time since the start of the measured part",
        x_unit="s",
        y_label="resident memory",
        y_unit="B",
        note=f"{soak['num_streams']} streams, {soak['place']}",
    )
