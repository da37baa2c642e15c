"""Index against folder against headers: is every file here and whole, and do both name the same tensors?"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from workbench.base import CheckpointError
from workbench.checkpoint.checkpoint import list_shards
from workbench.checkpoint.findings import Finding
from workbench.checkpoint.header import ShardHeader, TensorEntry, open_regular, read_header
from workbench.checkpoint.index import ShardIndex, find_index, read_index, shard_numbering

__all__ = ["Survey", "survey_folder"]

# Left behind by downloaders that did not finish: huggingface_hub, aria2, browsers, rsync.
_PARTIAL_ENDINGS = (".incomplete", ".aria2", ".part", ".crdownload", ".tmp", ".partial")
_COMPARE_BYTES = 1 << 20


@dataclass(kw_only=True, slots=True)
class Survey:
    """A folder's files as found.

    `located`: each tensor that lies where it should. `strays`: tensors of the index's files that the index does not
    name at all, with their file. `explained`: names in the index whose trouble already has its finding.
    """

    root: Path
    index: ShardIndex | None = None
    headers: dict[str, ShardHeader] = field(default_factory=dict)
    located: dict[str, TensorEntry] = field(default_factory=dict)
    strays: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    explained: set[str] = field(default_factory=set)

    @property
    def names(self) -> Mapping[str, object]:
        """Names the checkpoint claims to hold: those of the index, or of the headers where there is no index."""
        return self.index.files if self.index is not None else self.located


def survey_folder(root: Path) -> Survey:
    """Read index and headers of a folder and hold them against each other. Raises CheckpointError only where the folder
    itself cannot be listed; everything else becomes a finding."""
    survey = Survey(root=root)
    present = list_shards(root)
    survey.findings += _partial_files(root)
    try:
        index_path = find_index(root)
        survey.index = read_index(index_path) if index_path is not None else None
    except CheckpointError as error:
        survey.findings.append(Finding(kind="index", severity="error", message=str(error)))
    if survey.index is None:
        survey.findings += _check_numbering(present)
        files = present
    else:
        survey.findings += _check_files(survey.index, present)
        named = set(survey.index.files.values())
        files = [file for file in present if file in named]
    for file in files:
        try:
            header = survey.headers[file] = read_header(root / file)
        except CheckpointError as error:
            held = () if survey.index is None else _held_by(survey.index, file)
            survey.findings.append(
                Finding(kind="bad_header", severity="error", file=file, tensors=held, message=error.message)
            )
            continue
        survey.findings += (
            Finding(kind=problem.kind, severity="error", file=file, tensors=problem.tensors, message=problem.message)
            for problem in header.problems
        )
    _compare(survey)
    return survey


def _held_by(index: ShardIndex, file: str) -> tuple[str, ...]:
    return tuple(name for name, holder in index.files.items() if holder == file)


def _partial_files(root: Path) -> Iterator[Finding]:
    for folder in (root, root / ".cache" / "huggingface" / "download"):
        for path in sorted(folder.glob("*")) if folder.is_dir() else ():
            if path.name.endswith(_PARTIAL_ENDINGS):
                message = "left behind by an unfinished download"
                file = str(path.relative_to(root))
                yield Finding(kind="partial_file", severity="warning", file=file, message=message)


def _check_files(index: ShardIndex, present: list[str]) -> Iterator[Finding]:
    """Files that the index names and the folder lacks, and the reverse; and whether one explains the other."""
    named = set(index.files.values())
    missing, stray = sorted(named - set(present)), [file for file in present if file not in named]
    wanted = {numbers[2] for file in missing if (numbers := shard_numbering(file))}
    held = {numbers[2] for file in stray if (numbers := shard_numbering(file))}
    if missing and held - wanted:
        # The cause before its effects: hundreds of lost tensors would hide that the index belongs to other files.
        yield Finding(
            kind="stale_index",
            severity="error",
            file=index.path.name,
            message=(
                f"the index belongs to another sharding: it names files of {_listed(wanted) or 'other names'} "
                f"({missing[0]}), the folder holds those of {_listed(held - wanted)} ({stray[0]})"
            ),
        )
    lost: dict[str, list[str]] = {file: [] for file in missing}
    for name, file in index.files.items():
        if file in lost:
            lost[file].append(name)
    for file, tensors in lost.items():
        message = f"the index names this file and it is not here; {len(tensors)} tensors are lost with it"
        yield Finding(kind="missing_shard", severity="error", file=file, tensors=tuple(tensors), message=message)
    for file in stray:
        message = "the index does not name this file; nothing in it is loaded"
        yield Finding(kind="stray_file", severity="warning", file=file, message=message)


def _check_numbering(present: list[str]) -> Iterator[Finding]:
    """Without an index the file names are all there is: "-00001-of-00003" promises two more."""
    if not present:
        yield Finding(kind="missing_shard", severity="error", message="no safetensors file and no readable index")
    if len(present) > 1:
        message = f"{len(present)} files without a readable index: nothing says which tensors should be here"
        yield Finding(kind="no_index", severity="warning", message=message)
    numbered = {(n[0], n[2]): set[int]() for file in present if (n := shard_numbering(file))}
    for file in present:
        if n := shard_numbering(file):
            numbered[n[0], n[2]].add(n[1])
    for (stem, total), numbers in numbered.items():
        gone = total - sum(1 <= number <= total for number in numbers)
        if gone:
            first = next(number for number in range(1, total + 1) if number not in numbers)
            message = f"{gone} of {total} numbered files are not here, the first is number {first}"
            yield Finding(kind="missing_shard", severity="error", file=f"{stem}-*-of-{total}", message=message)


def _compare(survey: Survey) -> None:
    """Index entries against headers, both ways; fills `located` and `explained`."""
    holders: dict[str, list[str]] = {}
    for file, header in survey.headers.items():
        for name in header.entries:
            holders.setdefault(name, []).append(file)
    index = survey.index
    for name, files in holders.items():
        named = index.files.get(name) if index is not None else files[0]
        if named in files:
            survey.located[name] = survey.headers[named].entries[name]
        elif named is None:
            survey.strays[name] = files[0]
        if len(files) > 1:
            survey.findings.append(_duplicate(survey, name, files, named if index is not None else None))
    if index is None:
        return
    for name, file in index.files.items():
        if name in survey.located or file not in survey.headers:
            continue  # held, or already reported with its file
        survey.explained.add(name)
        others = holders.get(name)
        if others:
            message = f"the index says that this file holds it, but it lies in {others[0]}"
            survey.findings.append(
                Finding(kind="misplaced", severity="error", file=file, tensors=(name,), message=message)
            )
        else:
            message = "the index says that this file holds it, its header does not; is the index of another version?"
            survey.findings.append(
                Finding(kind="not_held", severity="error", file=file, tensors=(name,), message=message)
            )
    survey.findings += _check_total(survey)


def _duplicate(survey: Survey, name: str, files: list[str], named: str | None) -> Finding:
    entries = [survey.headers[file].entries[name] for file in files]
    chosen = f"the index says {named}" if named else "no index says which one counts"
    if len({(entry.dtype, entry.shape) for entry in entries}) > 1:
        kind = ", ".join(f"{entry.dtype} {list(entry.shape)}" for entry in entries)
        answer = f"they differ in kind: {kind}"
    elif _begin_alike(survey.root, entries):
        answer = "they begin with the same bytes"
    else:
        answer = "their bytes differ"
    other = next(file for file in files if file != named) if named else files[0]
    message = f"stands in {' and in '.join(files)}; {chosen}; {answer}"
    return Finding(kind="duplicate", severity="error", file=other, tensors=(name,), message=message)


def _begin_alike(root: Path, entries: list[TensorEntry]) -> bool:
    """Whether the first megabyte of all copies is equal."""
    heads = set()
    for entry in entries:
        try:
            fd = open_regular(root / entry.file)
        except CheckpointError:
            return False
        try:
            heads.add(os.pread(fd, min(entry.num_bytes, _COMPARE_BYTES), entry.begin))
        finally:
            os.close(fd)
    return len(heads) == 1


def _check_total(survey: Survey) -> Iterator[Finding]:
    index = survey.index
    assert index is not None
    # Only where every tensor was found; otherwise the sum must differ and says nothing new.
    if index.total_size is None or len(survey.located) != len(index.files):
        return
    total = sum(entry.num_bytes for entry in survey.located.values())
    if total != index.total_size:
        message = f"metadata.total_size is {index.total_size}, the tensors have {total} bytes"
        yield Finding(kind="total_size", severity="warning", file=index.path.name, message=message)


def _listed(totals: set[int]) -> str:
    return " and ".join(f"a {total}-file sharding" for total in sorted(totals))
