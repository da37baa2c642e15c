"""What happens to checkpoints on their way: one fault each, planted in a folder of links to a sound one.

Three kinds are told by the files alone. Values that are wrong and well-formed agree with themselves, so that a second
copy, known to be right, has to be asked: `needs_published`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from workbench.checkpoint import Checkpoint
from workbench.checkpoint.header import read_header
from workbench.checkpoint.index import find_index
from workbench.day0.faults.files import choose_matrix, tear_shard
from workbench.spec import TensorSpec, published_tensors

__all__ = ["CHECKPOINT_FAULTS", "CheckpointFault", "Planted"]

Stored = tuple[str, tuple[int, ...], bytes]  # dtype, shape, data


@dataclass(frozen=True, kw_only=True, slots=True)
class Planted:
    """What was done, and the words by which the cause in the report must name it."""

    what: str
    words: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFault:
    """`plant` changes a folder of links; it returns None where this checkpoint has nothing to do it to. `gates` are
    those of which the report's verdict must name one."""

    name: str
    gates: tuple[str, ...]
    plant: Callable[[Path], Planted | None]
    needs_published: bool = False


def _missing_shard(folder: Path) -> Planted:
    shards = sorted(folder.glob("*.safetensors"))
    shard = shards[len(shards) // 2]
    shard.unlink()
    return Planted(what=f"{shard.name} never arrived", words=("missing_shard", shard.name))


def _torn_shard(folder: Path) -> Planted:
    shard = tear_shard(folder)
    return Planted(what=f"the end of {shard} is cut off", words=("torn", shard))


def _missing_scale(folder: Path) -> Planted | None:
    scale = choose_matrix(folder, "weight_scale")
    if scale.part != "weight_scale":
        return None
    file = Checkpoint.open(folder).tensor(scale.name).file
    _rewrite(folder, file, lambda tensors: tensors.pop(scale.name))
    _rewrite_index(folder, lambda files: files.pop(scale.name))
    return Planted(what=f"{scale.name} was left out", words=("unpaired", file, scale.name))


def _wrong_dtype(folder: Path) -> Planted:
    tensor = next(_plain_matrices(folder))
    other = "F16" if tensor.dtype == "BF16" else "BF16"

    def rename(tensors: dict[str, Stored]) -> None:
        _, shape, data = tensors[tensor.name]
        tensors[tensor.name] = (other, shape, data)

    file = _file_of(folder, tensor.name)
    _rewrite(folder, file, rename)
    what = f"{tensor.name} says {other} where the model is {tensor.dtype}"
    return Planted(what=what, words=("wrong_dtype", file, tensor.name, other))


def _transposed(folder: Path) -> Planted:
    """A matrix whose sides differ, so that its shape gives it away."""
    tensor = next(x for x in _plain_matrices(folder) if x.shape[0] != x.shape[1])
    file = _file_of(folder, tensor.name)
    _rewrite(folder, file, lambda tensors: tensors.update({tensor.name: _turned(tensors[tensor.name])}))
    return Planted(what=f"{tensor.name} is stored transposed", words=("transposed", file, tensor.name))


def _zeroed_bias(folder: Path) -> Planted | None:
    """The correction bias of one router among many."""
    stored = Checkpoint.open(folder).entries
    biases = [x for x in _tensors(folder) if x.role == "router" and len(x.shape) == 1]
    if len(biases) < 2 or any(not any(Checkpoint.open(folder).read_bytes(x.name)) for x in biases):
        return None  # an untrained one: nothing tells a zero from the others
    tensor = biases[len(biases) // 2]
    file = stored[tensor.name].file

    def zero(tensors: dict[str, Stored]) -> None:
        dtype, shape, data = tensors[tensor.name]
        tensors[tensor.name] = (dtype, shape, bytes(len(data)))

    _rewrite(folder, file, zero)
    return Planted(what=f"{tensor.name} is all zeros", words=("zero_tensor", file, tensor.name, "other layers"))


def _transposed_square(folder: Path) -> Planted | None:
    """A matrix of equal sides in a layer: no header can tell."""
    tensor = next((x for x in _plain_matrices(folder) if x.shape[0] == x.shape[1]), None)
    if tensor is None:
        return None
    file = _file_of(folder, tensor.name)
    _rewrite(folder, file, lambda tensors: tensors.update({tensor.name: _turned(tensors[tensor.name])}))
    what = f"{tensor.name}, a square one, is stored transposed"
    return Planted(what=what, words=(f"layer {tensor.layer}", "transpose", file, tensor.name))


def _swapped_gate_and_up(folder: Path) -> Planted | None:
    """Gate and up of all routed experts of one layer, by their published names w1 and w3."""
    layer = Checkpoint.open(folder).spec.num_layers // 2
    gates = [x for x in _tensors(folder) if x.layer == layer and x.role == "routed_expert" and ".w1." in x.name]
    if not gates:
        return None
    pairs = [(x.name, x.name.replace(".w1.", ".w3.")) for x in gates]
    file = _file_of(folder, gates[0].name)

    def swap(tensors: dict[str, Stored]) -> None:
        for one, other in pairs:
            if one in tensors and other in tensors:
                tensors[one], tensors[other] = tensors[other], tensors[one]

    for each in dict.fromkeys(_file_of(folder, name) for name, _ in pairs):
        _rewrite(folder, each, swap)
    what = f"gate and up of the routed experts of layer {layer} are exchanged"
    return Planted(what=what, words=(f"layer {layer}", "gate and up exchanged", file, *pairs[0]))


def _doubled_scales(folder: Path) -> Planted | None:
    """Scale bytes of all routed experts of one layer one too high."""
    layer = Checkpoint.open(folder).spec.num_layers // 2 + 1
    scales = [
        x
        for x in _tensors(folder)
        if x.layer == layer and x.role == "routed_expert" and x.part == "weight_scale" and x.dtype == "U8"
    ]
    if not scales:
        return None
    names = {x.name for x in scales}

    def raise_all(tensors: dict[str, Stored]) -> None:
        for name in names & tensors.keys():
            dtype, shape, data = tensors[name]
            tensors[name] = (dtype, shape, (np.frombuffer(data, np.uint8) + 1).astype(np.uint8).tobytes())

    for file in dict.fromkeys(_file_of(folder, name) for name in names):
        _rewrite(folder, file, raise_all)
    what = f"scales of the routed experts of layer {layer} are a power of two too large"
    return Planted(what=what, words=(f"layer {layer}", "off by one power of two", _file_of(folder, scales[0].name)))


AUDIT, PARITY = ("checkpoint.audit",), ("parity.fp32", "parity.serving")
CHECKPOINT_FAULTS = (
    CheckpointFault(name="missing-shard", gates=AUDIT, plant=_missing_shard),
    CheckpointFault(name="torn-shard", gates=AUDIT, plant=_torn_shard),
    CheckpointFault(name="missing-scale", gates=AUDIT, plant=_missing_scale),
    CheckpointFault(name="wrong-dtype", gates=AUDIT, plant=_wrong_dtype),
    CheckpointFault(name="transposed-matrix", gates=AUDIT, plant=_transposed),
    CheckpointFault(name="zeroed-router-bias", gates=AUDIT, plant=_zeroed_bias),
    CheckpointFault(name="transposed-square", gates=PARITY, plant=_transposed_square, needs_published=True),
    CheckpointFault(name="swapped-gate-and-up", gates=PARITY, plant=_swapped_gate_and_up, needs_published=True),
    CheckpointFault(name="doubled-scales", gates=PARITY, plant=_doubled_scales, needs_published=True),
)


def _tensors(folder: Path) -> list[TensorSpec]:
    checkpoint = Checkpoint.open(folder)
    return [x for x in published_tensors(checkpoint.spec) if x.name in checkpoint.entries]


def _plain_matrices(folder: Path) -> Iterator[TensorSpec]:
    """Matrices of layers that are stored as 16-bit floats."""
    for tensor in _tensors(folder):
        is_plain = tensor.part == "weight" and len(tensor.shape) == 2 and min(tensor.shape) > 1
        if tensor.layer is not None and is_plain and tensor.dtype in ("BF16", "F16"):
            yield tensor


def _file_of(folder: Path, name: str) -> str:
    return Checkpoint.open(folder).tensor(name).file


def _turned(stored: Stored) -> Stored:
    dtype, (rows, columns), data = stored
    values = np.frombuffer(data, np.dtype(f"V{len(data) // (rows * columns)}")).reshape(rows, columns)
    return dtype, (columns, rows), np.ascontiguousarray(values.T).tobytes()


def _rewrite(folder: Path, file: str, change: Callable[[dict[str, Stored]], object]) -> None:
    """Put a file of its own in the place of a link, with what `change` leaves of its tensors."""
    path = folder / file
    header, raw = read_header(path), path.read_bytes()
    tensors: dict[str, Stored] = {
        entry.name: (entry.dtype, tuple(entry.shape), raw[entry.begin : entry.end]) for entry in header.entries.values()
    }
    change(tensors)
    record: dict[str, object] = {"__metadata__": dict(header.metadata)} if header.metadata else {}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        record[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(record).encode()
    text += b" " * (-len(text) % 8)
    path.unlink()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values()))


def _rewrite_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    path = find_index(folder)
    if path is None:
        return
    record = json.loads(path.read_text(encoding="utf-8"))
    change(record["weight_map"])
    path.unlink()
    path.write_text(json.dumps(record), encoding="utf-8")
