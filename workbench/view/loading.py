"""Pictures of where the time of a load went, from the records that `workbench.loading.StageTimes` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.base import Cell, Table, human
from workbench.view.charts import BarChart, LineChart, Series

__all__ = ["load_piece_table", "load_stage_bars", "load_stage_lines", "load_stage_table"]

BESIDE = "read"  # in a thread of its own; the other stages follow one another
REST = "rest"
NAMES = {
    "read": "read",
    "wait": "wait for a read",
    "transfer": "transfer",
    "transform": "transform",
    "bind": "bind",
    "check": "check",
    REST: "rest",
}
MAX_BINS = 40  # drawn of a line


def load_stage_bars(records: Sequence[Mapping[str, Any]]) -> BarChart:
    """Seconds of each stage on each rank. Of a record "rank", "seconds" and "seconds_by_stage" are read. Raises
    ValueError where no rank has begun."""
    parts = {int(record["rank"]): _parts(record) for record in records if record["seconds"] > 0}
    if not parts:
        raise ValueError("no load to draw")
    whole = {int(record["rank"]): float(record["seconds"]) for record in records}
    total = sum(whole[rank] for rank in parts)
    added = {stage: sum(own[stage] for own in parts.values()) for stage in NAMES if stage != BESIDE}
    most = max(added, key=lambda stage: added[stage])
    bars = [(rank, stage, seconds) for rank, own in sorted(parts.items()) for stage, seconds in own.items()]
    finding = f"{NAMES[most]} takes {added[most] / total:.0%} of the load"
    return BarChart(
        title=finding if most == "wait" else f"{finding}, waiting for reads {added['wait'] / total:.0%}",
        labels=tuple(f"rank {rank}, {NAMES[stage]}" for rank, stage, _ in bars),
        values=tuple(seconds for *_, seconds in bars),
        texts=tuple(f"{human(seconds, 's')} · {seconds / whole[rank]:.0%}" for rank, _, seconds in bars),
        unit="s",
        x_label="time in the stage",
        note="reading runs beside the rest; the others add up to the load",
    )


def load_stage_lines(record: Mapping[str, Any]) -> LineChart:
    """How busy each stage of one rank was over time. Raises ValueError for a record without any time in it."""
    busy: Mapping[str, Sequence[float]] = record["busy"]
    num_bins = max((len(bins) for bins in busy.values()), default=0)
    if not num_bins or not any(map(any, busy.values())):
        raise ValueError("no load to draw")
    joined = -(-num_bins // MAX_BINS)
    width = joined * float(record["bin_s"])
    series = []
    for stage, bins in busy.items():
        if any(bins):
            groups = [bins[i : i + joined] for i in range(0, num_bins, joined)]
            series.append(
                Series(
                    name=NAMES.get(stage, stage),
                    x=tuple((i + 0.5) * width for i in range(len(groups))),
                    y=tuple(100 * sum(group) / joined for group in groups),
                )
            )
    seconds = float(record["seconds"])
    read = float(record["seconds_by_stage"][BESIDE])
    return LineChart(
        title=f"rank {record['rank']}: the reading thread is busy {read / seconds:.0%} of {human(seconds, 's')}",
        series=tuple(series),
        x_label="time since the start of the load",
        x_unit="s",
        y_label="at work",
        y_unit="%",
        note=f"shares of {human(width, 's')} each",
    )


def load_stage_table(records: Sequence[Mapping[str, Any]]) -> Table:
    """Seconds and bytes of each stage, a pair of columns for each rank; the last row is the load as a whole."""
    rows: list[tuple[Cell, ...]] = []
    for stage, name in NAMES.items():
        cells: list[Cell] = [name]
        for record in records:
            cells += [round(_parts(record)[stage], 4), record["bytes_by_stage"].get(stage)]
        rows.append(tuple(cells))
    whole = [x for record in records for x in (round(record["seconds"], 4), None)]
    rows.append(("the load, without read", *whole))
    columns = [f"rank {record['rank']}, {what}" for record in records for what in ("s", "bytes")]
    return Table(columns=("stage", *columns), rows=tuple(rows))


def load_piece_table(record: Mapping[str, Any], *, most: int = 8) -> Table:
    """The pieces of the model that took one rank longest; time that several shared is dealt by their bytes."""
    pieces = [(sum(s for stage, s in x["seconds_by_stage"].items() if stage != BESIDE), x) for x in record["pieces"]]
    pieces.sort(key=lambda item: -item[0])
    stages = [stage for stage in NAMES if stage != REST]
    rows = tuple(
        (
            x["name"],
            *(x["bytes_by_stage"].get(stage) for stage in ("read", "bind")),
            round(seconds, 4),
            *(round(x["seconds_by_stage"].get(stage, 0.0), 4) for stage in stages),
        )
        for seconds, x in pieces[:most]
    )
    return Table(
        columns=("piece", "bytes read", "bytes held", "s", *(f"{NAMES[stage]}, s" for stage in stages)),
        rows=rows,
        title=f"rank {record['rank']}: the {len(rows)} of {len(pieces)} pieces that took longest",
    )


def _parts(record: Mapping[str, Any]) -> dict[str, float]:
    """Seconds by stage, with what is left of the load over."""
    found = {stage: float(record["seconds_by_stage"].get(stage, 0.0)) for stage in NAMES if stage != REST}
    rest = float(record["seconds"]) - sum(seconds for stage, seconds in found.items() if stage != BESIDE)
    return {**found, REST: max(0.0, rest)}
