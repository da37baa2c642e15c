"""One safetensors header, read from a file that nobody vouches for, without touching its data.

    0       8        8 + n                                  file size
    ├ n ────┼ JSON ──┼ data: begin ≥ 8 + n ............ end ┤

Two kinds of trouble. Where the header itself makes no sense (length, JSON, types, shape × dtype ≠ bytes) there is
nothing to go on and `read_header` raises. Where it makes sense but does not fit the file or itself (torn, over-long,
overlapping or missing ranges) the header is returned with its `problems`, so that an audit can name every tensor hit.
Source: the format description of safetensors, which asks for exactly these properties.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from workbench.base import DTYPE_BITS, CheckpointError, num_bytes, short_repr
from workbench.checkpoint.strict_json import parse_json

__all__ = ["HeaderProblem", "ShardHeader", "TensorEntry", "open_regular", "parse_header", "read_header"]

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library; the largest K3 header is 0.9 MB
MAX_DIMS, MAX_NAME_LENGTH = 32, 1024

ProblemKind = Literal["torn", "overlong", "overlap", "gap"]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: `begin` and `end` are absolute byte offsets in `file`, a name inside the folder."""

    name: str
    file: str
    dtype: str  # safetensors name
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, kw_only=True, slots=True)
class HeaderProblem:
    """A header that does not fit its file or itself: what, which tensors, and the numbers in words."""

    kind: ProblemKind
    tensors: tuple[str, ...]
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardHeader:
    """Header of one file; `entries` in order of their offsets."""

    file: str
    file_bytes: int
    data_begin: int
    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    problems: tuple[HeaderProblem, ...] = ()

    @property
    def tensor_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries.values())


def open_regular(path: Path) -> int:
    """File descriptor of a regular file, for `os.pread`; pipes and devices, which could block for ever, are refused.

    Links are followed: a download cache keeps its files behind them. Raises CheckpointError.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CheckpointError(f"cannot be opened: {reason}", where=path) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CheckpointError("not a regular file", where=path)
    return fd


def read_header(path: Path) -> ShardHeader:
    """Header of the shard at `path`. Reads 8 + n bytes. Raises CheckpointError for a header that makes no sense."""
    fd = open_regular(path)
    try:
        file_bytes = os.fstat(fd).st_size
        if file_bytes < 8:
            raise CheckpointError("file is too short for a safetensors header", where=path, found=f"{file_bytes} bytes")
        (header_bytes,) = struct.unpack("<Q", os.pread(fd, 8, 0))
        # Before the bytes are read: a length of 2**63 must not become an allocation.
        if header_bytes > MAX_HEADER_BYTES:
            raise CheckpointError(
                "header length is over the limit; is this a safetensors file?",
                where=path,
                found=f"{header_bytes} bytes",
                expected=f"up to {MAX_HEADER_BYTES}",
            )
        if 8 + header_bytes > file_bytes:
            raise CheckpointError(
                "file ends inside its own header",
                where=path,
                found=f"{file_bytes} bytes",
                expected=f"at least {8 + header_bytes}",
                next_step="Download this file again",
            )
        raw = os.pread(fd, header_bytes, 8)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", where=path) from None
    finally:
        os.close(fd)
    return parse_header(raw, file=path.name, file_bytes=file_bytes)


def parse_header(raw: bytes, *, file: str, file_bytes: int) -> ShardHeader:
    """ShardHeader from the JSON bytes of a header. Raises CheckpointError naming the file and, if known, the tensor."""
    try:
        fields = parse_json(raw)
    except ValueError as error:
        raise CheckpointError(f"header is not valid JSON: {short_repr(str(error))}", where=file) from None
    if not isinstance(fields, dict):
        raise CheckpointError("header is not a JSON object", where=file, found=type(fields).__name__)
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError("__metadata__ is not a table of texts", where=file, found=short_repr(metadata))

    data_begin = 8 + len(raw)
    entries = [_parse_entry(name, field, file, data_begin) for name, field in fields.items()]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    return ShardHeader(
        file=file,
        file_bytes=file_bytes,
        data_begin=data_begin,
        entries={entry.name: entry for entry in entries},
        metadata=metadata,
        problems=tuple(_find_problems(entries, data_begin, file_bytes)),
    )


def _parse_entry(name: str, field: object, file: str, data_begin: int) -> TensorEntry:
    # A name is printed, logged and compared: control characters and lone surrogates have no place in it.
    if not name or len(name) > MAX_NAME_LENGTH or not name.isprintable():
        raise CheckpointError("a tensor has an unusable name", where=file, found=ascii(name[:60]))

    def refuse(message: str, found: object, expected: object = None) -> NoReturn:
        raise CheckpointError(f"{name}: {message}", where=file, found=short_repr(found), expected=expected)

    if not isinstance(field, dict) or field.keys() != {"dtype", "shape", "data_offsets"}:
        refuse("entry is not an object of dtype, shape and data_offsets", field)
    dtype, shape, offsets = field["dtype"], field["shape"], field["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        refuse("unknown dtype", dtype, ", ".join(DTYPE_BITS))
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(map(_is_size, shape)):
        refuse("shape is not a list of sizes", shape)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        refuse("data_offsets is not a pair of offsets", offsets)
    begin, end = offsets
    try:
        size = num_bytes(dtype, shape)
    except ValueError as error:
        refuse(str(error), shape)
    if end - begin != size:
        refuse(f"{dtype} {shape} needs {size} bytes", f"data_offsets {offsets}, {end - begin} bytes")
    return TensorEntry(name, file, dtype, tuple(shape), data_begin + begin, data_begin + end)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _find_problems(entries: list[TensorEntry], data_begin: int, file_bytes: int) -> list[HeaderProblem]:
    """Walk the entries in file order: each must begin where those before it end, and the last end with the file."""
    problems = []
    end, holder = data_begin, ""
    for entry in entries:
        if entry.begin < end and entry.num_bytes:
            names = (holder, entry.name)
            text = f"bytes {entry.begin}..{min(end, entry.end)} belong to {holder} and to {entry.name}"
            problems.append(HeaderProblem(kind="overlap", tensors=names, message=text))
        elif entry.begin > end:
            text = f"bytes {end}..{entry.begin}, before {entry.name}, belong to no tensor"
            problems.append(HeaderProblem(kind="gap", tensors=(entry.name,), message=text))
        if entry.end > end:
            end, holder = entry.end, entry.name
    if file_bytes < end:
        lost = tuple(entry.name for entry in entries if entry.end > file_bytes)
        text = f"file has {file_bytes} bytes, its header describes {end}: {end - file_bytes} are missing"
        problems.append(HeaderProblem(kind="torn", tensors=lost, message=text))
    elif file_bytes > end:
        text = f"file has {file_bytes} bytes, its header describes {end}: {file_bytes - end} too many"
        problems.append(HeaderProblem(kind="overlong", tensors=(), message=text))
    return problems
