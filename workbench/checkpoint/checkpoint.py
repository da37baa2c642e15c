"""A checkpoint folder as the loader sees it: what the model is, and where each tensor lies. Headers only, no data."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from workbench.base import CheckpointError
from workbench.checkpoint.ghost_mark import GhostMark, sound_ghost
from workbench.checkpoint.header import ShardHeader, TensorEntry, open_regular, read_header
from workbench.checkpoint.index import find_index, read_index
from workbench.spec import ModelSpec, read_spec

__all__ = ["Checkpoint", "list_shards"]


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Checkpoint:
    """An opened checkpoint. Every name in `index` is known to lie, whole and alone, in the file it names.

    With an index, tensors that it does not name do not exist here, even where a file holds them: an old copy of a
    tensor in another file must not win by being read last.
    """

    root: Path
    spec: ModelSpec
    index: Mapping[str, str] | None  # tensor name -> file name; None where the folder has no index
    headers: Mapping[str, ShardHeader]  # file name -> header
    entries: Mapping[str, TensorEntry]  # tensor name -> where it lies
    ghost: GhostMark | None = None  # set where the files are holes of full size: every value is expected to be zero

    @classmethod
    def open(cls, root: Path | str) -> Checkpoint:
        """Read config, index and all headers of a folder.

        Raises ConfigError for the config, CheckpointError for a missing, torn, over-long or contradictory file, naming
        the file and the tensors lost, and where weights and a ghost are mixed up. Neither names nor contents are held
        against the model here: see `audit`.
        """
        root = Path(root)
        spec = read_spec(root)
        index_path = find_index(root)
        index = read_index(index_path).files if index_path is not None else None
        files = sorted(set(index.values())) if index is not None else list_shards(root)
        if not files:
            raise CheckpointError("folder holds no safetensors files and no index", where=root)
        if index is not None:
            _check_present(root, index)
        headers = {file: read_header(root / file) for file in files}
        for header in headers.values():
            for problem in header.problems:
                raise CheckpointError(problem.message, where=root / header.file, next_step="Run `workbench audit`")
        entries = _locate(root, index, headers)
        ghost = sound_ghost(root, headers)
        return cls(root=root, spec=spec, index=index, headers=headers, entries=entries, ghost=ghost)

    @property
    def total_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries.values())

    def tensor(self, name: str) -> TensorEntry:
        """Where `name` lies. Raises CheckpointError where the checkpoint does not hold it."""
        try:
            return self.entries[name]
        except KeyError:
            raise CheckpointError(f"no tensor {name!r}", where=self.root) from None

    def read_bytes(self, name: str) -> bytes:
        """Stored bytes of one tensor. Raises CheckpointError where it is absent or the file ends early."""
        entry = self.tensor(name)
        fd = open_regular(self.root / entry.file)
        try:
            pieces, offset = [], entry.begin
            while offset < entry.end:  # one pread returns 2 GiB at most
                piece = os.pread(fd, entry.end - offset, offset)
                if not piece:
                    raise CheckpointError(f"{name}: file ended while reading", where=self.root / entry.file)
                pieces.append(piece)
                offset += len(piece)
            return b"".join(pieces)
        finally:
            os.close(fd)

    def __iter__(self) -> Iterator[TensorEntry]:
        return iter(self.entries.values())

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        kind = "" if self.ghost is None else "ghost, "
        return f"Checkpoint({str(self.root)!r}: {kind}{len(self)} tensors in {len(self.headers)} files)"


def list_shards(root: Path) -> list[str]:
    """Names of the safetensors files in a folder, sorted. Raises CheckpointError where the folder cannot be listed."""
    try:
        return sorted(path.name for path in root.iterdir() if path.name.endswith(".safetensors"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CheckpointError(f"folder cannot be listed: {reason}", where=root) from None


def _check_present(root: Path, index: Mapping[str, str]) -> None:
    present = set(list_shards(root))
    for file in sorted(set(index.values())):
        if file not in present:
            lost = [name for name, holder in index.items() if holder == file]
            shown = ", ".join(lost[:3]) + (", ..." if len(lost) > 3 else "")
            raise CheckpointError(
                f"missing, and with it {len(lost)} tensors: {shown}",
                where=root / file,
                next_step="Download it again, or run `workbench audit` for the whole picture",
            )


def _locate(root: Path, index: Mapping[str, str] | None, headers: Mapping[str, ShardHeader]) -> dict[str, TensorEntry]:
    if index is not None:
        for name, file in index.items():
            if name not in headers[file].entries:
                raise CheckpointError(
                    f"index says that this file holds {name}, its header does not",
                    where=root / file,
                    next_step="Is the index left over from another version of the files? Run `workbench audit`",
                )
        return {name: headers[file].entries[name] for name, file in index.items()}
    entries: dict[str, TensorEntry] = {}
    for header in headers.values():
        for name, entry in header.entries.items():
            if name in entries:
                raise CheckpointError(
                    f"{name} stands in two files and no index says which one counts",
                    where=root,
                    found=f"{entries[name].file} and {header.file}",
                )
            entries[name] = entry
    return entries
