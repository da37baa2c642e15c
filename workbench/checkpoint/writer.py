"""Writing safetensors files and their index with numpy alone; one tensor in memory at a time."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from workbench.base import CheckpointError, num_bytes
from workbench.checkpoint.index import INDEX_NAME
from workbench.spec import TensorSpec

__all__ = ["deal_per_layer", "encode_array", "shard_header", "to_bf16", "write_index", "write_shard"]

_NUMPY = {"F32": np.float32, "F16": np.float16, "U8": np.uint8}


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper half of each float, rounded to nearest, ties to even; finite input stays finite below 2**127.99."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def encode_array(values: NDArray[np.generic], dtype: str) -> bytes:
    """Bytes of an array in a storage dtype: BF16, F16, F32 from floats, U8 from bytes."""
    if dtype == "BF16":
        return to_bf16(values.astype(np.float32)).tobytes()
    return values.astype(_NUMPY[dtype]).tobytes()


def write_shard(path: Path, tensors: Iterable[TensorSpec], data: Callable[[TensorSpec], bytes]) -> int:
    """Write one file in the order given, asking `data` for each tensor's bytes in turn. Returns bytes of tensor data.

    Raises CheckpointError where `data` returns another number of bytes than dtype and shape need.
    """
    tensors = list(tensors)
    with path.open("wb") as file:
        file.write(shard_header(tensors))
        for tensor in tensors:
            piece = data(tensor)
            if len(piece) != tensor.num_bytes:
                raise CheckpointError(
                    f"{tensor.name}: wrong number of bytes", where=path, found=len(piece), expected=tensor.num_bytes
                )
            file.write(piece)
    return sum(tensor.num_bytes for tensor in tensors)


def shard_header(tensors: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None) -> bytes:
    """What stands before the data of a file that holds `tensors` in the order given: length and JSON."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for tensor in tensors:
        end = offset + num_bytes(tensor.dtype, tensor.shape)
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data begins 8-byte aligned, as the safetensors library writes it
    return struct.pack("<Q", len(text)) + text


def deal_per_layer(tensors: Iterable[TensorSpec], num_files: int | None = None) -> list[list[TensorSpec]]:
    """Tensors by file as K3 is published: a file per layer, then vocabulary and final norms, projector, tower.

    `num_files` joins neighbours to fewer files.
    """
    groups: dict[object, list[TensorSpec]] = {}
    for tensor in tensors:
        key = tensor.role if tensor.role in ("projector", "vision") else "edge"
        groups.setdefault(key if tensor.layer is None else tensor.layer, []).append(tensor)
    ordered = list(groups.values())
    count = len(ordered) if num_files is None else min(num_files, len(ordered))
    joined: list[list[TensorSpec]] = [[] for _ in range(count)]
    for position, group in enumerate(ordered):
        joined[position * count // len(ordered)].extend(group)
    return joined


def write_index(root: Path, files: Mapping[str, str], total_size: int) -> Path:
    """`model.safetensors.index.json` from tensor name -> file name."""
    path = root / INDEX_NAME
    record = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(files.items()))}
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path
