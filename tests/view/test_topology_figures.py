"""Topology drawn: the figures hold what the record holds, titles state findings, what is not known is not drawn."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from workbench.base import Quantity
from workbench.cluster import LinkCost, PairLink, Topology, TopologyDevice, read_hardware
from workbench.view import HeatMap, heat_figure, link_graph, link_heat, topology_figure


def cost(alpha: float, bandwidth: float) -> LinkCost:
    return LinkCost(alpha=Quantity(alpha, "s"), bandwidth=Quantity(bandwidth, "B/s"))


def device(rank: int, host: str, name: str = "Chip") -> TopologyDevice:
    return TopologyDevice(rank=rank, host=host, name=name, device_type="npu")


def three(name: str = "Chip") -> Topology:
    """Ranks 0 and 1 on one host; the link from 1 to 2 is not known."""
    return Topology(
        name="three",
        devices=(device(0, "a", name), device(1, "a"), device(2, "b")),
        pairs=(PairLink(a=0, b=1, cost=cost(1e-6, 1e9)), PairLink(a=0, b=2, cost=cost(1e-5, 1e7))),
    )


def test_figures_need_neither_torch_nor_plotly_until_drawn() -> None:
    code = (
        "import sys\nfrom workbench.view import link_graph, link_heat\n"
        "from workbench.cluster import Topology, read_hardware\n"
        "topology = Topology.of_hardware(read_hardware('h200'), 16)\n"
        "link_graph(topology), link_heat(topology)\n"
        "assert not {'torch', 'plotly'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_heat_holds_the_time_of_every_pair_both_ways_and_gaps_as_gaps() -> None:
    chart = link_heat(three(), num_bytes=1_000_000)
    assert chart.values[0][1] == chart.values[1][0] == pytest.approx(1e-6 + 1e-3)
    assert chart.values[0][2] == pytest.approx(1e-5 + 0.1)
    assert chart.values[1][2] is chart.values[2][1] is chart.values[1][1] is None
    assert chart.title == "1 MB take 1 ms at best (0 to 1) and 100 ms at worst (2 to 0)"
    assert chart.note == "2 of 6 links are not known"
    json.dumps(chart.to_json(), allow_nan=False)


def test_heat_figure_names_axes_and_values() -> None:
    figure = heat_figure(link_heat(three(), num_bytes=1_000_000))
    (trace,) = figure.data
    assert trace.text[0][2] == "100 ms"
    assert trace.text[1][2] == "–"
    assert figure.layout.xaxis.title.text == "to rank"
    assert figure.layout.yaxis.title.text == "from rank"
    assert trace.colorbar.title.text == "[s]"
    assert len(trace.colorbar.tickvals) == 2
    assert figure.layout.annotations[0].text.endswith("not known")


def test_many_ranks_are_drawn_host_by_host() -> None:
    chart = link_heat(Topology.of_hardware(read_hardware("h200"), 320))
    assert chart.labels[:2] == ("node0", "node1")
    assert len(chart.values) == 40
    assert chart.axis == "host, by its first rank"


def test_graph_joins_listed_pairs() -> None:
    chart = link_graph(three())
    assert [(edge.a, edge.b, edge.bandwidth) for edge in chart.edges] == [(0, 1, 1e9), (0, 2, 1e7)]
    assert [node.kind for node in chart.nodes] == ["device"] * 3
    assert chart.title == "3 devices on 2 hosts, links of 10 MB/s to 1 GB/s"
    assert len({(round(node.x, 6), round(node.y, 6)) for node in chart.nodes}) == 3, "nodes on top of each other"
    json.dumps(chart.to_json(), allow_nan=False)


def test_a_switch_and_the_network_are_nodes_and_a_mesh_is_all_its_pairs() -> None:
    switched = link_graph(Topology.of_hardware(read_hardware("h200"), 16))
    assert [node.kind for node in switched.nodes] == ["device"] * 16 + ["switch"] * 2 + ["network"]
    assert len(switched.edges) == 16 + 2
    meshed = link_graph(Topology.of_hardware(read_hardware("mi355x"), 8))
    assert len(meshed.edges) == 8 * 7 // 2
    assert meshed.edges[0].bandwidth == pytest.approx(537.6e9 / 7)


def test_a_graph_of_very_many_links_says_what_it_leaves_out() -> None:
    chart = link_graph(Topology.of_hardware(read_hardware("mi355x"), 512))
    assert len(chart.edges) == 1500
    assert chart.note == "356 slower links are not drawn"
    assert topology_figure(chart).layout.annotations[0].text == chart.note


def test_graph_figure_draws_each_node_and_link_with_its_words() -> None:
    figure = topology_figure(link_graph(three()))
    lines = [trace for trace in figure.data if trace.mode == "lines"]
    assert {trace.name for trace in lines} == {"10 MB/s", "1 GB/s"}
    words = [text for trace in figure.data if trace.text for text in trace.text]
    assert "rank 2, Chip on b" in words
    assert any("start 10 µs (measured)" in text for text in words)
    assert lines[0].line.width < lines[1].line.width


def test_nothing_to_draw_is_said() -> None:
    lonely = Topology(name="one", devices=(device(0, "a"),))
    assert link_graph(lonely).title == "1 device on 1 host, no link known"
    topology_figure(link_graph(lonely))
    with pytest.raises(ValueError, match="no link"):
        link_heat(lonely)


def test_a_heat_map_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="labels"):
        HeatMap(title="", labels=("a",), values=((None, 1.0),), unit="s", axis="rank")
    with pytest.raises(ValueError, match="finite"):
        HeatMap(title="", labels=("a",), values=((float("nan"),),), unit="s", axis="rank")
