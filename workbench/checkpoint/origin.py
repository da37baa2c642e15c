"""What kind of weights a folder holds: as published, made here by a script that says so, or none at all (a ghost)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from workbench.base import ConfigError
from workbench.checkpoint.ghost_mark import GHOST_NAME
from workbench.spec import read_json

__all__ = ["ORIGIN_NAME", "Origin", "read_origin"]

ORIGIN_NAME = "origin.json"  # beside the weights of a checkpoint that was made here; published ones have none


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """`is_dummy`: the weights were never trained, so that answers prove the machinery and nothing else.

    `is_ghost`: there are no weights, only files of their size; see `ghost_mark`.
    """

    is_dummy: bool
    note: str
    is_ghost: bool = False


def read_origin(root: Path | str) -> Origin:
    """Origin of the weights in `root`. A folder with neither `origin.json` nor the mark of a ghost has published ones.

    Whether a mark and the files beside it agree is asked by `Checkpoint.open` and `audit`.
    """
    if os.path.lexists(Path(root) / GHOST_NAME):
        return Origin(is_dummy=True, note="ghost: no weights, every file is a hole of full size", is_ghost=True)
    path = Path(root) / ORIGIN_NAME
    if not path.exists():
        return Origin(is_dummy=False, note="weights as published")
    try:
        kind = read_json(path).get("weights")
    except ConfigError:
        kind = None
    if kind == "random":
        return Origin(is_dummy=True, note="random weights: its answers are noise")
    if isinstance(kind, str):
        return Origin(is_dummy=False, note=f"{kind} weights")
    return Origin(is_dummy=True, note=f"weights of unknown origin (unreadable {ORIGIN_NAME})")
