"""What the system tells of places and links: read where it is offered, never invented, never failing."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from workbench.cluster.locality import Locality, parse_link_table, read_locality

NVIDIA = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-55\t0\t\tN/A
GPU1\tNV18\t X \tSYS\tSYS\t0-55\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tNODE\t56-111\t1\t\tN/A
NIC0\tPIX\tSYS\tNODE\t X \t\t\t\t

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""
HUAWEI = """\
           NPU0       NPU1       NPU2       CPU Affinity
NPU0       X          HCCS       HCCS_SW    144-167
NPU1       HCCS       X          HCCS       144-167
NPU2       HCCS_SW    HCCS       X          96-119
"""
AMD = """\
============================ ROCm System Management Interface ============================
================================= Link Type between two GPUs =================================
       GPU0         GPU1
GPU0   0            XGMI
GPU1   XGMI         0
================================== End of ROCm SMI Log ===================================
"""


def test_link_tables_of_several_vendors_are_read_alike() -> None:
    nvidia = {(x.a, x.b): x.words for x in parse_link_table(NVIDIA)}
    assert nvidia == {
        ("GPU0", "GPU1"): "NV18",
        ("GPU0", "GPU2"): "SYS",
        ("GPU0", "NIC0"): "PIX",
        ("GPU1", "GPU2"): "SYS",
        ("GPU1", "NIC0"): "SYS",
        ("GPU2", "NIC0"): "NODE",
    }
    assert [(x.a, x.b, x.words) for x in parse_link_table(HUAWEI)] == [
        ("NPU0", "NPU1", "HCCS"),
        ("NPU0", "NPU2", "HCCS_SW"),
        ("NPU1", "NPU2", "HCCS"),
    ]
    assert [(x.a, x.b, x.words) for x in parse_link_table(AMD)] == [("GPU0", "GPU1", "XGMI")]


@pytest.mark.parametrize("text", ["", "no devices were found", "GPU0", "GPU0 GPU1", "\x00\xff" * 50, "A1 " * 5000])
def test_text_without_a_table_holds_no_links(text: str) -> None:
    assert parse_link_table(text) == ()


def test_words_for_a_pair_are_found_in_either_order_and_not_among_network_cards() -> None:
    locality = Locality(links=parse_link_table(NVIDIA), tool="nvidia-smi")
    assert locality.link_words(1, 0) == "nvidia-smi says NV18"
    assert locality.link_words(0, 2) == "nvidia-smi says SYS"
    assert locality.link_words(0, 7) is None


def fake_system(root: Path) -> Path:
    def write(path: str, text: str) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n")

    for node, (cpus, kilobytes, distances) in enumerate((("0-3", 1000, "10 21"), ("4-7", 2000, "21 10"))):
        write(f"devices/system/node/node{node}/cpulist", cpus)
        write(f"devices/system/node/node{node}/meminfo", f"Node {node} MemTotal:       {kilobytes} kB")
        write(f"devices/system/node/node{node}/distance", distances)
    for address, kind, speed in (
        ("0000:1a:00.0", "0x030200", "32.0 GT/s PCIe"),
        ("0000:1b:00.0", "0x120000", "Unknown"),
    ):
        write(f"bus/pci/devices/{address}/class", kind)
        write(f"bus/pci/devices/{address}/vendor", "0x10de")
        write(f"bus/pci/devices/{address}/device", "0x2335")
        write(f"bus/pci/devices/{address}/numa_node", "1")
        write(f"bus/pci/devices/{address}/current_link_speed", speed)
        write(f"bus/pci/devices/{address}/current_link_width", "16")
    write("bus/pci/devices/0000:00:00.0/class", "0x060000")
    write("class/net/eth0/speed", "100000")
    write("class/net/eth0/device/numa_node", "1")
    write("class/net/eth1/speed", "-1")
    write("class/net/eth1/device/numa_node", "0")
    write("class/net/lo/speed", "1")
    write("class/infiniband/mlx5_0/ports/1/rate", "400 Gb/sec (4X NDR)")
    return root


def test_sysfs_gives_nodes_accelerators_and_ports(tmp_path: Path) -> None:
    found = read_locality(root=fake_system(tmp_path), tools={})
    assert [(x.index, x.cpus, x.distances) for x in found.numa] == [(0, "0-3", (10, 21)), (1, "4-7", (21, 10))]
    assert found.numa[1].memory is not None
    assert found.numa[1].memory.value == 2000 * 1024
    fast, unknown = found.pci
    assert (fast.address, fast.kind, fast.numa_node) == ("0000:1a:00.0", "display", 1)
    assert fast.link is not None
    assert fast.link.value == pytest.approx(63e9, rel=0.01)
    assert unknown.kind == "processing accelerator"
    assert unknown.link is None
    assert {x.name: None if x.rate is None else x.rate.value for x in found.network} == {
        "eth0": 12.5e9,
        "eth1": None,
        "mlx5_0:1": 50e9,
    }
    json.dumps(found.to_json(), allow_nan=False)
    text = found.render()
    assert "63 GB/s one way, NUMA node 1" in text
    assert "rate not told" in text


def test_a_system_that_offers_nothing_is_an_empty_record(tmp_path: Path) -> None:
    found = read_locality(root=tmp_path / "none", tools={"no-such-tool-here": ()})
    assert found == Locality()
    assert found.tables() == ()


def tool(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_a_tool_that_fails_or_hangs_is_a_note_and_the_next_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "table").write_text(HUAWEI)
    tool(tmp_path, "a-smi", "echo driver not loaded >&2; exit 9")
    tool(tmp_path, "b-smi", "sleep 60")
    tool(tmp_path, "c-smi", "echo nothing")
    tool(tmp_path, "d-smi", f'[ "$1" = topo ] && cat {tmp_path / "table"}')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("workbench.cluster.locality.TOOL_SECONDS", 3.0)
    found = read_locality(root=tmp_path, tools={f"{x}-smi": ("topo",) for x in "abcd"})
    assert found.tool == "d-smi"
    assert len(found.links) == 3
    assert found.notes == (
        "a-smi: exit code 9: driver not loaded",
        "b-smi: no answer within 3 s",
        "c-smi: no link table in its answer",
    )
    assert "link, as d-smi says" in found.render()


def test_this_machine_answers() -> None:
    json.dumps(read_locality().to_json(), allow_nan=False)
