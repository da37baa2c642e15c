"""A look at the data itself: what no header can tell.

A download that reserved its space and never filled it has the right length and reads as zeros; a scale tensor of
zeros silences its expert; a scale byte 255 is NaN. Finding them costs reading, so there are three depths:

    full      every byte, once, in order: as long as the disk needs (1.56 TB at 2 GB/s is 13 minutes)
    sampled   the file system's own map of holes, evenly spaced windows, the head of some scale tensors
    none      nothing

Files are read with `pread`, never mapped: a mapped file that shrinks kills the process with SIGBUS.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from workbench.base import CheckpointError
from workbench.checkpoint.findings import Finding
from workbench.checkpoint.header import ShardHeader, TensorEntry, open_regular
from workbench.checkpoint.names import fits
from workbench.spec import TensorSpec

__all__ = ["WINDOWS_PER_FILE", "ContentScan", "odd_zeros", "padding_findings", "sample_file", "scan_file"]

PAGE = 4096  # a run of zeros shorter than a page is not reported: weights hold zeros
CHUNK = 16 << 20
WINDOW, WINDOWS_PER_FILE, SCALES_PER_FILE = 64 << 10, 64, 64
# Exponent bytes of trained weights lie near 115 (K3: 2**-12); far outside, the bytes are something else than E8M0.
SCALE_BYTES = range(127 - 40, 127 + 9)
# In front of the first sublayer there is one sum and nothing to mix it with: training leaves these scores as they were.
NEVER_READ = ("layers.0.mixer_res.proj.weight",)


@dataclass(slots=True)
class ContentScan:
    """Findings of one file and the number of bytes that were read to make them."""

    findings: list[Finding] = field(default_factory=list)
    bytes_read: int = 0


def scan_file(path: Path, header: ShardHeader, expected: Mapping[str, TensorSpec]) -> ContentScan:
    """Read all data of one file once: zero-filled extents, zero tensors, scale bytes. Memory: one chunk.

    Raises CheckpointError on a read error and where the file has become shorter than its header was read with.
    """
    scan = ContentScan()
    entries = [entry for entry in header.entries.values() if entry.num_bytes]
    begins = [entry.begin for entry in entries]
    is_zero = np.ones(len(entries), bool)
    seen: dict[int, tuple[int, int]] = {}  # index of a scale tensor -> smallest and largest byte
    runs: list[tuple[int, int]] = []
    fd = open_regular(path)
    try:
        for offset in range(0, header.file_bytes, CHUNK):  # from 0, so that pages are pages of the file
            data = np.frombuffer(_pread(fd, min(CHUNK, header.file_bytes - offset), offset, path), np.uint8)
            scan.bytes_read += len(data)
            _extend(runs, _zero_pages(data, offset))
            first = max(0, bisect_right(begins, offset) - 1)
            for idx in range(first, bisect_left(begins, offset + len(data))):
                entry = entries[idx]
                piece = data[max(0, entry.begin - offset) : max(0, entry.end - offset)]
                if not len(piece):
                    continue
                if is_zero[idx] and (piece[:PAGE].any() or piece.any()):
                    is_zero[idx] = False
                if _is_scale(expected.get(entry.name)):
                    low, high = seen.get(idx, (255, 0))
                    seen[idx] = (min(low, int(piece.min())), max(high, int(piece.max())))
    finally:
        os.close(fd)
    zero_names = {entries[idx].name for idx in np.flatnonzero(is_zero)}
    scan.findings += (_zero_tensor(entries[idx], expected) for idx in np.flatnonzero(is_zero))
    scan.findings += (
        finding
        for begin, end in runs
        if (finding := _judge_run(begin, end, entries, begins, zero_names, expected, header.data_begin))
    )
    for idx, (low, high) in seen.items():
        if not is_zero[idx]:
            scan.findings += _judge_scale(entries[idx], low, high)
    return scan


def sample_file(path: Path, header: ShardHeader, expected: Mapping[str, TensorSpec]) -> ContentScan:
    """Look at a file without reading it all: its map of holes, evenly spaced windows, heads of some scale tensors.

    Raises CheckpointError as `scan_file` does.
    """
    scan = ContentScan()
    entries = [entry for entry in header.entries.values() if entry.num_bytes]
    begins = [entry.begin for entry in entries]
    fd = open_regular(path)
    try:
        runs = list(_holes(fd, header, scan, path))
        step = max(WINDOW, -(-header.file_bytes // WINDOWS_PER_FILE) // PAGE * PAGE)
        for offset in range(header.data_begin // PAGE * PAGE, header.file_bytes, step):
            if any(begin <= offset < end for begin, end in runs):
                continue
            data = np.frombuffer(_pread(fd, min(WINDOW, header.file_bytes - offset), offset, path), np.uint8)
            scan.bytes_read += len(data)
            runs += _zero_pages(data, offset)
        scales = [e for e in entries if _is_scale(expected.get(e.name)) and e.num_bytes <= CHUNK]
        for entry in scales[:: max(1, len(scales) // SCALES_PER_FILE)]:
            head = np.frombuffer(_pread(fd, min(PAGE, entry.num_bytes), entry.begin, path), np.uint8)
            if not head.any():  # perhaps only its beginning
                head = np.frombuffer(_pread(fd, entry.num_bytes, entry.begin, path), np.uint8)
            scan.bytes_read += len(head)
            if not head.any():
                scan.findings.append(_zero_tensor(entry, expected))
            else:
                scan.findings += _judge_scale(entry, int(head.min()), int(head.max()))
    finally:
        os.close(fd)
    merged_runs: list[tuple[int, int]] = []
    _extend(merged_runs, sorted(runs))
    scan.findings += (
        finding
        for begin, end in merged_runs
        if (finding := _judge_run(begin, end, entries, begins, set(), expected, header.data_begin))
    )
    return scan


def odd_zeros(findings: list[Finding], expected: Mapping[str, TensorSpec]) -> list[Finding]:
    """`findings`, where a router's vector of zeros is an error if the same one of other layers holds values: training
    moves the correction bias of every layer, or of none."""
    zeros = {finding.tensor for finding in findings if finding.kind == "zero_tensor"}

    def judged(finding: Finding) -> Finding:
        want = expected.get(finding.tensor or "") if finding.kind == "zero_tensor" else None
        if want is None or want.role != "router" or finding.severity != "warning":
            return finding
        same = [x for x in expected.values() if _over_layers(x) == _over_layers(want)]
        others = sum(x.name not in zeros for x in same)
        if not others:
            return finding
        message = f"every value is zero, and those of {others} other layers are not: was it ever written?"
        return replace(finding, severity="error", message=message)

    return [judged(finding) for finding in findings]


def _over_layers(tensor: TensorSpec) -> str:
    """The parameter without the number of its layer."""
    return tensor.param.replace(f"layers.{tensor.layer}.", "layers.*.", 1)


def padding_findings(
    root: Path, expected: Mapping[str, TensorSpec], entries: Mapping[str, TensorEntry]
) -> Iterator[Finding]:
    """Tensors stored longer than they are used: the tail must be zero, and is named as padding."""
    padded: dict[tuple[int, int], list[str]] = {}
    for name, entry in entries.items():
        want = expected.get(name)
        if want is None or want.used_rows is None or not fits(entry, want) or entry.shape[0] == want.used_rows:
            continue
        row_bytes = entry.num_bytes // entry.shape[0]
        try:
            fd = open_regular(root / entry.file)
            try:
                begin = entry.begin + want.used_rows * row_bytes
                tail = _pread(fd, entry.end - begin, begin, root / entry.file)
            finally:
                os.close(fd)
        except CheckpointError as error:
            yield Finding(kind="unreadable", severity="error", file=entry.file, tensors=(name,), message=str(error))
            continue
        if any(tail):
            message = f"entries {want.used_rows}..{entry.shape[0] - 1} lie beyond those in use and are not zero"
            yield Finding(kind="padding_not_zero", severity="error", file=entry.file, tensors=(name,), message=message)
        else:
            padded.setdefault((want.used_rows, entry.shape[0]), []).append(name)
    for (used, stored), names in padded.items():
        message = f"zero padding in {len(names)} tensors: {used} of {stored} stored entries are used, the rest is zero"
        yield Finding(kind="padding", severity="info", tensors=tuple(names), message=message)


def _pread(fd: int, size: int, offset: int, path: Path) -> bytes:
    """Exactly `size` bytes. Raises CheckpointError on a read error and where the file has become shorter."""
    pieces: list[bytes] = []
    while size:
        try:
            piece = os.pread(fd, size, offset)
        except OSError as error:
            raise CheckpointError(f"read error at byte {offset}: {error.strerror}", where=path) from None
        if not piece:
            raise CheckpointError(f"file ended at byte {offset} while it was being read", where=path)
        pieces.append(piece)
        size, offset = size - len(piece), offset + len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _is_scale(tensor: TensorSpec | None) -> bool:
    return tensor is not None and tensor.part == "weight_scale" and tensor.dtype == "U8"


def _zero_pages(data: NDArray[np.uint8], offset: int) -> list[tuple[int, int]]:
    """Runs of whole zero pages in `data`, as (begin, end) offsets of the file; `offset` is a multiple of a page."""
    pages = data[: len(data) // PAGE * PAGE].view(np.uint64).reshape(-1, PAGE // 8)
    zero = np.flatnonzero(~pages.any(axis=1))
    if not len(zero):
        return []
    cuts = np.flatnonzero(np.diff(zero) > 1)
    starts, stops = zero[np.r_[0, cuts + 1]], zero[np.r_[cuts, len(zero) - 1]]
    return [(offset + int(a) * PAGE, offset + (int(b) + 1) * PAGE) for a, b in zip(starts, stops, strict=True)]


def _extend(runs: list[tuple[int, int]], more: list[tuple[int, int]]) -> None:
    """Append runs in order, joining those that touch or overlap."""
    for begin, end in more:
        if runs and begin <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(end, runs[-1][1]))
        else:
            runs.append((begin, end))


def _holes(fd: int, header: ShardHeader, scan: ContentScan, path: Path) -> Iterator[tuple[int, int]]:
    """Extents that the file system never allocated, confirmed by reading both ends: archives fill them on read."""
    offset = header.data_begin
    while offset < header.file_bytes:
        try:
            begin = os.lseek(fd, offset, os.SEEK_HOLE)
            if begin >= header.file_bytes:
                return
            try:
                end = os.lseek(fd, begin, os.SEEK_DATA)
            except OSError:  # ENXIO: a hole up to the end of the file
                end = header.file_bytes
        except OSError:  # the file system keeps no such map
            return
        if end - begin >= PAGE:
            ends = _pread(fd, PAGE, begin, path) + _pread(fd, PAGE, end - PAGE, path)
            scan.bytes_read += len(ends)
            if not any(ends):
                yield begin, end
        offset = max(end, offset + 1)


def _judge_run(
    begin: int,
    end: int,
    entries: list[TensorEntry],
    begins: list[int],
    zero_names: set[str],
    expected: Mapping[str, TensorSpec],
    data_begin: int,
) -> Finding | None:
    """A finding for one run of zero pages, None where it says nothing new (inside a tensor that is zero throughout)."""
    if end <= data_begin:
        return None
    first = max(0, bisect_right(begins, begin) - 1)
    hit = [e for e in entries[first : bisect_left(begins, end)] if e.end > begin]
    if not hit or all(entry.name in zero_names for entry in hit):
        return None
    names = tuple(entry.name for entry in hit)
    file, extent = hit[0].file, f"{end - begin} bytes at {begin}..{end} are zero"
    want = expected.get(names[0])
    if len(hit) == 1 and want is not None and want.role in ("embedding", "head"):
        row_bytes = hit[0].num_bytes // max(1, hit[0].shape[0])
        row = (begin - hit[0].begin) // max(1, row_bytes)
        message = f"{extent}, rows from {row}: vocabulary entries never trained, or a hole"
        return Finding(kind="zero_rows", severity="warning", file=file, tensors=names, message=message)
    message = f"{extent}: reserved by a download and never written?"
    return Finding(kind="zero_extent", severity="error", file=file, tensors=names, message=message)


def _zero_tensor(entry: TensorEntry, expected: Mapping[str, TensorSpec]) -> Finding:
    want = expected.get(entry.name)
    if _is_scale(want):
        message = "every scale byte is zero: as an exponent 2**-127, which silences the whole matrix"
        return Finding(kind="zero_scale", severity="error", file=entry.file, tensors=(entry.name,), message=message)
    # A bias or a mixing row may have been initialised to zero; a matrix or a norm of zeros passes nothing on.
    is_plausible = want is not None and want.role != "norm" and sum(size > 1 for size in entry.shape) <= 1
    message = "every value is zero" + (", which a trained vector hardly is" if is_plausible else "")
    severity = "warning" if is_plausible or want is None else "error"
    if want is not None and want.param in NEVER_READ:
        severity, message = "info", "every value is zero, and the model never reads them: there is one source to mix"
    return Finding(
        kind="zero_tensor",
        severity=severity,  # type: ignore[arg-type]
        file=entry.file,
        tensors=(entry.name,),
        message=message,
    )


def _judge_scale(entry: TensorEntry, low: int, high: int) -> Iterator[Finding]:
    if high == 255:
        message = "holds scale byte 255, which is NaN as an E8M0 exponent"
        yield Finding(kind="nan_scale", severity="error", file=entry.file, tensors=(entry.name,), message=message)
    elif high not in SCALE_BYTES:
        message = (
            f"scale bytes {low}..{high} mean factors up to 2**{high - 127}: exponents, value 2**(byte - 127), or "
            "plain numbers?"
        )
        yield Finding(kind="scale_range", severity="warning", file=entry.file, tensors=(entry.name,), message=message)
