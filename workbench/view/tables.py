"""Tables of records that several rooms produce, from their JSON form: what a report shows beside a figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.base import Cell, Table, human

__all__ = ["bytes_table", "facts_table", "latency_table", "matmul_table"]


def facts_table(facts: Mapping[str, object], *, title: str = "") -> Table:
    """Two columns, name and value; nested values are written on one line."""
    return Table(
        columns=("what", "value"), rows=tuple((key, _cell(value)) for key, value in facts.items()), title=title
    )


def bytes_table(num_bytes: Mapping[str, int], *, title: str = "") -> Table:
    """Bytes per role, largest first, with the share of the whole and the sum below."""
    total = sum(num_bytes.values())
    rows: list[tuple[Cell, ...]] = [
        (role.replace("_", " "), n, human(n, "B"), f"{n / total:.2%}" if total else "–")
        for role, n in sorted(num_bytes.items(), key=lambda item: -item[1])
    ]
    rows.append(("together", total, human(total, "B"), "100%" if total else "–"))
    return Table(columns=("role", "bytes", "", "share"), rows=tuple(rows), title=title)


def latency_table(summary: Mapping[str, Any], *, title: str = "") -> Table:
    """Percentiles of a latency summary's JSON."""
    rows: list[tuple[Cell, ...]] = []
    for key, name in (
        ("first_token_s", "first token"),
        ("inter_token_s", "between tokens"),
        ("per_token_s", "per token after the first"),
        ("longest_pause_s", "longest pause"),
        ("end_to_end_s", "end to end"),
    ):
        if found := summary.get(key):
            rows.append((name, found["count"], *(human(found[x], "s") for x in ("p50", "p90", "p99", "low", "high"))))
    columns = ("latency", "samples", "p50", "p90", "p99", "least", "most")
    return Table(columns=columns, rows=tuple(rows), title=title, note=str(summary.get("conditions", "")))


def matmul_table(rates: list[Mapping[str, Any]], *, title: str = "") -> Table:
    """Matrix product rates of a machine survey's JSON; a gap is shown as one, with its reason."""
    rows = tuple(
        (
            rate["device"],
            rate["dtype"],
            "not measured" if rate["flops_per_s"] is None else human(rate["flops_per_s"], "FLOP/s"),
            rate["conditions"],
        )
        for rate in rates
    )
    return Table(columns=("device", "dtype", "rate", "conditions"), rows=rows, title=title)


def _cell(value: object) -> Cell:
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return str(value)
