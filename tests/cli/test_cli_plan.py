"""`workbench plan`: a plan from a config alone, reasons where nothing fits, usage errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from workbench.checkpoint import k3_config
from workbench.cli import main
from workbench.cluster import Topology, read_hardware, read_topology
from workbench.cluster.catalogue import HARDWARE_ROOT
from workbench.placement import Layout
from workbench.planner import Objective, plan
from workbench.spec import read_spec


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds nothing but a config: the weights have not arrived."""
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(k3_config(num_experts=16, top_k=4)))
    return path


ASKED = ("--hardware", "h100", "--devices", "4", "--context", "256", "--concurrency", "4")


def test_a_plan_with_reasons_from_a_config_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder), *ASKED, "--launch"]) == 0
    text = capsys.readouterr().out
    for phrase in ("Chosen:", "What binds:", "Memory of each rank", "torchrun", "vllm serve", "sglang.launch_server"):
        assert phrase in text, phrase


def test_the_record_is_one_json_document(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder), *ASKED, "--json", "--launch"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["ok"] is True
    assert record["best"]["num_devices"] <= 4
    assert [x["engine"] for x in record["launch"]] == ["workbench", "vllm", "sglang"]


def test_nothing_fits_is_the_answer_no_with_the_reasons(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A device of 100 kB in a file of one's own."""
    toml = folder / "tiny.toml"
    toml.write_text(
        'name = "tiny"\nvendor = "nobody"\ndevice_type = "toy"\ndevices_per_node = 2\nformats = ["bf16"]\n'
        'memory = { value = 100000, unit = "B", source = "made up" }\n'
        'memory_bandwidth = { value = 1e9, unit = "B/s", source = "made up" }\n'
        'host_memory = { value = 1e9, unit = "B", source = "made up" }\n'
        '[matmul]\nbf16 = { value = 1e9, unit = "FLOP/s", source = "made up" }\n'
        '[intra_node]\nbandwidth = { value = 1e9, unit = "B/s", source = "made up" }\n'
        'latency = { reason = "made up" }\n'
        '[inter_node]\nbandwidth = { reason = "made up" }\nlatency = { reason = "made up" }\n'
    )
    asked = ("--hardware", str(toml), "--devices", "2", "--context", "64", "--concurrency", "1")
    assert main(["plan", str(folder), *asked]) == 1
    text = capsys.readouterr().out
    assert text.startswith("No plan fits.")
    assert "short (weights" in text


@pytest.mark.parametrize(
    ("asked", "phrase"),
    [
        ((), "name the machines"),
        (("--topology", "x.json", "--hardware", "h100"), "leave out"),
        (("--hardware", "no-such-device"), "no-such-device"),
        (("--hardware", "h100", "--layout", "tp"), "layout 'tp' is not readable"),
        (("--hardware", "h100", "--context", "999999999"), "at most"),
    ],
)
def test_what_makes_no_sense_is_an_error(
    folder: Path, capsys: pytest.CaptureFixture[str], asked: tuple[str, ...], phrase: str
) -> None:
    assert main(["plan", str(folder), *asked]) == 2
    assert phrase in capsys.readouterr().err


def test_a_limit_that_nothing_keeps_is_no(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder), *ASKED, "--layout", "tp2", "--max-per-token-s", "1e-9"]) == 1
    assert "limit" in capsys.readouterr().out


def test_only_the_layouts_asked_for_are_considered(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder), *ASKED, "--layout", "pp2", "--layout", "tp2", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["num_layouts"] == 2


def test_the_command_and_the_library_take_the_same_reserve_off_a_device(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a topology that was saved and read again does, too."""
    topology = Topology.of_hardware(read_hardware("h100"), 4)
    found = plan(read_spec(folder), topology, Objective(context=256, concurrency=4), layouts=[Layout(tp=2)])
    assert found.best is not None
    ours = found.best.fullest
    assert ours.capacity is not None
    assert ours.of("other") == 2e9 + 256e6, "a runtime, and one group of ranks"
    topology.save(folder / "topology.json")
    rest = ("--context", "256", "--concurrency", "4", "--layout", "tp2", "--json")
    for machines in (("--hardware", "h100", "--devices", "4"), ("--topology", str(folder / "topology.json"))):
        assert main(["plan", str(folder), *machines, *rest]) == 0
        (ledger,) = json.loads(capsys.readouterr().out)["best"]["memory"]
        assert (ledger["serving_peak"], ledger["free"]) == (ours.serving_peak, ours.free), machines


def test_a_share_that_a_file_of_ones_own_holds_back_is_taken_by_both(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (HARDWARE_ROOT / "h100.toml").read_text()
    share = 'reserved_share = { value = 0.125, unit = "1", source = "seen here" }\n'
    (folder / "ours.toml").write_text(text.replace("devices_per_node", f"{share}devices_per_node", 1))
    topology = Topology.of_hardware(read_hardware(folder / "ours.toml"), 4)
    topology.save(folder / "ours.json")
    assert read_topology(folder / "ours.json") == topology
    asked = ("--context", "256", "--concurrency", "4", "--layout", "tp2", "--json")
    for machines in (
        ("--hardware", str(folder / "ours.toml"), "--devices", "4"),
        ("--topology", str(folder / "ours.json")),
    ):
        assert main(["plan", str(folder), *machines, *asked]) == 0
        (ledger,) = json.loads(capsys.readouterr().out)["best"]["memory"]
        (other,) = (line for line in ledger["lines"] if line["role"] == "other")
        assert (other["bytes"], other["source"]) == (ledger["capacity"] / 8, "seen here")
