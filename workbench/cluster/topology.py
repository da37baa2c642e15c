"""One record of what a deployment would run on: devices, links between them, collectives, and what nobody measured.

Importable without torch. `measure_topology` (links.py) makes one from measurements, `Topology.of_hardware` one from a
datasheet; both answer the same questions, and each number says which of the two it is.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from workbench.base import ConfigError, Quantity, Table
from workbench.cluster.catalogue import Hardware
from workbench.cluster.cost import OPERATIONS, CollectiveFit, LinkCost, Operation, estimate_flat
from workbench.cluster.topology_parts import AlgorithmChoice, CollectiveSupport, Fabric, PairLink, TopologyDevice

__all__ = ["AlgorithmChoice", "CollectiveSupport", "Fabric", "PairLink", "Topology", "TopologyDevice", "read_topology"]

# Starts of a message where no figure is published: the order of magnitude that such links are known for.
ASSUMED_LATENCY = {
    "within": Quantity(3e-6, "s", "assumed", "no published latency within a node; 3 us taken"),
    "between": Quantity(10e-6, "s", "assumed", "no published latency between nodes; 10 us taken"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Levels:
    """What an estimate over one group needs: the slowest link of all, and within hosts where they hold equal parts."""

    outer: LinkCost
    inner: LinkCost | None
    per_host: int
    num_hosts: int
    basis: Literal["modelled", "assumed"]
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """`devices` are in rank order. `pairs` and `collectives` were measured; `within` and `between` stand for links
    within a host and between hosts that are not listed. `claims` are what a system says and nobody could measure
    ("claimed, not measured: ..."). `taken_at` is UTC, ISO 8601, "" for a datasheet.
    """

    name: str
    devices: tuple[TopologyDevice, ...]
    pairs: tuple[PairLink, ...] = ()
    collectives: tuple[CollectiveFit, ...] = ()
    claims: tuple[str, ...] = ()
    taken_at: str = ""
    within: Fabric | None = None
    between: Fabric | None = None
    coverage: tuple[CollectiveSupport, ...] = ()
    choices: tuple[AlgorithmChoice, ...] = ()
    _pairs: dict[tuple[int, int], LinkCost] = field(init=False, repr=False, compare=False)
    _fits: dict[tuple[str, tuple[int, ...]], CollectiveFit] = field(init=False, repr=False, compare=False)
    _alike: dict[tuple[str, tuple[int, ...]], CollectiveFit] = field(init=False, repr=False, compare=False)
    _levels: dict[tuple[int, ...], _Levels] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if [device.rank for device in self.devices] != list(range(len(self.devices))) or not self.devices:
            raise ConfigError("devices of a topology are numbered by rank, from 0", where=self.name)
        for link in self.pairs:
            if not (0 <= link.a < self.num_devices and 0 <= link.b < self.num_devices and link.a != link.b):
                raise ConfigError(f"link between ranks {link.a} and {link.b}", where=self.name, expected="two devices")
        for fit in self.collectives:
            self._check_ranks(fit.ranks)
        object.__setattr__(self, "_pairs", {(min(x.a, x.b), max(x.a, x.b)): x.cost for x in self.pairs})
        if len(self._pairs) != len(self.pairs):
            raise ConfigError("a pair of ranks is listed twice", where=self.name)
        # The first fit of a group speaks for it: others differ in dtype alone.
        fits: dict[tuple[str, tuple[int, ...]], CollectiveFit] = {}
        alike: dict[tuple[str, tuple[int, ...]], CollectiveFit] = {}
        for fit in self.collectives:
            fits.setdefault((fit.operation, fit.ranks), fit)
            alike.setdefault((fit.operation, self.span(fit.ranks)), fit)
        object.__setattr__(self, "_fits", fits)
        object.__setattr__(self, "_alike", alike)
        object.__setattr__(self, "_levels", {})  # filled as groups are asked about

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts in the order of their first rank."""
        return tuple(dict.fromkeys(device.host for device in self.devices))

    def host_of(self, rank: int) -> str:
        return self.devices[rank].host

    def spans_hosts(self, ranks: Iterable[int]) -> bool:
        return len({self.devices[rank].host for rank in ranks}) > 1

    def span(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """How many of the ranks each host holds, largest first: groups of equal span are alike."""
        return tuple(sorted(Counter(self.devices[rank].host for rank in ranks).values(), reverse=True))

    def link(self, a: int, b: int) -> LinkCost | None:
        """Cost of a message between two ranks; None where it is neither measured nor given."""
        listed = self._pairs.get((min(a, b), max(a, b)))
        if listed is not None:
            return listed
        fabric = self.within if self.host_of(a) == self.host_of(b) else self.between
        return None if fabric is None else fabric.pair()

    def collective_time(
        self, operation: Operation, num_bytes: float, ranks: Sequence[int], *, dtype: str | None = None
    ) -> Quantity:
        """Seconds of an operation over `ranks`, each putting in `num_bytes` (see cost.py); 0 for a single rank.

        In this order: the measured fit of these ranks (of `dtype` where given and measured); the fit of a group of the
        same size that lies over hosts in the same way, as "modelled"; an estimate from the links, as "modelled" or
        "assumed". Raises ConfigError for ranks that are not here or not linked, or an unknown operation.
        """
        if operation not in OPERATIONS:
            raise ConfigError("unknown operation", found=operation, expected=", ".join(OPERATIONS))
        group = tuple(sorted(ranks))
        if group not in self._levels:
            self._check_ranks(group)
        if len(group) == 1:
            return Quantity(0.0, "s", "exact", "one rank talks to nobody")
        if operation == "send_recv" and len(group) == 2 and (group[0], group[1]) in self._pairs:
            return self._pairs[group[0], group[1]].time(num_bytes)
        own = self._fits.get((operation, group))
        if own is not None:
            if dtype is not None and own.dtype != dtype:
                chosen = (x for x in self.collectives if (x.operation, x.ranks, x.dtype) == (operation, group, dtype))
                own = next(chosen, own)
            return own.cost.time(num_bytes)
        other = self._alike.get((operation, self.span(group)))
        if other is not None:
            seconds = other.cost.time(num_bytes)
            return Quantity(seconds.value, "s", "modelled", f"as measured over ranks {list(other.ranks)}")
        return self._estimate(operation, num_bytes, group)

    def _estimate(self, operation: Operation, num_bytes: float, group: tuple[int, ...]) -> Quantity:
        """The better of one flat algorithm over the slowest link, and one in two levels, within hosts and between."""
        levels = self._levels.get(group)
        if levels is None:
            levels = self._levels[group] = self._levels_of(group)
        outer, inner = levels.outer, levels.inner
        seconds = estimate_flat(operation, num_bytes, len(group), outer.alpha.value, outer.bandwidth.value)
        if inner is not None and operation != "send_recv":
            seconds = min(seconds, _two_level(operation, num_bytes, levels.per_host, levels.num_hosts, inner, outer))
        return Quantity(seconds, "s", levels.basis, levels.source)

    def _levels_of(self, group: tuple[int, ...]) -> _Levels:
        span, outer, inner = self.span(group), self._slowest(group), None
        if len(span) > 1 and span[0] == span[-1] > 1:
            first = self.host_of(group[0])
            inner = self._slowest(tuple(rank for rank in group if self.host_of(rank) == first))
        figures = [q for cost in (outer, inner) if cost is not None for q in (cost.bandwidth, cost.alpha)]
        return _Levels(
            outer=outer,
            inner=inner,
            per_host=span[0],
            num_hosts=len(span),
            basis="assumed" if any(q.basis == "assumed" for q in figures) else "modelled",
            source="; ".join(dict.fromkeys(q.source for q in figures if q.source)),
        )

    def _slowest(self, group: tuple[int, ...]) -> LinkCost:
        """Cost of a step in which every rank of the group talks to another: that of the slowest link among them.

        Between hosts each device has its own share of the network, so the link to another host is the slowest one.
        """
        listed = [self._pairs[a, b] for i, a in enumerate(group) for b in group[i + 1 :] if (a, b) in self._pairs]
        if self._pairs and len(listed) == len(group) * (len(group) - 1) // 2:
            return _slower(listed)
        spans = self.spans_hosts(group)
        fabric = self.between if spans else self.within
        if fabric is None:
            where = "between hosts" if spans else "within a host"
            raise ConfigError(
                f"nothing is known about links {where}",
                where=self.name,
                found=f"ranks {list(group)}",
                next_step="Measure these ranks together, or give the figure (Topology.of_hardware, inter_node=...)",
            )
        return _slower([fabric.of_group(len(group)), *listed])

    def _check_ranks(self, ranks: Sequence[int]) -> None:
        if not ranks or len(set(ranks)) != len(ranks) or not all(0 <= rank < self.num_devices for rank in ranks):
            expected = f"different ranks from 0 to {self.num_devices - 1}"
            raise ConfigError("no such group of ranks", where=self.name, found=list(ranks), expected=expected)

    def with_inter_node(self, scale: float) -> Topology:
        """The same machines with links between hosts `scale` times as fast (0.05: twenty times slower): bandwidth times
        `scale`, latency divided by it. Measured collectives that span hosts no longer hold and are dropped."""
        if not 0 < scale < float("inf"):
            raise ConfigError("a scale of links is above 0 and finite", found=scale)
        why = f"what if links between hosts were {scale:g} times as fast"
        return replace(
            self,
            name=f"{self.name}, inter-node x {scale:g}",
            pairs=tuple(
                replace(x, cost=x.cost.scaled(scale, why)) if self.spans_hosts((x.a, x.b)) else x for x in self.pairs
            ),
            collectives=tuple(x for x in self.collectives if not self.spans_hosts(x.ranks)),
            choices=tuple(x for x in self.choices if not self.spans_hosts(x.ranks)),
            between=None if self.between is None else replace(self.between, cost=self.between.cost.scaled(scale, why)),
        )

    @classmethod
    def of_hardware(cls, hardware: Hardware, num_devices: int, *, inter_node: Quantity | None = None) -> Topology:
        """`num_devices` of one kind, node after node, from datasheet figures. `inter_node` [B/s, one direction, per
        device] replaces the catalogue's network. Raises ConfigError for no devices, or for another unit."""
        if num_devices < 1:
            raise ConfigError("a topology has at least one device", found=num_devices)
        if inter_node is not None and (inter_node.unit != "B/s" or not inter_node.value > 0):
            raise ConfigError("bandwidth between nodes", found=inter_node, expected="B/s, above 0")
        devices = tuple(
            TopologyDevice(
                rank=rank,
                host=f"node{rank // hardware.devices_per_node}",
                name=hardware.name,
                device_type=hardware.device_type,
                memory_total=hardware.memory,
                memory_bandwidth=hardware.memory_bandwidth,
                matmul=hardware.matmul,
                formats=hardware.formats,
                reserved_share=hardware.reserved_share,
            )
            for rank in range(num_devices)
        )
        within, between = hardware.intra_node, hardware.inter_node
        kind = within.kind
        return cls(
            name=f"{num_devices} x {hardware.name}",
            devices=devices,
            within=_fabric(within.bandwidth, within.latency, "within", kind, hardware.devices_per_node),
            between=_fabric(inter_node or between.bandwidth, between.latency, "between", "switch", 1),
            claims=_datasheet_claims(hardware),
        )

    def to_json(self) -> dict[str, Any]:
        from workbench.cluster.topology_json import topology_to_json

        return topology_to_json(self)

    @classmethod
    def from_json(cls, record: object, *, where: object = None) -> Topology:
        """The topology that `to_json` wrote. Raises ConfigError, naming the field, for anything else."""
        from workbench.cluster.topology_json import topology_from_json

        return topology_from_json(record, where=where)

    def save(self, path: Path | str) -> None:
        Path(path).write_text(json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")

    def tables(self) -> tuple[Table, ...]:
        """Devices, links, collectives, coverage, and claims; those that have no rows are left out."""
        from workbench.cluster.topology_tables import topology_tables

        return topology_tables(self)

    def render(self) -> str:
        return "\n\n".join(table.render() for table in self.tables())

    def _repr_html_(self) -> str:
        return "".join(table.to_html() for table in self.tables())


def read_topology(path: Path | str) -> Topology:
    """The topology in a file that `save` wrote. Raises ConfigError for anything else."""
    from workbench.cluster.topology_json import parse_topology

    return parse_topology(Path(path))


def _datasheet_claims(hardware: Hardware) -> tuple[str, ...]:
    claims = [f"every figure is that of the datasheet of {hardware.name}"]
    for where, link in (("within", hardware.intra_node), ("between", hardware.inter_node)):
        if link.bandwidth is None:
            claims.append(f"nothing is published about links {where} nodes")
        elif link.latency is None:
            claims.append(ASSUMED_LATENCY[where].source)
    return tuple(f"claimed, not measured: {claim}" for claim in claims)


def _fabric(
    bandwidth: Quantity | None,
    latency: Quantity | None,
    where: Literal["within", "between"],
    kind: Literal["switch", "mesh"],
    size: int,
) -> Fabric | None:
    if bandwidth is None:
        return None
    return Fabric(
        cost=LinkCost(alpha=latency or ASSUMED_LATENCY[where], bandwidth=bandwidth), kind=kind, size=max(1, size)
    )


def _slower(costs: Sequence[LinkCost]) -> LinkCost:
    """Largest alpha and smallest bandwidth of all."""
    if len(costs) == 1:
        return costs[0]
    return LinkCost(
        alpha=max((cost.alpha for cost in costs), key=lambda q: q.value),
        bandwidth=min((cost.bandwidth for cost in costs), key=lambda q: q.value),
    )


def _two_level(
    operation: Operation, num_bytes: float, per_host: int, num_hosts: int, inner: LinkCost, outer: LinkCost
) -> float:
    """Seconds of an operation done within hosts and, by every device on its own share of the network, between them."""

    def within(part: Operation, size: float) -> float:
        return estimate_flat(part, size, per_host, inner.alpha.value, inner.bandwidth.value)

    def between(part: Operation, size: float) -> float:
        return estimate_flat(part, size, num_hosts, outer.alpha.value, outer.bandwidth.value)

    if operation == "all_reduce":
        piece = num_bytes / per_host
        return within("reduce_scatter", num_bytes) + between("all_reduce", piece) + within("all_gather", piece)
    if operation == "all_gather":
        return between("all_gather", num_bytes) + within("all_gather", num_bytes * num_hosts)
    if operation == "reduce_scatter":
        return within("reduce_scatter", num_bytes) + between("reduce_scatter", num_bytes / per_host)
    # all_to_all: rows for another host go to the peer of the same place there, which hands them on. A broadcast
    # crosses the network once per host and spreads there.
    return between(operation, num_bytes) + within(operation, num_bytes)
