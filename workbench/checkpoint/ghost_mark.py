"""The mark of a ghost: files of full size that hold no weights, and say so themselves. Never guessed from zeros.

A ghost says it twice, and both must agree: `ghost.json` lies in the folder, and the header of every file carries the
same id in its metadata. So neither a mark left beside real weights nor a ghost's file among them passes for the other.

    folder marked   file marked    meaning
    no              no             weights
    yes             same id        ghost: every data byte is expected to be zero, and a value that is not is an error
    yes             no, other id   refused: the mark was copied here, or the file was
    no              yes            refused: a file without weights among weights
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from workbench.base import CheckpointError, read_small_file
from workbench.checkpoint.header import ShardHeader, open_regular
from workbench.checkpoint.strict_json import parse_json

__all__ = ["GHOST_KEY", "GHOST_NAME", "GhostMark", "GhostProblem", "ghost_problems", "read_ghost_mark", "sound_ghost"]

GHOST_NAME = "ghost.json"
GHOST_KEY = "ghost"  # in the metadata of a header
MAX_MARK_BYTES = 1 << 16
LOOK_BYTES = 1 << 20  # of what a file has allocated behind its header, looked at for values

ProblemKind = Literal["ghost_mark", "ghost_values", "ghost_filled"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GhostMark:
    """Contents of `ghost.json`. `ghost` is the id that every file repeats; `names_from` says what the names are based
    on, and sizes are those of the whole ghost when it was written."""

    ghost: str
    names_from: str
    num_files: int
    num_tensors: int
    tensor_bytes: int  # of tensors, as an index counts them
    file_bytes: int  # with headers: what a listing of the folder shows

    def to_json(self) -> dict[str, object]:
        return {"about": ABOUT, **asdict(self)}

    def write(self, root: Path) -> Path:
        path = root / GHOST_NAME
        path.write_text(json.dumps(self.to_json(), indent=2) + "\n")
        return path


ABOUT = "Files of full size without weights, made to rehearse a deployment. Everything in them reads as zero."


@dataclass(frozen=True, kw_only=True, slots=True)
class GhostProblem:
    """Where the mark and the files disagree. `is_error` is False for what only costs disk."""

    kind: ProblemKind
    message: str
    file: str | None = None
    is_error: bool = True


def read_ghost_mark(root: Path | str) -> GhostMark | None:
    """The mark of a folder, None where it has none. Raises CheckpointError for a mark that cannot be read."""
    path = Path(root) / GHOST_NAME
    if not os.path.lexists(path):
        return None
    raw = read_small_file(path, max_bytes=MAX_MARK_BYTES, error=CheckpointError)
    try:
        fields = parse_json(raw)
    except ValueError as error:
        raise CheckpointError(f"mark of a ghost is not valid JSON: {error}", where=path) from None
    wanted = {"ghost": str, "names_from": str} | dict.fromkeys(
        ("num_files", "num_tensors", "tensor_bytes", "file_bytes"), int
    )
    if not isinstance(fields, dict) or not all(isinstance(fields.get(key), kind) for key, kind in wanted.items()):
        raise CheckpointError("not the mark of a ghost", where=path, expected=", ".join(wanted))
    return GhostMark(**{key: fields[key] for key in wanted})


def ghost_problems(root: Path, mark: GhostMark | None, headers: Iterable[ShardHeader]) -> Iterator[GhostProblem]:
    """Hold the mark of a folder (or its absence) against the files: their own marks, and their holes.

    Costs one look at each file's map of holes. Where the file system keeps none, the first and last bytes are read.
    """
    for header in headers:
        own = header.metadata.get(GHOST_KEY)
        if mark is None:
            if own is not None:
                message = f"a ghost's file, without weights, in a folder that has no {GHOST_NAME}"
                yield GhostProblem(kind="ghost_mark", file=header.file, message=message)
        elif own is None:
            message = f"{GHOST_NAME} marks this folder as a ghost, and this file is none: was the mark copied here?"
            yield GhostProblem(kind="ghost_mark", file=header.file, message=message)
        elif own != mark.ghost:
            message = f"the file belongs to ghost {own[:16]!a}, the folder is marked as {mark.ghost[:16]!a}"
            yield GhostProblem(kind="ghost_mark", file=header.file, message=message)
        else:
            try:
                problem = _look_for_values(root / header.file, header)
            except (OSError, CheckpointError) as error:
                problem = GhostProblem(kind="ghost_mark", file=header.file, message=f"cannot be read: {error}")
            if problem is not None:
                yield problem


def sound_ghost(root: Path, headers: Mapping[str, ShardHeader]) -> GhostMark | None:
    """The mark of a folder whose files agree with it. Raises CheckpointError where they do not."""
    mark = read_ghost_mark(root)
    for problem in ghost_problems(root, mark, headers.values()):
        if problem.is_error:
            raise CheckpointError(
                problem.message,
                where=root / problem.file if problem.file else root,
                next_step=f"Keep ghosts and weights in folders of their own; only a ghost has a {GHOST_NAME}",
            )
    return mark


def _look_for_values(path: Path, header: ShardHeader) -> GhostProblem | None:
    """A value behind the header makes a ghost an impostor; zeros that take disk make it a filled one."""
    fd = open_regular(path)
    try:
        filled = 0
        for begin, end in _allocated(fd, header.data_begin, header.file_bytes):
            filled += end - begin
            looked_at = os.pread(fd, min(LOOK_BYTES, end - begin), begin)
            looked_at += os.pread(fd, min(LOOK_BYTES, end - begin), max(begin, end - LOOK_BYTES))
            if any(looked_at):
                message = f"marked as a ghost, but bytes {begin}..{end} hold values: these are weights"
                return GhostProblem(kind="ghost_values", file=header.file, message=message)
    finally:
        os.close(fd)
    # The block that holds the end of the header holds the beginning of the data as well.
    if filled > LOOK_BYTES:
        message = f"{filled} bytes that were holes take disk: copied by a program that fills them?"
        return GhostProblem(kind="ghost_filled", file=header.file, message=message, is_error=False)
    return None


def _allocated(fd: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Extents of a file in [begin, end) that are no holes; a file system without a map of holes shows one extent."""
    offset = begin
    while offset < end:
        try:
            first = os.lseek(fd, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole from here to the end
                return
            first = offset
        if first >= end:
            return
        try:
            last = min(os.lseek(fd, first, os.SEEK_HOLE), end)
        except OSError:
            last = end
        yield first, last
        offset = max(last, first + 1)
