"""Ghosts: the checkpoint that is coming, in full size and without its weights, from a config and an index.

    0       8        8 + n                                       file size
    ├ n ────┼ JSON ──┼ hole: reads as zeros, takes no disk ......┤

Names, files, dtypes, shapes and offsets are real, so an audit, a dry run and a load do on a ghost what they will do on
the weights. Within a file, tensors stand as the safetensors library writes them: by dtype, then by name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from workbench.base import CheckpointError, Table, human, short_repr
from workbench.checkpoint.checkpoint import list_shards
from workbench.checkpoint.ghost_mark import GHOST_KEY, GhostMark, read_ghost_mark
from workbench.checkpoint.header import ShardHeader, read_header
from workbench.checkpoint.index import ShardIndex, find_index, read_index
from workbench.checkpoint.writer import deal_per_layer, shard_header, write_index
from workbench.spec import ModelSpec, TensorSpec, published_tensors, read_spec

__all__ = ["Ghost", "write_ghost"]

# Order of dtypes in a file of the safetensors library, largest first; those of equal size as its list has them.
_DTYPE_ORDER = (
    "BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "I16", "U16", "F16", "BF16",
    "I32", "U32", "F32", "C64", "F64", "I64", "U64",
)  # fmt: skip
_RANK = {dtype: rank for rank, dtype in enumerate(_DTYPE_ORDER)}
_COPIED = ("preprocessor_config.json", "generation_config.json", "tokenizer_config.json")  # where they lie beside
_PROBE_BYTES = 4 << 20
_SPARE_BYTES = 64 << 20  # disk left free beyond what a ghost takes
_SHOWN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Ghost:
    """A ghost on disk. `disk_bytes` is what it takes there, `mark.file_bytes` what a listing shows."""

    root: Path
    mark: GhostMark
    disk_bytes: int

    def table(self) -> Table:
        rows = (
            ("files", self.mark.num_files),
            ("tensors", self.mark.num_tensors),
            ("bytes of tensors", self.mark.tensor_bytes),
            ("bytes of files, with headers", self.mark.file_bytes),
            ("bytes on disk", self.disk_bytes),
            ("names from", self.mark.names_from),
        )
        return Table(title=f"Ghost in {self.root}", columns=("what", "value"), rows=rows)

    def to_json(self) -> dict[str, object]:
        return {"root": str(self.root), **self.mark.to_json(), "disk_bytes": self.disk_bytes}

    def render(self) -> str:
        return self.table().render()

    def _repr_html_(self) -> str:
        return self.table().to_html()


def write_ghost(source: Path | str, out: Path | str, *, index: Path | None = None) -> Ghost:
    """Write the ghost of a model into the new or empty folder `out`.

    `source` is a `config.json` or a folder that holds one. Names and files come from `index`, else from the index
    beside the config, else from the model's family, one file per layer as the family publishes them; shapes come from
    headers in `source` where there are any. Raises ConfigError or CheckpointError for a description that does not fit
    itself, and CheckpointError, leaving nothing behind, where the file system has no room, no holes or no files of
    this size.
    """
    source, out = Path(source), Path(out)
    spec = read_spec(source)
    folder = source if source.is_dir() else source.parent
    if source.is_dir() and read_ghost_mark(source) is not None:
        raise CheckpointError("already a ghost", where=source, next_step="Copy it with a program that keeps holes")
    index_path = index or (find_index(folder) if source.is_dir() else None)
    published = read_index(index_path) if index_path is not None else None
    files = _deal(spec, published, _stored_shapes(folder) if source.is_dir() else {})
    ghost_id = hashlib.sha256(repr([(f, [(t.name, t.dtype, t.shape) for t in ts]) for f, ts in files.items()]).encode())
    heads = {file: shard_header(tensors, {GHOST_KEY: ghost_id.hexdigest()}) for file, tensors in files.items()}
    sizes = {file: len(heads[file]) + sum(t.num_bytes for t in tensors) for file, tensors in files.items()}
    mark = GhostMark(
        ghost=ghost_id.hexdigest(),
        names_from=f"family {spec.family}" if published is None else published.path.name,
        num_files=len(files),
        num_tensors=sum(map(len, files.values())),
        tensor_bytes=sum(t.num_bytes for tensors in files.values() for t in tensors),
        file_bytes=sum(sizes.values()),
    )
    _check_total(published, mark)

    with _new_folder(out):
        _check_room(out, needed=sum(map(len, heads.values())), largest=max(sizes.values()))
        mark.write(out)  # first: what an interruption leaves behind is marked as well
        _copy_descriptions(source, folder, out)
        for file, head in heads.items():
            _write_hole(out / file, head, sizes[file])
        write_index(out, {t.name: file for file, tensors in files.items() for t in tensors}, mark.tensor_bytes)
    return Ghost(root=out, mark=mark, disk_bytes=sum(_disk_bytes(path) for path in out.iterdir()))


def _deal(
    spec: ModelSpec, index: ShardIndex | None, stored: Mapping[str, tuple[str, tuple[int, ...]]]
) -> dict[str, list[TensorSpec]]:
    """Tensors of each file, in file order. Raises CheckpointError where index and model name different tensors."""
    tensors = [_as_stored(tensor, stored) for tensor in published_tensors(spec)]
    files: dict[str, list[TensorSpec]] = {}
    if index is None:
        groups = deal_per_layer(tensors)
        files = {f"model-{i:05d}-of-{len(groups):06d}.safetensors": group for i, group in enumerate(groups, start=1)}
    else:
        unnamed = [tensor.name for tensor in tensors if tensor.name not in index.files]
        known = {tensor.name for tensor in tensors}
        unknown = [name for name in index.files if name not in known]
        if unnamed or unknown:
            raise CheckpointError(
                "a ghost needs the shape of every tensor, and the index does not name those of this model",
                where=index.path,
                found=f"{len(unnamed)} of the model without a name ({short_repr(unnamed[:_SHOWN])}), "
                f"{len(unknown)} without a place in it ({short_repr(unknown[:_SHOWN])})",
                next_step="Do config and index belong together?",
            )
        for tensor in tensors:
            files.setdefault(index.files[tensor.name], []).append(tensor)
    for group in files.values():
        group.sort(key=lambda tensor: (-_RANK[tensor.dtype], tensor.name))
    return dict(sorted(files.items()))


def _stored_shapes(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every tensor in the files of a folder, where it has any."""
    headers: Iterator[ShardHeader] = (read_header(folder / file) for file in list_shards(folder))
    return {entry.name: (entry.dtype, entry.shape) for header in headers for entry in header.entries.values()}


