"""A topology as tables: devices, links, collectives, coverage, and what is claimed and was not measured."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from workbench.base import Cell, Quantity, Table, human
from workbench.cluster.cost import OPERATIONS, LinkCost
from workbench.cluster.topology import Topology, TopologyDevice

__all__ = ["topology_tables"]

SMALL, LARGE = 1 << 12, 1 << 24  # message sizes that are shown
MAX_PAIRS = 64  # rows; a larger machine is drawn instead


def topology_tables(topology: Topology) -> tuple[Table, ...]:
    tables = (
        _devices(topology),
        _links(topology),
        _collectives(topology),
        _choices(topology),
        _coverage(topology),
        Table(columns=("not measured",), rows=tuple((claim,) for claim in topology.claims)),
    )
    return tuple(table for table in tables if table.rows)


def _devices(topology: Topology) -> Table:
    """One row per run of like devices on one host."""

    def kind(device: TopologyDevice) -> tuple[object, ...]:
        return (device.host, device.name, device.device_type, _text(device.memory_total), device.formats)

    rows: list[tuple[Cell, ...]] = []
    for _, members in groupby(topology.devices, key=kind):
        run = list(members)
        first = run[0]
        ranks = str(first.rank) if len(run) == 1 else f"{first.rank}..{run[-1].rank}"
        rates = ", ".join(f"{name} {human(rate.value, rate.unit)}" for name, rate in first.matmul.items())
        rows.append(
            (ranks, first.host, first.name, _text(first.memory_total), _text(first.memory_bandwidth), rates or None)
        )
    hosts = f"{len(topology.hosts)} host{'s' if len(topology.hosts) > 1 else ''}"
    when = f", {topology.taken_at}" if topology.taken_at else ""
    return Table(
        title=f"{topology.name}: {topology.num_devices} devices on {hosts}{when}",
        columns=("ranks", "host", "device", "memory", "memory rate", "matrix products"),
        rows=tuple(rows),
    )


def _links(topology: Topology) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (f"{link.a} – {link.b}", *_cost_cells(link.cost)) for link in topology.pairs[:MAX_PAIRS]
    ]
    for name, fabric in (("within a host", topology.within), ("between hosts", topology.between)):
        if fabric is not None:
            rows.append((f"{name} ({fabric.kind})", *_cost_cells(fabric.cost)))
    left = len(topology.pairs) - MAX_PAIRS
    note = f"and {left:,} more pairs" if left > 0 else ""
    return Table(columns=("link", *_COST_COLUMNS), rows=tuple(rows), note=note)


_COST_COLUMNS = ("start", "bandwidth", human(SMALL, "B"), human(LARGE, "B"), "worst misfit", "basis")


def _cost_cells(cost: LinkCost) -> tuple[Cell, ...]:
    return (
        human(cost.alpha.value, "s"),
        human(cost.bandwidth.value, "B/s"),
        human(cost.time(SMALL).value, "s"),
        human(cost.time(LARGE).value, "s"),
        f"{cost.residual:.0%}" if cost.points else None,
        cost.time(SMALL).basis,
    )


def _collectives(topology: Topology) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for fit in topology.collectives:
        largest = max((size for size, _ in fit.cost.points), default=LARGE)
        rows.append(
            (
                fit.operation,
                fit.dtype,
                _ranks_text(fit.ranks),
                human(fit.cost.alpha.value, "s"),
                human(fit.cost.time(SMALL).value, "s"),
                human(fit.algorithm_bandwidth(largest).value, "B/s"),
                human(fit.bus_bandwidth(largest).value, "B/s"),
                f"{fit.cost.residual:.0%}",
            )
        )
    columns = ("collective", "dtype", "ranks", "start", human(SMALL, "B"), "algorithm", "bus", "worst misfit")
    note = "algorithm and bus bandwidth at the largest size measured; sizes are what one rank puts in"
    return Table(columns=columns, rows=tuple(rows), note=note)


def _choices(topology: Topology) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for choice in topology.choices:
        for name, cost in choice.candidates:
            marks = [("* " if choice.best(size) == name else "") for size in (SMALL, LARGE)]
            times = [human(cost.time(size).value, "s") for size in (SMALL, LARGE)]
            rows.append(
                (
                    choice.operation,
                    choice.dtype,
                    _ranks_text(choice.ranks),
                    name,
                    marks[0] + times[0],
                    marks[1] + times[1],
                )
            )
    columns = ("collective", "dtype", "ranks", "done by", human(SMALL, "B"), human(LARGE, "B"))
    return Table(columns=columns, rows=tuple(rows), note="* the faster of those measured")


def _ranks_text(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}..{ranks[-1]}"
    return " ".join(map(str, ranks))


def _coverage(topology: Topology) -> Table:
    found = {(x.operation, x.dtype): x for x in topology.coverage}
    dtypes = tuple(dict.fromkeys(x.dtype for x in topology.coverage))
    rows: list[tuple[Cell, ...]] = []
    for operation in OPERATIONS:
        cells = [found.get((operation, dtype)) for dtype in dtypes]
        if any(cell is not None for cell in cells):
            rows.append((operation, *(None if cell is None else cell.is_supported for cell in cells)))
    words = dict.fromkeys(f"{x.dtype}: {x.detail}" for x in topology.coverage if not x.is_supported)
    return Table(columns=("right numbers in", *dtypes), rows=tuple(rows), note="\n".join(words))


def _text(quantity: Quantity | None) -> str | None:
    return None if quantity is None else human(quantity.value, quantity.unit)
