"""A topology drawn: a graph of devices, hosts and links, and a heat map of what a message between two ranks takes.

Both are records first (plain numbers, JSON) and plotly figures second, like the charts.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from workbench.base import human
from workbench.cluster import LinkCost, Topology
from workbench.view.svg import COLOURS

__all__ = ["HeatMap", "LinkGraph", "heat_figure", "link_graph", "link_heat", "topology_figure"]

MAX_HEAT = 256  # ranks on a side; a larger machine is drawn host by host
MAX_EDGES = 1500
HOST_RADIUS, RING_RADIUS = 1.0, 3.2
MESSAGE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class HeatMap:
    """Square matrix of `values` in `unit`; None where nothing is known, and on the diagonal."""

    title: str
    labels: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    unit: str
    axis: str
    note: str = ""

    def __post_init__(self) -> None:
        if any(len(row) != len(self.labels) for row in (self.labels, *self.values)) or len(self.values) != len(
            self.labels
        ):
            raise ValueError(
                f"{len(self.labels)} labels for {len(self.values)} rows of {[len(r) for r in self.values]}"
            )
        if not all(value is None or (math.isfinite(value) and value >= 0) for row in self.values for value in row):
            raise ValueError("a heat map needs finite values from 0 on")

    def to_json(self) -> dict[str, object]:
        return {"kind": "heat", **asdict(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A device, a switch or the network at (x, y); `group` counts the hosts, -1 for the network between them."""

    label: str
    kind: str
    group: int
    x: float
    y: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
    """A link between two nodes (by place in the list); `bandwidth` in B/s."""

    a: int
    b: int
    bandwidth: float
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkGraph:
    title: str
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    note: str = ""

    def to_json(self) -> dict[str, object]:
        return {"kind": "graph", **asdict(self)}


def link_heat(topology: Topology, *, num_bytes: int = MESSAGE_BYTES) -> HeatMap:
    """Seconds of one message of `num_bytes` from rank to rank; from host to host where there are many ranks.

    Raises ValueError for a topology in which no link is known.
    """
    ranks = list(range(topology.num_devices))
    labels = tuple(map(str, ranks))
    axis = "rank"
    if len(ranks) > MAX_HEAT:
        ranks = [next(x.rank for x in topology.devices if x.host == host) for host in topology.hosts]
        labels, axis = topology.hosts, "host, by its first rank"
    rows = []
    for a in ranks:
        costs = [None if a == b else topology.link(a, b) for b in ranks]
        rows.append(tuple(None if cost is None else cost.time(num_bytes).value for cost in costs))
    known = [
        (value, labels[i], labels[j]) for i, row in enumerate(rows) for j, value in enumerate(row) if value is not None
    ]
    if not known:
        raise ValueError("no link of this topology is known")
    slow, fast = max(known), min(known)
    missing = len(ranks) * (len(ranks) - 1) - len(known)
    finding = f"{human(num_bytes, 'B')} take {human(fast[0], 's')}"
    if slow[0] > fast[0]:
        finding += f" at best ({fast[1]} to {fast[2]}) and {human(slow[0], 's')} at worst ({slow[1]} to {slow[2]})"
    return HeatMap(
        title=finding,
        labels=labels,
        values=tuple(rows),
        unit="s",
        axis=axis,
        note=f"{missing:,} of {len(ranks) * (len(ranks) - 1):,} links are not known" if missing else "",
    )


