"""Tensors that two copies of a checkpoint hold with other bytes, and what the other bytes are where that shows."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from workbench.checkpoint import Checkpoint
from workbench.checkpoint.header import TensorEntry
from workbench.spec import published_tensors

__all__ = ["Differing", "differing_tensors", "tell_differing"]

SHOWN_TENSORS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Differing:
    """A tensor whose bytes are not the published ones. `how` says what they are: another tensor's, its own transposed,
    zeros; "other values" where nothing of that kind shows."""

    file: str
    name: str
    how: str


def differing_tensors(loaded: Path, published: Path, layers: Collection[int | None]) -> list[Differing]:
    """Those of `layers` (None: what lies outside all layers) that both folders hold, with other bytes; what one of them
    lacks is the audit's to name. Reads these layers of both, one tensor at a time.

    Raises CheckpointError and ConfigError for folders that cannot be read.
    """
    if loaded.resolve() == published.resolve():
        return []
    ours, theirs = Checkpoint.open(loaded), Checkpoint.open(published)
    names = [x.name for x in published_tensors(theirs.spec) if x.layer in layers and x.name in theirs.entries]
    wanted = {name: _digest(theirs.read_bytes(name)) for name in names if name in ours.entries}
    owners = {digest: name for name, digest in wanted.items()}
    found: list[Differing] = []
    for name, digest in wanted.items():
        data, entry = ours.read_bytes(name), ours.tensor(name)
        if _digest(data) != digest:
            found.append(Differing(file=entry.file, name=name, how=_how(entry, data, digest, owners)))
    return found


def tell_differing(found: Sequence[Differing]) -> str:
    """One sentence: files, the first tensors, and how many more there are."""
    files = ", ".join(dict.fromkeys(x.file for x in found))
    tensors = "; ".join(f"{x.name} holds {x.how}" for x in found[:SHOWN_TENSORS])
    more = f"; and {len(found) - SHOWN_TENSORS} more" if len(found) > SHOWN_TENSORS else ""
    return f"Not as published in {files}: {tensors}{more}"


def _how(entry: TensorEntry, data: bytes, published: bytes, owners: dict[bytes, str]) -> str:
    if not any(data):
        return "zeros"
    if (owner := owners.get(_digest(data))) is not None:
        return f"what is published as {owner}"
    if len(entry.shape) == 2 and len(data) % math.prod(entry.shape) == 0:
        rows = np.frombuffer(data, np.dtype(f"V{len(data) // math.prod(entry.shape)}")).reshape(entry.shape)
        if _digest(np.ascontiguousarray(rows.T).tobytes()) == published:
            return "its own transpose"
    return "other values"


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()
