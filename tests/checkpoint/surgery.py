"""Taking a checkpoint apart, putting it together again with one fault in it, and asking the audit about it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workbench.checkpoint import AuditReport, Finding, FindingKind, audit

PREFIX = "language_model.model.layers."
EXPERT = f"{PREFIX}1.block_sparse_moe.experts."
INDEX = "model.safetensors.index.json"
Stored = tuple[str, list[int], bytes]  # dtype, shape, data


def read_raw(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header fields and data bytes of a shard."""
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def write_raw(path: Path, header: object, data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def load(path: Path) -> dict[str, Stored]:
    header, data = read_raw(path)
    header.pop("__metadata__", None)
    return {name: (e["dtype"], e["shape"], data[slice(*e["data_offsets"])]) for name, e in header.items()}


def save(path: Path, tensors: dict[str, Stored]) -> None:
    header, offset = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    write_raw(path, header, b"".join(data for _, _, data in tensors.values()))


def edit(path: Path, change: Callable[[dict[str, Stored]], object]) -> None:
    """Change the tensors of one shard; its header is made anew."""
    tensors = load(path)
    change(tensors)
    save(path, tensors)


def edit_index(root: Path, change: Callable[[dict[str, str]], object]) -> None:
    record = json.loads((root / INDEX).read_text())
    change(record["weight_map"])
    (root / INDEX).write_text(json.dumps(record))


def edit_config(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    record = json.loads((root / "config.json").read_text())
    change(record)
    (root / "config.json").write_text(json.dumps(record))


def holder(root: Path, name: str) -> Path:
    """The shard that holds a tensor, by the index."""
    return root / json.loads((root / INDEX).read_text())["weight_map"][name]


def shards(root: Path) -> list[Path]:
    return sorted(root.glob("*.safetensors"))


def only(report: AuditReport, kind: FindingKind) -> Finding:
    """The single finding of a kind; fails where there is none or another."""
    (finding,) = report.of_kind(kind)
    return finding


def error_kinds(root: Path) -> set[str]:
    return {finding.kind for finding in audit(root).errors}
