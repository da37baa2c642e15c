"""Operators in pictures: how right a device computes each, and how fast against what it was measured to do.

Drawn from the JSON of a coverage record.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from workbench.view.charts import BarChart
from workbench.view.profile import roofline_bars

__all__ = ["error_bars", "rate_bars"]


def error_bars(coverage: Mapping[str, Any], *, most: int = 12) -> BarChart:
    """Operators whose numbers are furthest off, each by its worst shape: error to float64 in percent of what rounding
    explains. Raises ValueError where nothing was compared."""
    worst: dict[str, float] = {}
    broken: dict[str, None] = {}
    for result in coverage["results"]:
        error, tolerance = result["error"], result["tolerance"]
        if error is None or tolerance is None:
            continue
        share = 0.0 if not error else error / tolerance if tolerance else math.inf
        name = _short(result["use"]["name"])
        if math.isfinite(share):
            worst[name] = max(worst.get(name, 0.0), 100 * share)
        else:
            broken[name] = None
    if not worst:
        raise ValueError("no operator was compared")
    ordered = sorted(worst.items(), key=lambda item: -item[1])[:most]
    name, share = ordered[0]
    if broken:
        finding = f"{', '.join(broken)}: no finite error"
    elif share > 100:
        finding = f"{name} is off by {share / 100:,.1f} times what rounding explains"
    else:
        finding = f"the largest error, of {name}, is {share:.0f} % of what rounding explains"
    return BarChart(
        title=finding,
        labels=tuple(label for label, _ in ordered),
        values=tuple(value for _, value in ordered),
        texts=tuple(f"{value:,.3g} %" for _, value in ordered),
        unit="%",
        x_label="error to float64, of what rounding explains",
        note=f"worst of {len(worst)} operators on {coverage['device']}, each by its worst shape",
    )


def rate_bars(coverage: Mapping[str, Any], *, most: int = 12) -> BarChart:
    """The costliest operators as share of the measured limits. A share above 100 % is no merit: the limit is that of a
    copy larger than every cache, and small tensors that are tried again and again lie in one; or it was measured beside
    other work, and is too low. Raises ValueError where no limit is known."""
    timed = [x for x in coverage["results"] if x["seconds"] and x["share"] is not None]
    above = sum(x["share"] > 1 for x in timed)
    records = [
        {
            "name": _short(x["use"]["name"]),
            "shapes": x["use"]["input_shapes"],
            "count": x["use"]["count"],
            "seconds": x["seconds"] * x["use"]["count"],
            "least_s": x["share"] * x["seconds"],
        }
        for x in timed
    ]
    passing = f"{above} of {len(timed)} shapes pass the limits measured on {coverage['device']}"
    note = f"{passing}: they lie in a cache, or the device had other work then" if above else passing
    return replace(roofline_bars({"operators": records}, most=most), note=note)


def _short(name: str) -> str:
    return name.removeprefix("aten.").removesuffix(".default")
