"""The hardware catalogue: every entry reads, every figure has a source, every gap a reason; files are not trusted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from workbench.base import ConfigError
from workbench.cluster import Topology, hardware_names, hardware_table, read_hardware
from workbench.cluster.catalogue import HARDWARE_ROOT

WANTED = (
    "h100", "h200", "b200", "b300", "gb300-nvl72", "mi300x", "mi355x", "ascend-910b", "ascend-910c", "ascend-950pr",
    "ascend-950dt", "mtt-s4000", "mtt-s5000", "gaudi-3", "cpu-epyc-9654",
)  # fmt: skip


def test_the_catalogue_holds_what_it_promises() -> None:
    assert set(WANTED) <= set(hardware_names())


@pytest.mark.parametrize("name", hardware_names())
def test_every_figure_has_a_source_and_every_gap_a_reason(name: str) -> None:
    hardware = read_hardware(name)
    for place, figure in hardware.figures().items():
        assert len(figure.source) > 10, place
        assert figure.basis in ("datasheet", "modelled", "assumed"), place
    assert all(len(reason) > 5 for reason in hardware.gaps.values())
    assert {f"matmul.{x}" for x in hardware.formats} <= set(hardware.figures()) | set(hardware.gaps)
    json.dumps(hardware.to_json(), allow_nan=False)
    assert hardware.name in hardware.render()


@pytest.mark.parametrize("name", hardware_names())
def test_figures_are_of_one_device_in_one_direction(name: str) -> None:
    """Orders of magnitude: a figure of a board of eight, or of both directions and peers, would fall out."""
    hardware = read_hardware(name)
    assert 4e10 < hardware.memory.value < 1e12
    assert hardware.memory_bandwidth is not None
    assert 2e11 < hardware.memory_bandwidth.value < 1e13
    rates = hardware.matmul
    if "fp8" in rates and "bf16" in rates:
        assert 1 <= rates["fp8"].value / rates["bf16"].value <= 2.01
    inner, outer = hardware.intra_node.bandwidth, hardware.inter_node.bandwidth
    assert inner is not None
    assert inner.value < hardware.memory_bandwidth.value
    assert outer is None or outer.value < inner.value
    Topology.of_hardware(hardware, hardware.devices_per_node + 1)


def test_published_figures_stand_as_published() -> None:
    h200, mi355x, gb300 = read_hardware("h200"), read_hardware("mi355x"), read_hardware("gb300")
    assert h200.memory.value == 143771 * 2**20
    assert h200.matmul["bf16"].value == 1979e12 / 2
    assert h200.intra_node.bandwidth is not None
    assert h200.intra_node.bandwidth.value == 900e9 / 2
    assert mi355x.intra_node.kind == "mesh"
    assert mi355x.matmul["mxfp4"].value == 10.0663e15
    assert gb300.devices_per_node == 72


def test_a_beginning_names_one_entry_or_lists_those_it_may_mean() -> None:
    assert read_hardware("GB300").key == "gb300-nvl72"
    with pytest.raises(ConfigError, match=r"may be any of several.*ascend-950dt, ascend-950pr"):
        read_hardware("ascend-950")
    with pytest.raises(ConfigError, match=r"not in the catalogue.*h100.*one TOML file"):
        read_hardware("tpu")
    with pytest.raises(ConfigError, match="not in the catalogue"):
        read_hardware("")


def test_own_hardware_is_one_file(tmp_path: Path) -> None:
    text = (HARDWARE_ROOT / "h100.toml").read_text().replace("NVIDIA H100 SXM 80 GB", "Our Chip")
    (tmp_path / "ours.toml").write_text(text)
    assert read_hardware(tmp_path / "ours.toml").name == "Our Chip"
    assert read_hardware(str(tmp_path / "ours.toml")).key == "ours"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('vendor = "NVIDIA"', "vendor = 3", "vendor"),
        ("devices_per_node = 8", "devices_per_node = 0", "devices_per_node"),
        ("devices_per_node = 8", "devices_per_node = true", "devices_per_node"),
        ("devices_per_node = 8", "", "devices_per_node"),
        ('"fp8"', '"fp7"', "formats"),
        ("value = 3.35e12", "value = -1", "memory_bandwidth.value"),
        ("value = 3.35e12", "value = nan", "memory_bandwidth.value"),
        ("value = 3.35e12", 'value = "3"', "memory_bandwidth.value"),
        ('value = 3.35e12, unit = "B/s"', 'value = 3.35e12, unit = "GB/s"', "memory_bandwidth.unit"),
        ("value = 3.35e12,", 'value = 3.35e12, basis = "guessed",', "memory_bandwidth.basis"),
        ("value = 3.35e12,", "value = 3.35e12, colour = 1,", "memory_bandwidth.colour"),
        ("[intra_node]", "[intra]", "intra"),
        ("latency = { reason", "delay = { reason", "delay"),
        ("bf16 = {", "bf15 = {", "matmul.bf15"),
        ('name = "NVIDIA', "name = 'NVIDIA", "not TOML"),
    ],
)
def test_a_file_that_breaks_the_form_is_refused_by_name(old: str, new: str, words: str, tmp_path: Path) -> None:
    text = (HARDWARE_ROOT / "h100.toml").read_text()
    assert old in text
    (tmp_path / "x.toml").write_text(text.replace(old, new))
    with pytest.raises(ConfigError, match=words):
        read_hardware(tmp_path / "x.toml")


def test_a_format_without_a_rate_needs_a_reason(tmp_path: Path) -> None:
    lines = (HARDWARE_ROOT / "h100.toml").read_text().splitlines()
    (tmp_path / "x.toml").write_text("\n".join(line for line in lines if not line.startswith("fp8 =")))
    with pytest.raises(ConfigError, match=r"matmul.fp8.*the reason why there is none"):
        read_hardware(tmp_path / "x.toml")


def test_the_table_lists_every_entry() -> None:
    text = hardware_table().render()
    assert all(name in text for name in hardware_names())