def _as_stored(tensor: TensorSpec, stored: Mapping[str, tuple[str, tuple[int, ...]]]) -> TensorSpec:
    if tensor.used_rows is None or tensor.name not in stored:
        return tensor  # only the length of a padding is not the model's to say
    return dataclasses.replace(tensor, shape=stored[tensor.name][1])


def _check_total(index: ShardIndex | None, mark: GhostMark) -> None:
    if index is not None and index.total_size not in (None, mark.tensor_bytes):
        raise CheckpointError(
            "the tensors of this model have another size than the index claims: dtypes or shapes are not as published",
            where=index.path,
            found=f"{mark.tensor_bytes} bytes",
            expected=f"metadata.total_size {index.total_size}",
        )


@contextlib.contextmanager
def _new_folder(out: Path) -> Iterator[None]:
    """A folder for a ghost, emptied again (and removed where it was made here) if writing fails."""
    is_new = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        held = [path.name for path in out.iterdir()]
    except OSError as error:
        raise CheckpointError(f"no folder for a ghost: {error.strerror}", where=out) from None
    if held:
        raise CheckpointError("folder is not empty", where=out, found=short_repr(held), next_step="Choose another one")
    try:
        yield
    except BaseException as error:
        for path in out.iterdir():
            path.unlink()
        if is_new:
            out.rmdir()
        if isinstance(error, OSError):
            raise CheckpointError(f"a ghost cannot be written: {error.strerror}", where=out) from error
        raise


def _check_room(out: Path, *, needed: int, largest: int) -> None:
    """Raises CheckpointError where `out` has no room for the headers, fills holes, or refuses the largest file."""
    needed += needed + _SPARE_BYTES  # the index repeats the names
    status = os.statvfs(out)
    free = status.f_bavail * status.f_frsize
    if free < needed:
        raise CheckpointError("no room for a ghost", where=out, found=human(free, "B"), expected=human(needed, "B"))
    probe = out / "probe"
    try:
        _write_hole(probe, b"", _PROBE_BYTES)  # small: a file system that fills holes would fill a large one as well
        if (taken := _disk_bytes(probe)) > _PROBE_BYTES // 2:
            raise CheckpointError(
                "this file system fills holes: a ghost would take the disk of the real weights",
                where=out,
                found=f"{taken} bytes on disk for a hole of {_PROBE_BYTES}",
                next_step="Use one with sparse files: ext4, XFS, Btrfs, ZFS, tmpfs",
            )
        _write_hole(probe, b"", largest)
    finally:
        probe.unlink(missing_ok=True)


def _write_hole(path: Path, head: bytes, size: int) -> None:
    with path.open("wb") as file:
        file.write(head)
        file.flush()
        try:
            os.ftruncate(file.fileno(), size)
        except OSError as error:
            if error.errno not in (errno.EFBIG, errno.EINVAL):
                raise
            raise CheckpointError(
                f"no file of {size} bytes here: {error.strerror}",
                where=path.parent,
                next_step="Choose a file system with larger files, or raise the limit (ulimit -f)",
            ) from None
        if os.fstat(file.fileno()).st_size != size:
            raise CheckpointError(f"no file of {size} bytes here", where=path.parent)


def _copy_descriptions(source: Path, folder: Path, out: Path) -> None:
    config = folder / "config.json" if source.is_dir() else source
    (out / "config.json").write_bytes(config.read_bytes())
    if config.name != "config.json":
        return  # a config among others: what lies beside it belongs to all of them
    for name in _COPIED:
        if (folder / name).is_file():
            (out / name).write_bytes((folder / name).read_bytes())


def _disk_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512
