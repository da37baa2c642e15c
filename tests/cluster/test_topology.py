"""Topology: what is asked of it comes from the firmest source it has; a what-if changes what it says, no more."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from workbench.base import ConfigError, Quantity
from workbench.cluster import (
    AlgorithmChoice,
    CollectiveFit,
    CollectiveSupport,
    Fabric,
    LinkCost,
    PairLink,
    Topology,
    TopologyDevice,
    read_hardware,
    read_topology,
)


def cost(alpha: float, bandwidth: float, basis: Any = "measured") -> LinkCost:
    return LinkCost(alpha=Quantity(alpha, "s", basis, "here"), bandwidth=Quantity(bandwidth, "B/s", basis, "here"))


def devices(*hosts: str) -> tuple[TopologyDevice, ...]:
    return tuple(
        TopologyDevice(
            rank=rank,
            host=host,
            name="Chip",
            device_type="npu",
            memory_total=Quantity(64e9, "B", "measured", "driver"),
            matmul={"bf16": Quantity(3e14, "FLOP/s")},
            formats=("bf16",),
        )
        for rank, host in enumerate(hosts)
    )


def measured() -> Topology:
    """Five ranks on two hosts; pairs within a host are 10 times as fast as across."""
    hosts = ("a", "a", "a", "b", "b")
    pairs = tuple(
        PairLink(a=a, b=b, cost=cost(1e-6, 1e10) if hosts[a] == hosts[b] else cost(1e-5, 1e9))
        for a in range(5)
        for b in range(a + 1, 5)
    )
    fit = CollectiveFit(
        operation="all_reduce",
        ranks=(0, 1),
        dtype="bfloat16",
        cost=LinkCost(
            alpha=Quantity(2e-6, "s", "measured", "x"),
            bandwidth=Quantity(5e9, "B/s", "measured", "x"),
            residual=0.125,
            points=((1024, 2e-6), (4096, 3e-6)),
        ),
    )
    other = CollectiveFit(operation="all_reduce", ranks=(0, 1), dtype="float32", cost=cost(4e-6, 5e9))
    crossing = CollectiveFit(operation="all_reduce", ranks=(0, 3), dtype="bfloat16", cost=cost(4e-5, 5e8))
    return Topology(
        name="five",
        devices=devices(*hosts),
        pairs=pairs,
        collectives=(fit, other, crossing),
        claims=("claimed, not measured: broadcast",),
        taken_at="2026-01-02T03:04:05+00:00",
        coverage=(CollectiveSupport(operation="broadcast", dtype="int8", is_supported=False, detail="no"),),
        choices=(
            AlgorithmChoice(
                operation="all_to_all",
                ranks=(0, 1, 2),
                dtype="bfloat16",
                candidates=(("one call", cost(1e-5, 1e10)), ("messages between pairs", cost(1e-6, 1e9))),
            ),
        ),
    )


def test_importing_the_records_loads_no_torch() -> None:
    code = (
        "import sys\nfrom workbench.cluster import Topology, read_hardware\n"
        "Topology.of_hardware(read_hardware('h100'), 16).render()\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_hosts_and_spans() -> None:
    topology = measured()
    assert topology.num_devices == 5
    assert topology.hosts == ("a", "b")
    assert topology.host_of(3) == "b"
    assert topology.spans_hosts((2, 3))
    assert not topology.spans_hosts((0, 2))
    assert topology.span((0, 1, 3)) == (2, 1)


def test_the_fit_of_these_ranks_comes_first_in_the_dtype_asked_for() -> None:
    topology = measured()
    found = topology.collective_time("all_reduce", 5000, (1, 0))
    assert (found.value, found.basis) == (pytest.approx(3e-6), "measured")
    assert topology.collective_time("all_reduce", 5000, (0, 1), dtype="float32").value == pytest.approx(5e-6)
    assert topology.collective_time("all_reduce", 5000, (0, 1), dtype="int8").value == pytest.approx(3e-6)


def test_a_group_of_the_same_span_stands_in_and_says_so() -> None:
    topology = measured()
    alike = topology.collective_time("all_reduce", 5000, (3, 4))
    assert alike.value == pytest.approx(3e-6)
    assert alike.basis == "modelled"
    assert "[0, 1]" in alike.source
    assert topology.collective_time("all_reduce", 5000, (2, 4)).value == pytest.approx(5e-5), "across hosts"


def test_without_a_fit_the_slowest_link_of_the_group_decides() -> None:
    topology = measured()
    near = topology.collective_time("all_gather", 1_000_000, (0, 1, 2))
    far = topology.collective_time("all_gather", 1_000_000, (0, 1, 3))
    assert near.basis == far.basis == "modelled"
    assert near.value == pytest.approx(2e-6 + 2 * 1e-4)
    assert far.value == pytest.approx(2e-5 + 2 * 1e-3)


def test_a_message_costs_what_its_pair_costs() -> None:
    assert measured().collective_time("send_recv", 1e6, (4, 2)) == measured().link(2, 4).time(1e6)  # type: ignore[union-attr]


def test_one_rank_talks_to_nobody() -> None:
    found = measured().collective_time("all_to_all", 1e9, (2,))
    assert (found.value, found.unit, found.basis) == (0.0, "s", "exact")


@pytest.mark.parametrize("ranks", [(), (0, 0), (0, 5), (-1, 0)])
def test_groups_that_do_not_exist_are_refused(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="no such group"):
        measured().collective_time("all_reduce", 1, ranks)


def test_an_unknown_operation_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown operation"):
        measured().collective_time("juggle", 1, (0, 1))  # type: ignore[arg-type]


def test_a_link_nobody_knows_is_refused_with_the_way_out() -> None:
    lonely = Topology(name="two", devices=devices("a", "b"))
    assert lonely.link(0, 1) is None
    with pytest.raises(ConfigError, match=r"nothing is known about links between hosts.*Measure these ranks"):
        lonely.collective_time("all_reduce", 1, (0, 1))


def test_slower_links_between_hosts_change_those_alone() -> None:
    topology, slow = measured(), measured().with_inter_node(0.05)
    assert slow.link(0, 1) == topology.link(0, 1)
    before, after = topology.link(0, 3), slow.link(0, 3)
    assert before is not None
    assert after is not None
    assert after.time(1e6).value == pytest.approx(20 * before.time(1e6).value)
    assert after.alpha.basis == "modelled"
    assert [fit.ranks for fit in slow.collectives] == [(0, 1), (0, 1)], "what spans hosts no longer holds"
    assert slow.collective_time("all_reduce", 5000, (0, 1)) == topology.collective_time("all_reduce", 5000, (0, 1))
    for scale in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="scale"):
            topology.with_inter_node(scale)


def test_hardware_fills_node_after_node() -> None:
    topology = Topology.of_hardware(read_hardware("h200"), 20)
    assert [topology.host_of(rank) for rank in (0, 7, 8, 16, 19)] == ["node0", "node0", "node1", "node2", "node2"]
    assert topology.devices[3].matmul_rate("bfloat16") == topology.devices[3].matmul_rate("bf16")
    assert topology.devices[3].matmul_rate("mxfp4") is None
    assert topology.taken_at == ""
    assert all(claim.startswith("claimed, not measured: ") for claim in topology.claims)


def test_two_levels_beat_one_slow_ring_over_nodes() -> None:
    """Each device has a network share of its own, so a large all-reduce over two nodes sends an eighth through it."""
    topology = Topology.of_hardware(read_hardware("h200"), 16)
    one, two = (topology.collective_time("all_reduce", 1 << 30, range(n)).value for n in (8, 16))
    size = float(1 << 30)
    assert one == pytest.approx(2 * 7 / 8 * size / 450e9, rel=0.03)
    assert two == pytest.approx(2 * 7 / 8 * size / 450e9 + size / 8 / 50e9, rel=0.03)
    assert two < 2 * 15 / 16 * size / 50e9, "a ring over the slowest link"


def test_the_slow_network_shows_in_every_collective_that_crosses_it() -> None:
    topology = Topology.of_hardware(read_hardware("b300"), 16)
    slow = topology.with_inter_node(0.05)
    for operation in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"):
        near = slow.collective_time(operation, 1e6, range(8))  # type: ignore[arg-type]
        assert near == topology.collective_time(operation, 1e6, range(8))  # type: ignore[arg-type]
        far, before = (x.collective_time(operation, 1e6, range(16)).value for x in (slow, topology))  # type: ignore[arg-type]
        assert far > 3 * before, operation


def test_a_mesh_gives_a_pair_its_own_share_and_a_full_group_everything() -> None:
    fabric = Fabric(cost=cost(0.0, 7e9), kind="mesh", size=8)
    assert fabric.pair().bandwidth.value == pytest.approx(1e9)
    assert fabric.of_group(4).bandwidth.value == pytest.approx(3e9)
    assert fabric.of_group(8).bandwidth.value == pytest.approx(7e9)
    assert Fabric(cost=cost(0.0, 7e9), kind="switch", size=8).pair().bandwidth.value == 7e9


def test_the_network_may_be_given_and_an_unpublished_one_is_not_invented() -> None:
    hardware = read_hardware("mtt-s5000")
    assert Topology.of_hardware(hardware, 8).collective_time("all_reduce", 1e6, range(8)).value > 0
    with pytest.raises(ConfigError, match="nothing is known about links between hosts"):
        Topology.of_hardware(hardware, 16).collective_time("all_reduce", 1e6, range(16))
    given = Topology.of_hardware(hardware, 16, inter_node=Quantity(25e9, "B/s", "measured", "our fabric"))
    link = given.link(0, 8)
    assert link is not None
    assert link.bandwidth == Quantity(25e9, "B/s", "measured", "our fabric")
    for wrong in (Quantity(25e9, "B"), Quantity(0.0, "B/s")):
        with pytest.raises(ConfigError, match="bandwidth between nodes"):
            Topology.of_hardware(hardware, 16, inter_node=wrong)
    with pytest.raises(ConfigError, match="at least one device"):
        Topology.of_hardware(hardware, 0)


def test_estimates_on_assumed_latency_are_assumed() -> None:
    found = Topology.of_hardware(read_hardware("h100"), 8).collective_time("all_reduce", 1e6, range(8))
    assert found.basis == "assumed"
    assert "no published latency" in found.source


def test_c06_the_choice_between_algorithms_is_made_by_measurement_and_both_are_shown() -> None:
    choice = measured().choices[0]
    assert choice.best(1000) == "messages between pairs"
    assert choice.best(1e7) == "one call"
    text = measured().render()
    assert "one call" in text
    assert "messages between pairs" in text
    assert "* the faster of those measured" in text


@pytest.mark.parametrize("make", [measured, lambda: Topology.of_hardware(read_hardware("mi355x"), 24)])
def test_a_topology_survives_its_file_and_a_pickle(make: Any, tmp_path: Path) -> None:
    topology = make()
    topology.save(tmp_path / "topology.json")
    again = read_topology(tmp_path / "topology.json")
    assert again == topology
    assert again.render() == topology.render()
    assert pickle.loads(pickle.dumps(topology)) == topology


def changed(path: str, value: Any) -> dict[str, Any]:
    """The JSON of `measured` with one member replaced ("devices.0.rank"), or removed where `value` is ...."""
    record: Any = json.loads(json.dumps(measured().to_json()))
    *parents, last = path.split(".")
    place = record
    for key in parents:
        place = place[int(key) if isinstance(place, list) else key]
    if value is ...:
        del place[last]
    else:
        place[int(last) if isinstance(place, list) else last] = value
    return record


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("form", "other 1", "form"),
        ("name", 3, "name"),
        ("devices", [], "devices"),
        ("devices", {}, "devices"),
        ("devices.0.rank", 1, "numbered by rank"),
        ("devices.0.rank", True, r"devices\[0\].rank"),
        ("devices.0.host", ..., r"devices\[0\].host"),
        ("devices.1.memory_total.unit", "B/s", r"devices\[1\].memory_total.unit"),
        ("devices.1.memory_total.value", -1, r"devices\[1\].memory_total.value"),
        ("devices.1.memory_total.value", "9", r"devices\[1\].memory_total.value"),
        ("devices.1.memory_total.value", 10**400, r"devices\[1\].memory_total.value"),
        ("devices.1.memory_total.basis", "guessed", r"devices\[1\].memory_total.basis"),
        ("devices.1.matmul.bf16", 5, r"devices\[1\].matmul.bf16"),
        ("devices.1.formats", [1], r"devices\[1\].formats\[0\]"),
        ("devices.1.surprise", 1, "surprise"),
        ("pairs.0.b", 9, "two devices"),
        ("pairs.0.b", 0, "two devices"),
        ("pairs.1.b", 1, "listed twice"),
        ("pairs.0.cost.bandwidth.value", 0, r"pairs\[0\].cost.bandwidth"),
        ("pairs.0.cost", [], r"pairs\[0\].cost"),
        ("collectives.0.operation", "juggle", r"collectives\[0\].operation"),
        ("collectives.0.ranks", [1, 0], r"collectives\[0\].ranks"),
        ("collectives.0.ranks", [0], r"collectives\[0\].ranks"),
        ("collectives.0.ranks", [0, 17], "no such group"),
        ("collectives.0.cost.points", [[1]], r"collectives\[0\].cost.points\[0\]"),
        ("collectives.0.cost.points", [[1.5, 2.0]], r"points\[0\].bytes"),
        ("collectives.0.cost.residual", None, "residual"),
        ("coverage.0.is_supported", 1, r"coverage\[0\].is_supported"),
        ("choices.0.candidates", [], r"choices\[0\].candidates"),
        ("within", "fast", "within"),
        ("claims", ["x", 3], r"claims\[1\]"),
        ("extra", {}, "extra"),
    ],
)
def test_a_hostile_file_is_refused_by_the_name_of_its_member(path: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        Topology.from_json(changed(path, value), where="file.json")
    assert caught.value.where == "file.json"


@pytest.mark.parametrize("record", [None, [], "text", 7, {}])
def test_what_is_no_topology_at_all_is_refused(record: object) -> None:
    with pytest.raises(ConfigError):
        Topology.from_json(record)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a JSON document"),
        (b"{", "not a JSON document"),
        (b"\xff\xfe", "not a JSON document"),
        (b'{"form": 1, "form": 2}', "stands twice"),
        (b'{"form": NaN}', "NaN is not a number"),
        (b"[" * 100_000, "not a JSON document"),
    ],
)
def test_a_broken_file_is_a_config_error(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_topology(tmp_path / "t.json")
    with pytest.raises(ConfigError, match="missing"):
        read_topology(tmp_path / "none.json")


def test_tables_show_devices_links_collectives_gaps_and_claims() -> None:
    text = measured().render()
    for words in ("five: 5 devices on 2 hosts", "0 – 1", "all_reduce", "12%", "int8: no", "claimed, not measured"):
        assert words in text, words
    assert measured()._repr_html_().count("<table>") == 6