def link_graph(topology: Topology) -> LinkGraph:
    """Devices around their host, hosts around each other. Links that are listed join two devices; a switch or a network
    that stands for many links is a node of its own."""
    places: list[Node] = []
    of_rank: dict[int, int] = {}
    centres: list[tuple[float, float]] = []
    hosts = topology.hosts
    ring = 0.0 if len(hosts) == 1 else max(RING_RADIUS, len(hosts) * 2.6 * HOST_RADIUS / (2 * math.pi))
    members = {host: [x for x in topology.devices if x.host == host] for host in hosts}
    for group, host in enumerate(hosts):
        cx, cy = _on_circle(ring, group, len(hosts))
        centres.append((cx, cy))
        for i, device in enumerate(members[host]):
            dx, dy = _on_circle(HOST_RADIUS, i, len(members[host]))
            of_rank[device.rank] = len(places)
            label = f"rank {device.rank}, {device.name} on {host}"
            places.append(Node(label=label, kind="device", group=group, x=cx + dx, y=cy + dy))
    edges = [_edge(of_rank[link.a], of_rank[link.b], link.cost) for link in topology.pairs]
    listed = {(link.a, link.b) for link in topology.pairs} | {(link.b, link.a) for link in topology.pairs}
    gates: list[int] = [of_rank[members[host][0].rank] for host in hosts]
    if topology.within is not None:
        for group, host in enumerate(hosts):
            ranks = [device.rank for device in members[host]]
            if len(ranks) > 1 and topology.within.kind == "switch":
                gates[group] = len(places)
                x, y = centres[group]
                places.append(Node(label=f"links within {host}", kind="switch", group=group, x=x, y=y))
                edges += [_edge(of_rank[rank], gates[group], topology.within.cost) for rank in ranks]
            elif len(ranks) > 1:
                pair = topology.within.pair()
                edges += [
                    _edge(of_rank[a], of_rank[b], pair)
                    for i, a in enumerate(ranks)
                    for b in ranks[i + 1 :]
                    if (a, b) not in listed
                ]
    if topology.between is not None and len(hosts) > 1:
        centre = len(places)
        places.append(Node(label="network between hosts", kind="network", group=-1, x=0.0, y=0.0))
        edges += [_edge(gate, centre, topology.between.cost) for gate in gates]
    left = max(0, len(edges) - MAX_EDGES)
    shown = sorted(edges, key=lambda edge: edge.bandwidth)[-MAX_EDGES:] if left else edges
    return LinkGraph(
        title=_finding(topology, edges),
        nodes=tuple(places),
        edges=tuple(shown),
        note=f"{left:,} slower links are not drawn" if left else "",
    )


def _finding(topology: Topology, edges: Sequence[Edge]) -> str:
    devices = f"{topology.num_devices} device{'s' if topology.num_devices > 1 else ''}"
    hosts = f"{len(topology.hosts)} host{'s' if len(topology.hosts) > 1 else ''}"
    if not edges:
        return f"{devices} on {hosts}, no link known"
    rates = [edge.bandwidth for edge in edges]
    low, high = human(min(rates), "B/s"), human(max(rates), "B/s")
    return f"{devices} on {hosts}, links of {low}" + ("" if low == high else f" to {high}")


def _on_circle(radius: float, place: int, count: int) -> tuple[float, float]:
    angle = math.pi / 2 - 2 * math.pi * place / max(1, count)
    return radius * math.cos(angle), radius * math.sin(angle)


def _edge(a: int, b: int, cost: LinkCost) -> Edge:
    rate = cost.bandwidth
    return Edge(
        a=a,
        b=b,
        bandwidth=rate.value,
        text=f"{human(rate.value, 'B/s')}, start {human(cost.alpha.value, 's')} ({rate.basis})",
    )


def heat_figure(chart: HeatMap) -> Any:
    """A `plotly.graph_objects.Figure` of a heat map; colours follow the logarithm, the hover text the value."""
    import plotly.graph_objects as go

    return go.Figure(heat_traces(chart), heat_layout(chart))


def heat_traces(chart: HeatMap) -> list[dict[str, Any]]:
    logs = [[None if not value else math.log10(value) for value in row] for row in chart.values]
    texts = [["–" if value is None else human(value, chart.unit) for value in row] for row in chart.values]
    labels = [html.escape(label) for label in chart.labels]
    known = sorted({value for row in logs for value in row if value is not None})
    marks = known if len(known) <= 5 else [known[round(i * (len(known) - 1) / 4)] for i in range(5)]
    return [
        {
            "type": "heatmap",
            "z": logs,
            "x": labels,
            "y": labels,
            "text": texts,
            "hovertemplate": "%{y} to %{x}: %{text}<extra></extra>",
            "colorscale": "Viridis",
            "reversescale": True,
            "colorbar": {
                "title": {"text": f"[{chart.unit}]"},
                "tickvals": marks,
                "ticktext": [human(10**mark, chart.unit) for mark in marks],
            },
            **({"texttemplate": "%{text}"} if len(chart.labels) <= 10 else {}),
        }
    ]


