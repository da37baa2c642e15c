"""Faults in the files of a checkpoint: planted in a folder of links, where only the file that is changed is a copy.

The folder that the links point to is read and never written: a link is removed before anything is written in its place.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from workbench.base import CheckpointError
from workbench.checkpoint import Checkpoint
from workbench.checkpoint.header import TensorEntry, read_header
from workbench.spec import Part, TensorSpec, published_tensors

__all__ = ["choose_matrix", "double_matrix", "flip_weight", "link_folder", "tear_shard"]

KEPT_BYTES = 1 << 20  # of the data of a torn shard, however large it was
LARGEST_CODE, SIGN = 0x07, 0x08  # of a nibble that holds an E2M1 number
FLOATS: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.uint32),
    "BF16": np.dtype(np.uint16),
    "F16": np.dtype(np.uint16),
}
EXPONENT_BITS = {"F32": (23, 8), "BF16": (7, 8), "F16": (10, 5)}  # position of the lowest, and how many


def link_folder(root: Path, folder: Path) -> Path:
    """A new folder at `folder` that holds a link to everything in `root`."""
    folder.mkdir()
    for path in sorted(root.iterdir()):
        (folder / path.name).symlink_to(path.resolve())
    return folder


def tear_shard(folder: Path) -> str:
    """Cut the end off the last shard of `folder`, as a download that broke off would; returns its name."""
    shard = sorted(folder.glob("*.safetensors"))[-1]
    header = read_header(shard)
    kept = header.data_begin + min(KEPT_BYTES, header.tensor_bytes // 2)
    with shard.open("rb") as file:
        head = file.read(kept)
    shard.unlink()
    shard.write_bytes(head)
    return shard.name


def choose_matrix(root: Path, part: Part) -> TensorSpec:
    """A matrix of a routed expert half-way through the layers: its `part` where it is packed in nibbles, else itself;
    where there are no experts, any matrix that is stored as floats.

    Raises CheckpointError for a checkpoint that stores its matrices in a way that is not known here.
    """
    checkpoint = Checkpoint.open(root)
    middle = checkpoint.spec.num_layers // 2
    stored = [x for x in published_tensors(checkpoint.spec) if x.name in checkpoint.entries]
    later = [x for x in stored if x.layer is not None and x.layer >= middle]
    packed = [x for x in later if x.role == "routed_expert" and x.part == part and x.dtype == "U8"]
    floats = [x for x in later if x.part == "weight" and len(x.shape) == 2 and x.dtype in FLOATS]
    experts = [x for x in floats if x.role == "routed_expert"]
    if not (fit := packed or experts or floats):
        raise CheckpointError(
            "no matrix in which a fault could be planted", where=root, expected="nibbles with scales, or floats"
        )
    return fit[0]


def flip_weight(folder: Path, tensor: TensorSpec) -> None:
    """Turn the sign of one weight of `tensor`, the first of the largest; in packed nibbles that is one bit."""

    def flip(entry: TensorEntry, data: np.ndarray) -> None:
        if entry.dtype in FLOATS:
            bits = data.view(FLOATS[entry.dtype])
            sign = 1 << (8 * bits.itemsize - 1)
            bits[np.argmax(bits & (sign - 1))] ^= sign
        else:
            data[np.argmax(data & LARGEST_CODE)] ^= SIGN

    _change(folder, tensor.name, flip)


def double_matrix(folder: Path, tensor: TensorSpec) -> None:
    """Make every weight twice as large, as a scale read one bit off does; `tensor` is the weights or their scales."""

    def double(entry: TensorEntry, data: np.ndarray) -> None:
        if entry.dtype in FLOATS:
            bits = data.view(FLOATS[entry.dtype])
            lowest, count = EXPONENT_BITS[entry.dtype]
            bits[(bits >> lowest) & ((1 << count) - 1) != 0] += 1 << lowest  # a zero stays one
        else:
            data += 1

    _change(folder, tensor.name, double)


def _change(folder: Path, name: str, change: Callable[[TensorEntry, np.ndarray], None]) -> None:
    """Put a copy in the place of the link to the file of `name`, and there the bytes that `change` leaves."""
    checkpoint = Checkpoint.open(folder)
    entry = checkpoint.tensor(name)
    data = np.frombuffer(checkpoint.read_bytes(name), np.uint8).copy()
    change(entry, data)
    path = folder / entry.file
    source = path.resolve()
    path.unlink()
    shutil.copyfile(source, path)
    with path.open("r+b") as file:
        file.seek(entry.begin)
        file.write(data.tobytes())
