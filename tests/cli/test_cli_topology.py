"""`workbench topology`: of hardware by datasheet, and of this machine, measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench.cluster import Topology, read_hardware, read_topology

Call = Callable[..., Any]


def test_hardware_by_datasheet_is_shown_and_saved(call: Call, tmp_path: Path) -> None:
    outcome = call("topology", "--hardware", "h200", "--devices", 16, "--out", tmp_path / "t.json")
    assert outcome.code == 0, outcome.err
    assert "16 devices on 2 hosts" in outcome.out
    assert "claimed, not measured" in outcome.out
    assert read_topology(tmp_path / "t.json") == Topology.of_hardware(read_hardware("h200"), 16)


def test_one_node_is_the_default_and_json_is_the_record(call: Call) -> None:
    outcome = call("topology", "--hardware", "gb300", "--json")
    assert outcome.code == 0, outcome.err
    assert len(outcome.record["devices"]) == 72
    assert Topology.from_json(outcome.record).num_devices == 72


def test_the_network_can_be_made_slower(call: Call) -> None:
    outcome = call("topology", "--hardware", "h100", "--devices", 16, "--inter-node-scale", 0.05, "--json")
    slow, before = Topology.from_json(outcome.record), Topology.of_hardware(read_hardware("h100"), 16)
    assert (
        slow.collective_time("all_reduce", 1e8, range(16)).value
        > 5 * before.collective_time("all_reduce", 1e8, range(16)).value
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--hardware", "abacus"), "ConfigError: hardware 'abacus' is not in the catalogue"),
        (("--hardware", "h100", "--ranks", "2"), "choose one"),
        (("--hardware", "h100", "--device", "cpu"), "choose one"),
        (("--devices", "3"), "--devices says how many of --hardware"),
        (("--hardware", "h100", "--devices", "0"), "not a number from 1"),
        (("--hardware", "h100", "--inter-node-scale", "0"), "not a factor above 0"),
        (("--hardware", "h100", "--inter-node-scale", "nan"), "not a factor above 0"),
        (("--hardware", "no/such.toml"), "no/such.toml: file is missing"),
    ],
)
def test_questions_that_cannot_be_asked(call: Call, arguments: tuple[str, ...], words: str) -> None:
    outcome = call("topology", *arguments)
    assert outcome.code == 2
    assert words in outcome.err


def test_without_hardware_this_machine_is_measured(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def measure(num_ranks: int, **options: Any) -> Topology:
        asked.update(options, num_ranks=num_ranks)
        return Topology.of_hardware(read_hardware("h100"), num_ranks)

    monkeypatch.setattr("workbench.cluster.measure_topology", measure)
    monkeypatch.setattr("workbench.cluster.list_devices", lambda: ())
    assert call("topology", "--device", "cpu", "--no-rates").code == 0
    assert (asked["num_ranks"], asked["device"], asked["rates"]) == (2, "cpu", False)
    assert call("topology", "--device", "cpu", "--ranks", 3).code == 0
    assert (asked["num_ranks"], asked["rates"]) == (3, True)


def test_under_torchrun_rank_zero_prints_and_the_others_are_silent(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [None, Topology.of_hardware(read_hardware("h100"), 2)]
    monkeypatch.setattr("workbench.cluster.relay.is_torchrun", lambda: True)
    monkeypatch.setattr("workbench.cluster.relay.measure_torchrun_topology", lambda **options: answers.pop(0))
    other, first = call("topology"), call("topology")
    assert (other.code, other.out) == (0, "")
    assert "2 devices on 1 host" in first.out
    refused = call("topology", "--ranks", 2)
    assert refused.code == 2
    assert "torchrun has said how many" in refused.err


@pytest.mark.slow
@pytest.mark.ranks
def test_two_ranks_of_this_machine(call: Call, tmp_path: Path) -> None:
    outcome = call("topology", "--ranks", 2, "--device", "cpu", "--no-rates", "--json", "--out", tmp_path / "t.json")
    assert outcome.code == 0, outcome.err
    found = Topology.from_json(outcome.record)
    assert found == read_topology(tmp_path / "t.json")
    assert found.num_devices == 2
    assert found.collective_time("all_reduce", 4096, (0, 1)).basis == "measured"
