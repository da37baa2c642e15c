"""The index of a sharded checkpoint: which file holds which tensor. Plain or gzipped; untrusted either way."""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from workbench.base import CheckpointError, short_repr
from workbench.checkpoint.header import MAX_NAME_LENGTH, open_regular
from workbench.checkpoint.strict_json import parse_json

__all__ = ["INDEX_NAME", "ShardIndex", "find_index", "is_shard_name", "parse_index", "read_index", "shard_numbering"]

INDEX_NAME = "model.safetensors.index.json"
MAX_INDEX_BYTES = 1 << 29  # K3's index is 60 MB for half a million names; a gzip bomb must end here
READ_BYTES = 1 << 20
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{1,9})-of-(?P<total>\d{1,9})\.safetensors")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardIndex:
    """`files` maps every tensor name to a file name inside the folder; `total_size` is its own claim, in bytes."""

    path: Path
    files: Mapping[str, str]
    total_size: int | None


def find_index(root: Path) -> Path | None:
    """The index in a folder, None where there is none. Raises CheckpointError where several could be meant."""
    for name in (INDEX_NAME, INDEX_NAME + ".gz"):
        if os.path.lexists(root / name):  # a link into nothing, as a half-filled cache holds, is broken and not absent
            return root / name
    others = sorted(p for pattern in ("*.index.json", "*.index.json.gz") for p in root.glob(pattern))
    if len(others) > 1:
        names = [path.name for path in others]
        raise CheckpointError("several index files, none with the usual name", where=root, found=short_repr(names))
    return others[0] if others else None


def read_index(path: Path) -> ShardIndex:
    """Index at `path`. Raises CheckpointError for an unreadable file or anything `parse_index` refuses."""
    fd = open_regular(path)
    try:
        with os.fdopen(fd, "rb") as file, gzip.open(file) if path.suffix == ".gz" else file as stream:
            raw = _read_at_most(stream, MAX_INDEX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise CheckpointError(f"index cannot be read: {short_repr(str(error))}", where=path) from None
    if len(raw) > MAX_INDEX_BYTES:
        raise CheckpointError("index is over the size limit", where=path, expected=f"up to {MAX_INDEX_BYTES} bytes")
    return parse_index(raw, path=path)


def _read_at_most(stream: gzip.GzipFile | BufferedReader, limit: int) -> bytes:
    """Bit by bit: asked for all at once, a buffered file takes memory for the limit and not for what is there."""
    content = bytearray()
    while len(content) < limit and (piece := stream.read(min(READ_BYTES, limit - len(content)))):
        content += piece
    return bytes(content)


def parse_index(raw: bytes, *, path: Path) -> ShardIndex:
    """ShardIndex from JSON bytes. Raises CheckpointError where it is malformed, names a tensor twice, or names a file
    that is not a plain `*.safetensors` name: "../x", "/x" and the like must never reach an open()."""
    try:
        fields = parse_json(raw)
    except ValueError as error:
        raise CheckpointError(f"index is not valid JSON: {short_repr(str(error))}", where=path) from None
    if not isinstance(fields, dict) or not isinstance(files := fields.get("weight_map"), dict):
        raise CheckpointError("index has no weight_map", where=path)
    for name in files:
        if not name or len(name) > MAX_NAME_LENGTH or not name.isprintable():
            raise CheckpointError("index has an unusable tensor name", where=path, found=ascii(name[:60]))
    # A hundred file names stand behind half a million tensors: judge each once.
    is_sound: dict[object, bool] = {}
    for name, file in files.items():
        if isinstance(file, str) and file not in is_sound:
            is_sound[file] = is_shard_name(file)
        if not isinstance(file, str) or not is_sound[file]:
            raise CheckpointError(
                f"index sends {name} to something that is no plain file name",
                where=path,
                found=short_repr(file),
                expected="a *.safetensors name inside the folder",
            )
    metadata = fields.get("metadata")
    total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    is_size = isinstance(total_size, int) and not isinstance(total_size, bool)
    return ShardIndex(path=path, files=files, total_size=total_size if is_size else None)


def is_shard_name(file: str) -> bool:
    """Whether `file` is a plain safetensors file name: no folder, no drive, nothing invisible."""
    is_plain = file.isprintable() and len(file) <= 255 and not set(file) & set("/\\:") and not file.startswith(".")
    return is_plain and file.endswith(".safetensors")


def shard_numbering(file: str) -> tuple[str, int, int] | None:
    """("model", 2, 96) of "model-00002-of-000096.safetensors", None for a name of another form."""
    match = _NUMBERED.fullmatch(file)
    return (match["stem"], int(match["number"]), int(match["total"])) if match else None