def heat_layout(chart: HeatMap) -> dict[str, Any]:
    axis = {"type": "category", "title": {"text": f"to {chart.axis}"}}
    return {
        "title": {"text": chart.title, "font": {"size": 15}},
        "template": "plotly_white",
        "height": 460,
        "margin": {"l": 70, "r": 30, "t": 50, "b": 60},
        "xaxis": axis,
        "yaxis": {**axis, "title": {"text": f"from {chart.axis}"}, "autorange": "reversed", "scaleanchor": "x"},
        "annotations": _note(chart.note),
    }


def topology_figure(chart: LinkGraph) -> Any:
    """A `plotly.graph_objects.Figure` of a graph."""
    import plotly.graph_objects as go

    return go.Figure(graph_traces(chart), graph_layout(chart))


def graph_traces(chart: LinkGraph) -> list[dict[str, Any]]:
    """One line trace per rate of links, thicker where faster; invisible points in the middle of each carry its text."""
    traces: list[dict[str, Any]] = []
    rates = sorted({edge.bandwidth for edge in chart.edges})
    for rate in _thinned(rates):
        edges = [edge for edge in chart.edges if _nearest(edge.bandwidth, _thinned(rates)) == rate]
        xs: list[float | None] = []
        ys: list[float | None] = []
        for edge in edges:
            a, b = chart.nodes[edge.a], chart.nodes[edge.b]
            xs += [a.x, b.x, None]
            ys += [a.y, b.y, None]
        share = 1.0 if len(rates) < 2 else math.log(rate / rates[0]) / math.log(rates[-1] / rates[0])
        colour = COLOURS[0] if share > 0.5 else COLOURS[1]
        line = {"width": 1 + 3 * share, "color": colour}
        name = f"about {human(rate, 'B/s')}" if len(rates) > len(_thinned(rates)) else human(rate, "B/s")
        traces.append(
            {"type": "scatter", "mode": "lines", "x": xs, "y": ys, "line": line, "name": name, "hoverinfo": "skip"}
        )
    middles = [(chart.nodes[edge.a], chart.nodes[edge.b], edge) for edge in chart.edges]
    traces.append(
        {
            "type": "scatter",
            "mode": "markers",
            "x": [(a.x + b.x) / 2 for a, b, _ in middles],
            "y": [(a.y + b.y) / 2 for a, b, _ in middles],
            "text": [html.escape(f"{a.label} – {b.label}: {edge.text}") for a, b, edge in middles],
            "hovertemplate": "%{text}<extra></extra>",
            "marker": {"size": 9, "opacity": 0},
            "showlegend": False,
        }
    )
    symbols = {"device": ("circle", 15), "switch": ("square", 12), "network": ("diamond", 18)}
    traces.append(
        {
            "type": "scatter",
            "mode": "markers",
            "x": [node.x for node in chart.nodes],
            "y": [node.y for node in chart.nodes],
            "text": [html.escape(node.label) for node in chart.nodes],
            "hovertemplate": "%{text}<extra></extra>",
            "marker": {
                "symbol": [symbols[node.kind][0] for node in chart.nodes],
                "size": [symbols[node.kind][1] for node in chart.nodes],
                "color": [COLOURS[4] if node.group < 0 else COLOURS[node.group % len(COLOURS)] for node in chart.nodes],
            },
            "showlegend": False,
        }
    )
    return traces


def _thinned(rates: Sequence[float]) -> list[float]:
    """At most four of the rates, the slowest and the fastest among them."""
    if len(rates) <= 4:
        return list(rates)
    return [rates[round(i * (len(rates) - 1) / 3)] for i in range(4)]


def _nearest(rate: float, among: Sequence[float]) -> float:
    return min(among, key=lambda x: abs(math.log(x / rate)))


def graph_layout(chart: LinkGraph) -> dict[str, Any]:
    hidden = {"visible": False}
    return {
        "title": {"text": chart.title, "font": {"size": 15}},
        "template": "plotly_white",
        "height": 480,
        "margin": {"l": 30, "r": 30, "t": 50, "b": 30},
        "xaxis": hidden,
        "yaxis": {**hidden, "scaleanchor": "x"},
        "annotations": _note(chart.note),
    }


def _note(text: str) -> list[dict[str, Any]]:
    if not text:
        return []
    place = {"xref": "paper", "yref": "paper", "x": 0, "y": -0.12, "xanchor": "left", "showarrow": False}
    return [{"text": text, "font": {"size": 11}, **place}]
