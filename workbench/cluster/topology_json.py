"""A topology as JSON, and back: strict, since the file may come from another machine or hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workbench.base import ConfigError
from workbench.cluster.cost import OPERATIONS, CollectiveFit, LinkCost, Operation
from workbench.cluster.strict import Fields, parse_json_file, quantity_to_json
from workbench.cluster.topology import AlgorithmChoice, CollectiveSupport, Fabric, PairLink, Topology, TopologyDevice

__all__ = ["device_from_json", "device_to_json", "parse_topology", "topology_from_json", "topology_to_json"]

FORM = "workbench topology 1"
MAX_FILE_BYTES = 64 << 20
MAX_DEVICES = 1 << 16


def topology_to_json(topology: Topology) -> dict[str, Any]:
    return {
        "form": FORM,
        "name": topology.name,
        "taken_at": topology.taken_at,
        "devices": [device_to_json(device) for device in topology.devices],
        "pairs": [{"a": link.a, "b": link.b, "cost": _cost_to_json(link.cost)} for link in topology.pairs],
        "collectives": [
            {"operation": x.operation, "ranks": list(x.ranks), "dtype": x.dtype, "cost": _cost_to_json(x.cost)}
            for x in topology.collectives
        ],
        "coverage": [
            {"operation": x.operation, "dtype": x.dtype, "is_supported": x.is_supported, "detail": x.detail}
            for x in topology.coverage
        ],
        "choices": [
            {
                "operation": x.operation,
                "ranks": list(x.ranks),
                "dtype": x.dtype,
                "candidates": [{"name": name, "cost": _cost_to_json(cost)} for name, cost in x.candidates],
            }
            for x in topology.choices
        ],
        "within": _fabric_to_json(topology.within),
        "between": _fabric_to_json(topology.between),
        "claims": list(topology.claims),
    }


def device_to_json(device: TopologyDevice) -> dict[str, object]:
    return {
        "rank": device.rank,
        "host": device.host,
        "name": device.name,
        "device_type": device.device_type,
        "memory_total": quantity_to_json(device.memory_total),
        "memory_bandwidth": quantity_to_json(device.memory_bandwidth),
        "matmul": {name: quantity_to_json(rate) for name, rate in device.matmul.items()},
        "formats": list(device.formats),
        "reserved_share": quantity_to_json(device.reserved_share),
    }


def _cost_to_json(cost: LinkCost) -> dict[str, object]:
    return {
        "alpha": quantity_to_json(cost.alpha),
        "bandwidth": quantity_to_json(cost.bandwidth),
        "residual": cost.residual,
        "points": [list(point) for point in cost.points],
    }


def _fabric_to_json(fabric: Fabric | None) -> dict[str, object] | None:
    if fabric is None:
        return None
    return {"kind": fabric.kind, "size": fabric.size, "cost": _cost_to_json(fabric.cost)}


def parse_topology(path: Path) -> Topology:
    return topology_from_json(parse_json_file(path, max_bytes=MAX_FILE_BYTES), where=path)


def topology_from_json(record: object, *, where: object = None) -> Topology:
    """Raises ConfigError that names the member; what holds between members (ranks, pairs) is checked by `Topology`."""
    top = Fields(record, "", where)
    form = top.text("form")
    if form != FORM:
        raise top.error("form", form, repr(FORM))
    name, taken_at = top.text("name"), top.text("taken_at")
    devices = tuple(device_from_json(fields) for fields in top.children("devices"))
    if not 1 <= len(devices) <= MAX_DEVICES:
        raise top.error("devices", f"{len(devices)} of them", f"1 to {MAX_DEVICES}")
    pairs = tuple(_pair(fields) for fields in top.children("pairs"))
    collectives = tuple(_fit(fields) for fields in top.children("collectives"))
    coverage = tuple(_support(fields) for fields in top.children("coverage"))
    choices = tuple(_choice(fields) for fields in top.children("choices"))
    within, between = _fabric(top.optional("within")), _fabric(top.optional("between"))
    claims = top.texts("claims")
    top.done()
    try:
        return Topology(
            name=name,
            devices=devices,
            pairs=pairs,
            collectives=collectives,
            claims=claims,
            taken_at=taken_at,
            within=within,
            between=between,
            coverage=coverage,
            choices=choices,
        )
    except ConfigError as error:
        raise ConfigError(error.message, where=where, found=error.found, expected=error.expected) from None


def device_from_json(fields: Fields) -> TopologyDevice:
    memory, rate = fields.optional("memory_total"), fields.optional("memory_bandwidth")
    # Records written before there was such a member have none.
    share = fields.optional("reserved_share") if "reserved_share" in fields.keys() else None  # noqa: SIM118 (not a dict)
    matmul = fields.child("matmul")
    device = TopologyDevice(
        rank=fields.count("rank"),
        host=fields.text("host"),
        name=fields.text("name"),
        device_type=fields.text("device_type"),
        memory_total=None if memory is None else memory.quantity("B"),
        memory_bandwidth=None if rate is None else rate.quantity("B/s"),
        matmul={name: matmul.child(name).quantity("FLOP/s") for name in matmul.keys()},  # noqa: SIM118 (not a dict)
        formats=fields.texts("formats"),
        reserved_share=None if share is None else share.quantity("1"),
    )
    fields.done()
    return device


def _cost(fields: Fields) -> LinkCost:
    alpha, bandwidth = fields.child("alpha").quantity("s"), fields.child("bandwidth").quantity("B/s")
    residual = fields.number("residual")
    points = []
    for i, point in enumerate(fields.items("points")):
        if not isinstance(point, list) or len(point) != 2:
            raise fields.error(f"points[{i}]", point, "[bytes, seconds]")
        pair = Fields({"bytes": point[0], "seconds": point[1]}, f"{fields.place}.points[{i}]", fields.where)
        points.append((pair.count("bytes"), pair.number("seconds")))
    fields.done()
    if not bandwidth.value > 0:
        raise fields.error("bandwidth", bandwidth.value, "above 0")
    return LinkCost(alpha=alpha, bandwidth=bandwidth, residual=residual, points=tuple(points))


def _pair(fields: Fields) -> PairLink:
    link = PairLink(a=fields.count("a"), b=fields.count("b"), cost=_cost(fields.child("cost")))
    fields.done()
    return link


def _fit(fields: Fields) -> CollectiveFit:
    operation, ranks, dtype = _group(fields)
    cost = _cost(fields.child("cost"))
    fields.done()
    return CollectiveFit(operation=operation, ranks=ranks, dtype=dtype, cost=cost)


def _choice(fields: Fields) -> AlgorithmChoice:
    operation, ranks, dtype = _group(fields)
    candidates = []
    for item in fields.children("candidates"):
        candidates.append((item.text("name"), _cost(item.child("cost"))))
        item.done()
    fields.done()
    if not candidates:
        raise fields.error("candidates", [], "one or more")
    return AlgorithmChoice(operation=operation, ranks=ranks, dtype=dtype, candidates=tuple(candidates))


def _group(fields: Fields) -> tuple[Operation, tuple[int, ...], str]:
    operation = fields.text("operation", among=OPERATIONS)
    ranks = fields.counts("ranks")
    if list(ranks) != sorted(set(ranks)) or len(ranks) < 2:
        raise fields.error("ranks", list(ranks), "two or more ranks, ascending")
    return operation, ranks, fields.text("dtype")  # type: ignore[return-value]


def _support(fields: Fields) -> CollectiveSupport:
    operation, dtype = fields.text("operation", among=OPERATIONS), fields.text("dtype")
    is_supported, detail = fields.flag("is_supported"), fields.text("detail", most=4000)
    fields.done()
    return CollectiveSupport(
        operation=operation,  # type: ignore[arg-type]
        dtype=dtype,
        is_supported=is_supported,
        detail=detail,
    )


def _fabric(fields: Fields | None) -> Fabric | None:
    if fields is None:
        return None
    kind, size = fields.text("kind", among=("switch", "mesh")), fields.count("size", low=1)
    cost = _cost(fields.child("cost"))
    fields.done()
    return Fabric(cost=cost, kind=kind, size=size)  # type: ignore[arg-type]
