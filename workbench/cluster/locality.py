"""What lies near what, as the system tells it: NUMA nodes, accelerators on PCIe, network ports, vendors' link tables.

Everything here is read, never measured, and every part is optional: a system that does not offer it leaves it empty.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.base import Cell, Quantity, Table, human
from workbench.cluster.strict import quantity_to_json

__all__ = ["LinkFact", "Locality", "NetworkPort", "NumaNode", "PciDevice", "parse_link_table", "read_locality"]

TOOL_SECONDS = 20.0
MAX_TOOL_CHARS = 1 << 20
# Commands that print which kind of link joins two devices. A tool that is not installed is not missed.
LINK_TOOLS: Mapping[str, Sequence[str]] = {
    "nvidia-smi": ("topo", "-m"),
    "rocm-smi": ("--showtopotype",),
    "mthreads-gmi": ("topo", "-m"),
    "npu-smi": ("info", "-t", "topo"),
    "mx-smi": ("topo", "-m"),
}
# PCI base classes of what computes: display controllers and processing accelerators.
ACCELERATOR_CLASSES = {0x03: "display", 0x12: "processing accelerator"}
_NAME = re.compile(r"[A-Za-z]+\d+")
_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass(frozen=True, kw_only=True, slots=True)
class NumaNode:
    """`distances` are the firmware's, to each node in order of their numbers (10 is itself)."""

    index: int
    cpus: str
    memory: Quantity | None
    distances: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PciDevice:
    """An accelerator on the bus. `link` is what its slot offers in one direction, as negotiated; node -1: none told."""

    address: str
    vendor: str
    device: str
    kind: str
    numa_node: int
    link: Quantity | None


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkPort:
    name: str
    rate: Quantity | None
    numa_node: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkFact:
    """What a vendor's tool says joins two devices, in its own words ("NV18", "XGMI", "HCCS", "SYS")."""

    a: str
    b: str
    words: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Locality:
    numa: tuple[NumaNode, ...] = ()
    pci: tuple[PciDevice, ...] = ()
    network: tuple[NetworkPort, ...] = ()
    links: tuple[LinkFact, ...] = ()
    tool: str = ""  # that told the links
    notes: tuple[str, ...] = ()

    def link_words(self, a: int, b: int) -> str | None:
        """What the tool says of accelerators number `a` and `b`, in the tool's own numbering; None where nothing."""
        low, high = min(a, b), max(a, b)
        for fact in self.links:
            ends = [re.sub(r"\D", "", name) for name in (fact.a, fact.b)]
            if ends == [str(low), str(high)] and not fact.a.upper().startswith("NIC"):
                return f"{self.tool} says {fact.words}"
        return None

    def to_json(self) -> dict[str, object]:
        return {
            "numa": [
                {
                    "index": x.index,
                    "cpus": x.cpus,
                    "memory": quantity_to_json(x.memory),
                    "distances": list(x.distances),
                }
                for x in self.numa
            ],
            "pci": [
                {
                    "address": x.address,
                    "vendor": x.vendor,
                    "device": x.device,
                    "kind": x.kind,
                    "numa_node": x.numa_node,
                    "link": quantity_to_json(x.link),
                }
                for x in self.pci
            ],
            "network": [
                {"name": x.name, "rate": quantity_to_json(x.rate), "numa_node": x.numa_node} for x in self.network
            ],
            "links": [{"a": x.a, "b": x.b, "words": x.words} for x in self.links],
            "tool": self.tool,
            "notes": list(self.notes),
        }

    def tables(self) -> tuple[Table, ...]:
        """What the system offers; nothing where it offers nothing."""
        rows: list[tuple[Cell, ...]] = []
        for node in self.numa:
            memory = "" if node.memory is None else f", {human(node.memory.value, 'B')}"
            rows.append((f"NUMA node {node.index}", f"cpus {node.cpus}{memory}, distances {list(node.distances)}"))
        for device in self.pci:
            link = "link not told" if device.link is None else f"{human(device.link.value, 'B/s')} one way"
            near = "no NUMA node told" if device.numa_node < 0 else f"NUMA node {device.numa_node}"
            rows.append((f"PCI {device.address}", f"{device.kind} {device.vendor}:{device.device}, {link}, {near}"))
        for port in self.network:
            rate = "rate not told" if port.rate is None else human(port.rate.value, "B/s")
            near = "" if port.numa_node < 0 else f", NUMA node {port.numa_node}"
            rows.append((f"network {port.name}", f"{rate}{near}"))
        tables = [Table(columns=("where things lie", "told by the system"), rows=tuple(rows))] if rows else []
        if self.links:
            linked = tuple((fact.a, fact.b, fact.words) for fact in self.links)
            tables.append(Table(columns=("device", "device", f"link, as {self.tool} says"), rows=linked))
        return tuple(tables)

    def render(self) -> str:
        return "\n\n".join(table.render() for table in self.tables())

    def _repr_html_(self) -> str:
        return "".join(table.to_html() for table in self.tables())


