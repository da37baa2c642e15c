"""Hardware by datasheet: one TOML file per device in `data/hardware/`, every figure with its source.

A figure nobody publishes stands in the file with the reason instead of a value, and is None here: nothing is filled in.
Bandwidths of links are those of one device in one direction (vendors mostly print the sum of both); rates of matrix
products are dense. Your own hardware is one more file; its path works wherever a name does.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from workbench.base import BASES, Cell, ConfigError, Quantity, Table, human, read_small_file

__all__ = ["HARDWARE_ROOT", "Hardware", "NodeLink", "hardware_names", "hardware_table", "read_hardware"]

HARDWARE_ROOT = Path(__file__).resolve().parents[2] / "data" / "hardware"
MAX_FILE_BYTES = 1 << 16
MAX_DEVICES_PER_NODE = 1 << 20
# Number formats a device may multiply in, widest first.
FORMATS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "mxfp6", "nvfp4", "mxfp4", "int8", "int4")

_FIGURES = {"memory": "B", "memory_bandwidth": "B/s", "host_memory": "B", "reserved_share": "1"}
_TEXTS = ("name", "vendor", "device_type")
_LINKS = ("intra_node", "inter_node")
_KEYS = {*_TEXTS, *_FIGURES, *_LINKS, "devices_per_node", "formats", "matmul"}


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLink:
    """How one device reaches others. `bandwidth` [B/s] is what it sends in one direction to all of them together; a
    "switch" offers all of it to one peer, in a "mesh" every peer has its own share. `latency` [s] is of one message."""

    bandwidth: Quantity | None
    latency: Quantity | None
    kind: Literal["switch", "mesh"] = "switch"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """One accelerator (or host CPU) as its vendor describes it. `matmul` is dense FLOP/s by number format; `formats`
    are those it multiplies in; `devices_per_node` share `intra_node`; `reserved_share` is the part of the memory that
    runtime and allocator keep, where the file says so; `gaps` says why a figure is None."""

    key: str
    name: str
    vendor: str
    device_type: str
    memory: Quantity
    memory_bandwidth: Quantity | None
    matmul: Mapping[str, Quantity]
    formats: tuple[str, ...]
    devices_per_node: int
    intra_node: NodeLink
    inter_node: NodeLink
    host_memory: Quantity | None
    reserved_share: Quantity | None
    gaps: Mapping[str, str]

    def figures(self) -> dict[str, Quantity]:
        """Every figure that is known, by its place in the file."""
        named: dict[str, Quantity | None] = {
            "memory": self.memory,
            "memory_bandwidth": self.memory_bandwidth,
            **{f"matmul.{name}": rate for name, rate in self.matmul.items()},
            "intra_node.bandwidth": self.intra_node.bandwidth,
            "intra_node.latency": self.intra_node.latency,
            "inter_node.bandwidth": self.inter_node.bandwidth,
            "inter_node.latency": self.inter_node.latency,
            "host_memory": self.host_memory,
            "reserved_share": self.reserved_share,
        }
        return {name: quantity for name, quantity in named.items() if quantity is not None}

    def to_json(self) -> dict[str, object]:
        return {
            "key": self.key,
            "name": self.name,
            "vendor": self.vendor,
            "device_type": self.device_type,
            "formats": list(self.formats),
            "devices_per_node": self.devices_per_node,
            "links": {"intra_node": self.intra_node.kind, "inter_node": self.inter_node.kind},
            "figures": {
                name: {"value": q.value, "unit": q.unit, "basis": q.basis, "source": q.source}
                for name, q in self.figures().items()
            },
            "gaps": dict(self.gaps),
        }

    def tables(self) -> tuple[Table, ...]:
        rows: list[tuple[Cell, ...]] = [
            (name, human(q.value, "" if q.unit == "1" else q.unit).strip(), q.basis, q.source)
            for name, q in self.figures().items()
        ]
        rows += [(name, None, "not published", reason) for name, reason in self.gaps.items()]
        title = f"{self.name} ({self.vendor}), {self.devices_per_node} per node"
        note = f"multiplies in {', '.join(self.formats)}; links: one device, one direction; matrix products: dense"
        return (Table(title=title, columns=("figure", "value", "basis", "source"), rows=tuple(rows), note=note),)

    def render(self) -> str:
        return "\n\n".join(table.render() for table in self.tables())

    def _repr_html_(self) -> str:
        return "".join(table.to_html() for table in self.tables())


def hardware_names(root: Path = HARDWARE_ROOT) -> tuple[str, ...]:
    """Names in the catalogue, sorted."""
    return tuple(sorted(path.stem for path in root.glob("*.toml")))


def read_hardware(name: str | Path, *, root: Path = HARDWARE_ROOT) -> Hardware:
    """Hardware by its name in the catalogue (or a beginning that only one name has), or from a TOML file of your own.

    Raises ConfigError for a name that is not there, or a file that does not follow the form of `data/hardware`.
    """
    text = str(name)
    if isinstance(name, Path) or text.endswith(".toml"):
        return _parse(Path(name))
    known = hardware_names(root)
    wanted = text.casefold()
    matches = [x for x in known if x == wanted] or [x for x in known if wanted and x.startswith(wanted)]
    if len(matches) != 1:
        raise ConfigError(
            f"hardware {text!r} {'may be any of several' if matches else 'is not in the catalogue'}",
            expected=f"one of {', '.join(matches or known)}",
            next_step="Own hardware is one TOML file like those in data/hardware; pass its path",
        )
    return _parse(root / f"{matches[0]}.toml")


def hardware_table(root: Path = HARDWARE_ROOT) -> Table:
    """The catalogue on one page; sources are in each entry."""
    rows = []
    for name in hardware_names(root):
        x = read_hardware(name, root=root)
        rates = [f"{fmt} {human(rate.value, 'FLOP/s')}" for fmt, rate in x.matmul.items() if fmt in ("bf16", "fp8")]
        inner, outer = x.intra_node.bandwidth, x.inter_node.bandwidth
        rows.append((x.key, x.name, *map(_text, (x.memory, x.memory_bandwidth, inner, outer)), ", ".join(rates)))
    columns = ("key", "name", "memory", "memory rate", "within node", "between nodes", "dense rate")
    return Table(columns=columns, rows=tuple(rows), note="links: one device, one direction")


def _text(quantity: Quantity | None) -> str | None:
    return None if quantity is None else human(quantity.value, quantity.unit)


def _parse(path: Path) -> Hardware:
    content = read_small_file(path, max_bytes=MAX_FILE_BYTES)
    try:
        record = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"not TOML: {error}", where=path) from None
    reader = _Reader(path)
    reader.only_keys(record, _KEYS, "")
    texts = {key: reader.text(record, key) for key in _TEXTS}
    figures = {key: reader.figure(record.get(key), key, unit) for key, unit in _FIGURES.items()}
    memory = figures["memory"]
    if memory is None:
        raise reader.error("memory", "missing", "bytes: nothing can be planned without")
    share = figures["reserved_share"]
    if share is not None and not 0 <= share.value < 1:
        raise reader.error("reserved_share", share.value, "a share from 0 up to 1")
    formats = record.get("formats")
    if not isinstance(formats, list) or not formats or not all(x in FORMATS for x in formats):
        raise reader.error("formats", formats, f"names out of {', '.join(FORMATS)}")
    count = record.get("devices_per_node")
    if type(count) is not int or not 1 <= count <= MAX_DEVICES_PER_NODE:
        raise reader.error("devices_per_node", count, f"a number from 1 to {MAX_DEVICES_PER_NODE}")
    matmul = reader.matmul(record.get("matmul"), formats)
    return Hardware(
        key=path.stem,
        name=texts["name"],
        vendor=texts["vendor"],
        device_type=texts["device_type"],
        memory=memory,
        memory_bandwidth=figures["memory_bandwidth"],
        matmul=matmul,
        formats=tuple(formats),
        devices_per_node=count,
        intra_node=reader.link(record.get("intra_node"), "intra_node"),
        inter_node=reader.link(record.get("inter_node"), "inter_node"),
        host_memory=figures["host_memory"],
        reserved_share=share,
        gaps=reader.gaps,
    )


class _Reader:
    """Fields of one file, each refused by name; reasons for absent figures are collected in `gaps`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.gaps: dict[str, str] = {}

    def error(self, key: str, found: object, expected: str) -> ConfigError:
        return ConfigError(f"{key} is not as expected", where=self.path, found=repr(found)[:200], expected=expected)

    def only_keys(self, record: Mapping[str, Any], keys: set[str], place: str) -> None:
        unknown = sorted(set(record) - keys)
        if unknown:
            raise self.error(f"key {place}{unknown[0]}", "an unknown key", f"one of {', '.join(sorted(keys))}")

    def text(self, record: Mapping[str, Any], key: str) -> str:
        value = record.get(key)
        if not isinstance(value, str) or not value.strip():
            raise self.error(key, value, "a text")
        return value

    def figure(self, value: object, key: str, unit: str) -> Quantity | None:
        """{value, unit, source, basis?} or {reason}; absent altogether only where nothing depends on it."""
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, value, f"a table with value, unit {unit!r} and source, or with a reason")
        if "reason" in value:
            self.only_keys(value, {"reason"}, f"{key}.")
            self.gaps[key] = self.text(value, "reason")
            return None
        self.only_keys(value, {"value", "unit", "source", "basis"}, f"{key}.")
        number, basis = value.get("value"), value.get("basis", "datasheet")
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number) or number <= 0:
            raise self.error(f"{key}.value", number, "a number above 0")
        if value.get("unit") != unit:
            raise self.error(f"{key}.unit", value.get("unit"), repr(unit))
        if basis not in BASES:
            raise self.error(f"{key}.basis", basis, f"one of {', '.join(BASES)}")
        return Quantity(float(number), unit, basis, self.text(value, "source"))

    def matmul(self, value: object, formats: list[str]) -> dict[str, Quantity]:
        if not isinstance(value, dict):
            raise self.error("matmul", value, "a table of rates by number format")
        self.only_keys(value, set(FORMATS), "matmul.")
        rates = {name: self.figure(value[name], f"matmul.{name}", "FLOP/s") for name in FORMATS if name in value}
        unsaid = [name for name in formats if name not in value]
        if unsaid:
            raise self.error(f"matmul.{unsaid[0]}", "missing", "a rate, or the reason why there is none")
        return {name: rate for name, rate in rates.items() if rate is not None}

    def link(self, value: object, key: str) -> NodeLink:
        if not isinstance(value, dict):
            raise self.error(key, value, "a table with bandwidth and latency")
        self.only_keys(value, {"bandwidth", "latency", "kind"}, f"{key}.")
        kind = value.get("kind", "switch")
        if kind not in ("switch", "mesh"):
            raise self.error(f"{key}.kind", kind, "switch or mesh")
        for part in ("bandwidth", "latency"):
            if part not in value:
                raise self.error(f"{key}.{part}", "missing", "a figure, or the reason why there is none")
        return NodeLink(
            bandwidth=self.figure(value["bandwidth"], f"{key}.bandwidth", "B/s"),
            latency=self.figure(value["latency"], f"{key}.latency", "s"),
            kind=kind,
        )
