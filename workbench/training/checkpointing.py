"""Saving a run so that a kill at any moment loses at most the steps since the last save.

    out/states/step-00000250/rank-0.pt, rank-1.pt, ..., state.json
               step-00000500/...
               writing-...            left by a kill in the middle of a save; ignored and removed

Every rank writes its own file into a fresh folder and syncs it; when all have, rank 0 adds `state.json` with sizes and
digests, syncs it, and renames the folder. A rename is atomic: a folder called step-... is whole. The last two are kept,
and a state whose digests no longer fit (a damaged disk) is passed over for the one before.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workbench.base import CheckpointError
from workbench.parallel import Group

__all__ = ["SavedState", "find_states", "load_rank_state", "newest_state", "save_state"]

_FOLDER = re.compile(r"step-(\d{8})")
_MANIFEST = "state.json"
NUM_KEPT = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedState:
    """A whole state on disk. `layout` is its text; `essence` that of the recipe."""

    folder: Path
    step: int  # steps done
    layout: str
    essence: str
    files: tuple[tuple[str, int, str], ...]  # name, bytes, sha256

    def is_sound(self) -> bool:
        """Whether every file has the size and digest it was written with."""
        return all(
            (self.folder / name).is_file()
            and (self.folder / name).stat().st_size == size
            and _digest(self.folder / name) == digest
            for name, size, digest in self.files
        )


def save_state(
    states: Path, *, step: int, rank: int, world: Group, layout: str, essence: str, content: Mapping[str, Any]
) -> Path:
    """Every rank calls it with its own `content` (tensors, numbers, text). Returns the folder.

    `world` is a group of all ranks. Raises CheckpointError where another rank could not write.
    """
    final = states / f"step-{step:08d}"
    temporary = states / f"writing-{step:08d}"
    if rank == 0:
        for left_over in states.glob("writing-*"):
            shutil.rmtree(left_over)
        temporary.mkdir(parents=True)
    world.barrier()
    path = temporary / f"rank-{rank}.pt"
    with path.open("wb") as file:
        torch.save(dict(content), file)
        file.flush()
        os.fsync(file.fileno())
    world.barrier()
    if rank == 0:
        names = [f"rank-{r}.pt" for r in range(world.size)]
        missing = [name for name in names if not (temporary / name).is_file()]
        if missing:
            raise CheckpointError(
                "ranks wrote their states elsewhere",
                where=temporary,
                found=f"no {', '.join(missing)}",
                next_step="All ranks need one shared folder",
            )
        manifest = {
            "step": step,
            "layout": layout,
            "essence": essence,
            "files": [[name, (temporary / name).stat().st_size, _digest(temporary / name)] for name in names],
        }
        with (temporary / _MANIFEST).open("w") as text:
            json.dump(manifest, text)
            text.flush()
            os.fsync(text.fileno())
        _sync_folder(temporary)
        if final.exists():  # a run that went back to an older state comes by here again
            _discard(final)
        temporary.rename(final)
        _sync_folder(states)
        for old in find_states(states)[NUM_KEPT:]:
            _discard(old.folder)
    world.barrier()
    return final


def find_states(states: Path) -> list[SavedState]:
    """Whole states, newest first; unfinished ones are not among them, digests are not yet checked."""
    found = []
    for folder in states.iterdir() if states.is_dir() else ():
        match = _FOLDER.fullmatch(folder.name)
        try:
            manifest = json.loads((folder / _MANIFEST).read_text()) if match else None
        except (OSError, ValueError):
            continue
        if match and isinstance(manifest, dict):
            files = tuple((str(name), int(size), str(digest)) for name, size, digest in manifest["files"])
            layout, essence = str(manifest["layout"]), str(manifest["essence"])
            found.append(SavedState(folder=folder, step=int(match[1]), layout=layout, essence=essence, files=files))
    return sorted(found, key=lambda state: -state.step)


def newest_state(states: Path, *, essence: str, layout: str | None) -> SavedState | None:
    """The newest sound state, None where there is none (nothing saved yet).

    Raises CheckpointError where that state belongs to another recipe or, unless None is given, to another layout.
    """
    state = next((state for state in find_states(states) if state.is_sound()), None)
    if state is None:
        return None
    if state.essence != essence:
        raise CheckpointError(
            "saved by a run with another recipe",
            where=state.folder,
            found=_differences(state.essence, essence),
            next_step="Give the recipe it was started with, or another output folder",
        )
    if layout is not None and state.layout != layout:
        raise CheckpointError("saved under another layout", where=state.folder, found=state.layout, expected=layout)
    return state


def load_rank_state(state: SavedState, rank: int) -> dict[str, Any]:
    """What a rank saved: tensors and plain values only, nothing in the file can run code."""
    content: dict[str, Any] = torch.load(state.folder / f"rank-{rank}.pt", map_location="cpu", weights_only=True)
    return content


def _discard(folder: Path) -> None:
    """Renamed first: a kill half way through the removal must not leave a folder that looks whole."""
    doomed = folder.with_name(f"writing-{folder.name}-old")
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _differences(saved: str, wanted: str) -> str:
    old, new = json.loads(saved), json.loads(wanted)
    keys = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    return ", ".join(f"{key}: {old.get(key)!r} there, {new.get(key)!r} here" for key in keys)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