def read_locality(*, root: Path = Path("/sys"), tools: Mapping[str, Sequence[str]] = LINK_TOOLS) -> Locality:
    """Whatever this system tells. Never fails: a tool that breaks or takes too long becomes a note."""
    links: tuple[LinkFact, ...] = ()
    told, notes = "", []
    for tool, arguments in tools.items():
        path = shutil.which(tool)
        if path is None:
            continue
        text, problem = _run([path, *arguments])
        if problem:
            notes.append(f"{tool}: {problem}")
            continue
        links = parse_link_table(text)
        if links:
            told = tool
            break
        notes.append(f"{tool}: no link table in its answer")
    return Locality(
        numa=tuple(_numa_nodes(root / "devices/system/node")),
        pci=tuple(_pci_devices(root / "bus/pci/devices")),
        network=tuple(_network_ports(root)),
        links=links,
        tool=told,
        notes=tuple(notes),
    )


def parse_link_table(text: str) -> tuple[LinkFact, ...]:
    """Pairs of a table whose header names devices ("GPU0 GPU1 NIC0 ...") and whose rows begin with one of them.

    Vendors print the same form with other names; columns after the devices (affinities) are left aside.
    """
    columns: list[str] = []
    facts: dict[tuple[str, str], str] = {}
    for line in _ESCAPE.sub("", text[:MAX_TOOL_CHARS]).splitlines():
        words = line.split()
        names = list(itertools.takewhile(_NAME.fullmatch, words))
        if not columns:
            if len(names) >= 2 and len(set(names)) == len(names):
                columns = names
        elif words and words[0] in columns and len(words) > len(columns) and words[1] not in columns:
            for name, value in zip(columns, words[1:], strict=False):
                if columns.index(words[0]) < columns.index(name):
                    facts[words[0], name] = value[:40]
    return tuple(LinkFact(a=a, b=b, words=value) for (a, b), value in facts.items())


def _run(command: list[str]) -> tuple[str, str]:
    """(output, what went wrong)."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TOOL_SECONDS, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer within {TOOL_SECONDS:g} s"
    except OSError as error:
        return "", f"did not start: {error}"
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        return "", f"exit code {done.returncode}" + (f": {lines[-1][:200]}" if lines else "")
    return done.stdout, ""


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path, default: int) -> int:
    with contextlib.suppress(ValueError):
        return int(_text(path), 0)
    return default


def _numbered(folder: Path, prefix: str) -> list[tuple[int, Path]]:
    found = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            number = path.name.removeprefix(prefix)
            if path.name.startswith(prefix) and number.isdecimal():
                found.append((int(number), path))
    return sorted(found)


def _numa_nodes(folder: Path) -> list[NumaNode]:
    nodes = []
    for index, path in _numbered(folder, "node"):
        found = re.search(r"MemTotal:\s+(\d+) kB", _text(path / "meminfo"))
        memory = Quantity(int(found[1]) * 1024, "B", "measured", "sysfs") if found else None
        distances = tuple(int(word) for word in _text(path / "distance").split() if word.isdecimal())
        nodes.append(NumaNode(index=index, cpus=_text(path / "cpulist"), memory=memory, distances=distances))
    return nodes


def _pci_devices(folder: Path) -> list[PciDevice]:
    found = []
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()):
            kind = ACCELERATOR_CLASSES.get(_number(path / "class", 0) >> 16)
            if kind is not None:
                found.append(
                    PciDevice(
                        address=path.name,
                        vendor=_text(path / "vendor"),
                        device=_text(path / "device"),
                        kind=kind,
                        numa_node=_number(path / "numa_node", -1),
                        link=_pci_link(_text(path / "current_link_speed"), _number(path / "current_link_width", 0)),
                    )
                )
    return found


def _pci_link(speed: str, width: int) -> Quantity | None:
    """One direction of a PCIe link: transfers per second and lane, less the line code."""
    rate = re.match(r"(\d+(?:\.\d+)?) GT/s", speed)
    if rate is None or width < 1:
        return None
    per_lane = float(rate[1]) * 1e9
    code = 0.8 if per_lane <= 5e9 else 128 / 130
    return Quantity(per_lane * code * width / 8, "B/s", "modelled", f"{speed} x {width} as negotiated, line code off")


def _network_ports(root: Path) -> list[NetworkPort]:
    """Ports with a device behind them: Ethernet with its megabits, InfiniBand with its gigabits per second."""
    ports = []
    with contextlib.suppress(OSError):
        for path in sorted((root / "class/net").iterdir()):
            if (path / "device").exists():
                megabits = _number(path / "speed", -1)
                rate = Quantity(megabits * 125_000, "B/s", "datasheet", "link speed, sysfs") if megabits > 0 else None
                ports.append(NetworkPort(name=path.name, rate=rate, numa_node=_number(path / "device/numa_node", -1)))
    with contextlib.suppress(OSError):
        for path in sorted((root / "class/infiniband").iterdir()):
            for number, port in _numbered(path / "ports", ""):
                found = re.match(r"(\d+(?:\.\d+)?) Gb/sec", _text(port / "rate"))
                rate = Quantity(float(found[1]) * 125e6, "B/s", "datasheet", "link rate, sysfs") if found else None
                node = _number(path / "device/numa_node", -1)
                ports.append(NetworkPort(name=f"{path.name}:{number}", rate=rate, numa_node=node))
    return ports
