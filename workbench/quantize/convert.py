"""A checkpoint rewritten in another precision: tensor by tensor, into a folder that appears whole or not at all.

    source file k ──▶ header of target file k ──▶ each tensor in turn: copied in blocks, or decoded, encoded, written
                                                                                      │
                       OUT.partial-… ── index, config, other files ── audit ── rename ┴─▶ OUT

Files keep their names and their order of tensors. At no time more than one matrix and the temporaries of its encoding
are held.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from workbench.base import CheckpointError, LoadError, UnsupportedModelError
from workbench.checkpoint import Checkpoint, audit
from workbench.checkpoint.header import open_regular
from workbench.checkpoint.index import find_index
from workbench.checkpoint.writer import shard_header, write_index
from workbench.nn.precision import MAP_SUFFIX, PRECISIONS
from workbench.nn.precision_map import PLAIN, PrecisionMap, is_quantisable, read_precision_map
from workbench.nn.quant import SCHEMES
from workbench.quantize.config import quantization_config
from workbench.quantize.record import QuantizedKind, QuantizeReport
from workbench.quantize.storage import column_unit, decode_stored, encode_stored, piece_shapes, shape_piece
from workbench.spec import ModelSpec, TensorSpec, module_kind, parse_config, published_tensors

__all__ = ["Progress", "quantize_checkpoint"]

BLOCK_BYTES = 16 << 20
WORKING_VALUES = 4 << 20  # weights encoded at a time: rows of a matrix, some 200 MB with all temporaries
_FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
_DTYPES = {**_FLOATS, "U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "F8_E4M3": torch.float8_e4m3fn}
Progress = Callable[[int, int, str], None]  # bytes of the source done, of all, tensor


@dataclass
class _Kind:
    scheme: str
    matrices: int = 0
    weights: int = 0
    source: int = 0
    stored: int = 0
    gap: float = 0.0
    size: float = 0.0


@dataclass
class _Work:
    """The conversion of one checkpoint: what each matrix becomes, and what was done so far."""

    checkpoint: Checkpoint
    schemes: Mapping[str, str]  # published module -> scheme, for the matrices that may be quantised
    specs: Mapping[str, TensorSpec]
    progress: Progress | None
    kinds: dict[tuple[str, str], _Kind] = field(default_factory=dict)
    done: int = 0
    peak: int = 0


def quantize_checkpoint(
    root: Path | str, out: Path | str, precision: str, *, progress: Progress | None = None
) -> QuantizeReport:
    """Write checkpoint `root` in another precision to the new folder `out`.

    `precision`: fp8, int8, int4, mxfp4, bf16, or the path of a *.json precision map. The result is audited before it
    takes its name. Raises CheckpointError where `out` exists, the disk is too small or the audit finds an error;
    UnsupportedModelError for experts that are stored fused; ConfigError for a file that is no map; LoadError for a
    precision that is none, a rule that names nothing, or a matrix whose columns do not make whole groups.
    """
    began = time.perf_counter()
    out = Path(out)
    checkpoint = Checkpoint.open(root)
    wanted = _map_of(precision)
    if out.exists() or out.is_symlink():
        raise CheckpointError("already exists", where=out, next_step="Name a new folder")
    specs = {tensor.name: tensor for tensor in published_tensors(checkpoint.spec)}
    work = _Work(checkpoint, _schemes(checkpoint.spec, specs, wanted, precision), specs, progress)
    files = {file: _targets(work, file) for file in checkpoint.headers}
    needed = sum(tensor.num_bytes for tensors in files.values() for tensor in tensors)
    partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    if needed > free:
        raise CheckpointError("no room on the disk", where=out, found=f"{free} bytes free", expected=f"{needed}")
    partial.mkdir()
    try:
        for file, tensors in files.items():
            _write_file(work, file, tensors, partial / file)
        index = {tensor.name: file for file, tensors in files.items() for tensor in tensors}
        write_index(partial, index, needed)
        _write_config(work, partial)
        _copy_others(checkpoint.root, partial)
        report = audit(partial)
        if not report.ok:
            raise CheckpointError(
                f"the converted checkpoint does not pass its audit: {report.errors[0].message}",
                where=out,
                found=f"{len(report.errors)} errors",
            )
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    kinds = tuple(_kind(name, kind) for (name, _), kind in work.kinds.items())
    return QuantizeReport(
        root=str(root),
        out=str(out),
        precision=precision,
        kinds=kinds,
        bytes_source=checkpoint.total_bytes,
        bytes_stored=needed,
        bytes_bf16=2 * sum(tensor.num_params for tensor in specs.values()),
        num_files=len(files),
        peak_bytes=work.peak,
        seconds=time.perf_counter() - began,
        audit=f"{report.num_tensors} tensors sound, {len(report.warnings)} warnings",
    )


def _map_of(precision: str) -> PrecisionMap:
    if precision.endswith(MAP_SUFFIX):
        return read_precision_map(precision)
    if precision not in PRECISIONS or precision == "fp32":
        known = [name for name in PRECISIONS if name != "fp32"]
        raise LoadError(f"cannot store precision {precision!r}", expected=f"{', '.join(known)} or a *.json map")
    return PrecisionMap.uniform(precision)


def _schemes(spec: ModelSpec, specs: Mapping[str, TensorSpec], wanted: PrecisionMap, precision: str) -> dict[str, str]:
    """Published module -> scheme name of every matrix that may be quantised."""
    if unused := wanted.unused(tensor.param for tensor in specs.values()):
        raise LoadError("rules that match no matrix of this model", where=precision, found=", ".join(unused[:5]))
    schemes = {}
    for tensor in specs.values():
        if not is_quantisable(tensor.param) or tensor.part not in ("weight", "weight_packed"):
            continue
        if tensor.num_stacked is not None or tensor.also_fills or tensor.is_transposed:
            raise UnsupportedModelError(
                "experts that are stored fused are not converted here", where=tensor.name, found=spec.family
            )
        scheme = wanted.name_of(tensor.param)
        columns = tensor.shape[-1] * (2 if tensor.part == "weight_packed" else 1)
        if scheme != PLAIN and columns % column_unit(scheme):
            raise LoadError(
                f"{columns} columns do not make whole groups of {column_unit(scheme)}",
                where=tensor.name,
                found=scheme,
                next_step="Keep this module in bf16 with a rule of a precision map",
            )
        schemes[tensor.name.rpartition(".")[0]] = scheme
    return schemes


def _targets(work: _Work, file: str) -> list[TensorSpec]:
    """The tensors of the converted `file`, in the order of the source's; pieces of a matrix are neighbours."""
    tensors: dict[str, TensorSpec] = {}
    for name, entry in work.checkpoint.headers[file].entries.items():
        if work.checkpoint.entries.get(name) != entry:
            continue  # the index does not count this copy
        spec = work.specs.get(name)
        if spec is None:
            raise CheckpointError("a tensor that the model does not have", where=file, found=name)
        module = name.rpartition(".")[0]
        scheme = work.schemes.get(module)
        if scheme is None:
            tensors[name] = dataclasses.replace(spec, shape=entry.shape, dtype=entry.dtype)
        elif spec.part in ("weight", "weight_packed"):  # where its values are is where the matrix goes
            for target in _pieces(work, module, scheme, spec):
                tensors[target.name] = target
    return list(tensors.values())


def _pieces(work: _Work, module: str, scheme: str, spec: TensorSpec) -> Iterator[TensorSpec]:
    rows, columns = _logical(spec)
    if scheme == PLAIN:
        yield dataclasses.replace(
            spec, name=f"{module}.weight", part="weight", shape=(rows, columns), dtype=work.checkpoint.spec.dtype
        )
        return
    for part, (shape, dtype) in piece_shapes(scheme, rows, columns).items():
        yield dataclasses.replace(spec, name=f"{module}.{part}", part=part, shape=shape, dtype=dtype)  # type: ignore[arg-type]


def _logical(spec: TensorSpec) -> tuple[int, int]:
    rows, columns = spec.shape
    per_element = {"U8": 2, "I32": 8}.get(spec.dtype, 1) if spec.part == "weight_packed" else 1
    return rows, columns * per_element


def _write_file(work: _Work, file: str, tensors: list[TensorSpec], path: Path) -> None:
    with path.open("wb") as target:
        target.write(shard_header(tensors))
        pieces: dict[str, Tensor] = {}
        held = ""
        for tensor in tensors:
            module, _, part = tensor.name.rpartition(".")
            scheme = work.schemes.get(module)
            if scheme is None:
                _copy(work, tensor.name, target)
                continue
            if module != held:
                pieces, held = _convert(work, module, scheme), module
            target.write(pieces.pop(part).contiguous().view(torch.uint8).flatten().numpy().data)
        target.flush()
        os.fsync(target.fileno())


def _copy(work: _Work, name: str, target: BinaryIO) -> None:
    """Bytes of a tensor as they are, a block at a time."""
    entry = work.checkpoint.tensor(name)
    fd = open_regular(work.checkpoint.root / entry.file)
    try:
        offset = entry.begin
        while offset < entry.end:
            block = os.pread(fd, min(BLOCK_BYTES, entry.end - offset), offset)
            if not block:
                raise CheckpointError(f"{name}: file ended while reading", where=work.checkpoint.root / entry.file)
            target.write(block)
            offset += len(block)
    finally:
        os.close(fd)
    kind = work.kinds.setdefault((module_kind(name.rpartition(".")[0]), PLAIN), _Kind(PLAIN))
    kind.matrices += 1
    kind.weights += work.specs[name].num_params
    kind.source += entry.num_bytes
    kind.stored += entry.num_bytes
    _report(work, entry.num_bytes, name)


def _convert(work: _Work, module: str, scheme: str) -> dict[str, Tensor]:
    """Pieces of one matrix in their target form."""
    names = [
        f"{module}.{part}" for part in ("weight", "weight_packed", "weight_scale") if f"{module}.{part}" in work.specs
    ]
    stored = {name.rpartition(".")[2]: _tensor(work, name) for name in names}
    source_scheme = _source_scheme(stored)
    rows, columns = _logical(work.specs[f"{module}.{'weight_packed' if 'weight_packed' in stored else 'weight'}"])
    num_source = sum(x.nbytes for x in stored.values())
    kind = work.kinds.setdefault((module_kind(module), scheme), _Kind(scheme))
    if source_scheme == scheme:
        pieces = stored if scheme == PLAIN else {**stored, **_shape(scheme, rows, columns)}
        if scheme == PLAIN:
            pieces = {"weight": stored["weight"].to(_FLOATS[work.checkpoint.spec.dtype])}
        gap, size = 0.0, 1.0
    else:
        pieces, gap, size = _encode_rows(stored, source_scheme, scheme, rows, columns, work)
    kind.matrices += 1
    kind.weights += rows * columns
    kind.source += num_source
    kind.stored += sum(x.nbytes for x in pieces.values())
    kind.gap += gap
    kind.size += size
    work.peak = max(work.peak, num_source + sum(x.nbytes for x in pieces.values()))
    _report(work, num_source, module)
    return pieces


def _encode_rows(
    stored: Mapping[str, Tensor], source: str, scheme: str, rows: int, columns: int, work: _Work
) -> tuple[dict[str, Tensor], float, float]:
    """Pieces, and the squared distance to the source and its square; a few rows at a time."""
    step = max(1, WORKING_VALUES // columns)
    made: dict[str, list[Tensor]] = {}
    gap = size = 0.0
    for first in range(0, rows, step):
        part = {name: x[first : first + step] for name, x in stored.items()}
        values = part["weight"].to(torch.float32) if source == PLAIN else decode_stored(source, part)
        if scheme == PLAIN:
            encoded = {"weight": values.to(_FLOATS[work.checkpoint.spec.dtype])}
            back = encoded["weight"].to(torch.float32)
        else:
            encoded = encode_stored(scheme, values)
            back = decode_stored(scheme, encoded)
        gap += (back - values).double().square().sum().item()
        size += values.double().square().sum().item()
        for name, x in encoded.items():
            made.setdefault(name, []).append(x)
    pieces = {name: torch.cat(parts) for name, parts in made.items()}
    return {**pieces, **_shape(scheme, rows, columns)}, gap, size


def _shape(scheme: str, rows: int, columns: int) -> dict[str, Tensor]:
    return {"weight_shape": shape_piece(rows, columns)} if scheme == "int4" else {}


def _source_scheme(stored: Mapping[str, Tensor]) -> str:
    """Scheme of the stored pieces, as this package writes and reads them; plain where there is only a float matrix."""
    if stored.keys() == {"weight"} and stored["weight"].dtype in _FLOATS.values():
        return PLAIN
    kind = {name: x.dtype for name, x in stored.items()}
    for scheme in SCHEMES:
        own = encode_stored(scheme, torch.ones(1, 32))
        if {name: x.dtype for name, x in own.items()} == kind:
            return scheme
    raise UnsupportedModelError("this storage cannot be converted", found={k: str(v) for k, v in kind.items()})


def _tensor(work: _Work, name: str) -> Tensor:
    entry = work.checkpoint.tensor(name)
    raw = bytearray(work.checkpoint.read_bytes(name))
    return torch.frombuffer(raw, dtype=_DTYPES[entry.dtype]).view(entry.shape)


def _report(work: _Work, num_bytes: int, name: str) -> None:
    work.done += num_bytes
    if work.progress is not None:
        work.progress(work.done, work.checkpoint.total_bytes, name)


def _write_config(work: _Work, out: Path) -> None:
    """The source's config with the block of the new storage in the place where the source has or would have it."""
    path = work.checkpoint.root / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot be read: {error}", where=path) from None
    modules = {
        tensor.name.rpartition(".")[0]: work.schemes.get(tensor.name.rpartition(".")[0], PLAIN)
        for tensor in work.specs.values()
        if len(tensor.shape) == 2 and tensor.role != "embedding" and tensor.part in ("weight", "weight_packed")
    }
    block = quantization_config(modules)
    inner = config.get("text_config")
    is_inner = isinstance(inner, dict) and "quantization_config" not in config
    place = inner if is_inner and isinstance(inner, dict) else config
    place.pop("quantization_config", None)
    if block is not None:
        place["quantization_config"] = block
    image = None
    with contextlib.suppress(OSError, ValueError):
        image = json.loads((work.checkpoint.root / "preprocessor_config.json").read_text())
    parse_config(config, image)  # what this package cannot read back is not written
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _copy_others(root: Path, out: Path) -> None:
    """Tokenizer, code and cards: every other regular file of the folder."""
    index = find_index(root)
    for path in sorted(root.iterdir()):
        is_written = path.name.endswith(".safetensors") or path == index or (out / path.name).exists()
        if path.is_file() and not is_written:
            shutil.copyfile(path, out / path.name)


def _kind(name: str, kind: _Kind) -> QuantizedKind:
    return QuantizedKind(
        kind=name,
        scheme=kind.scheme,
        num_matrices=kind.matrices,
        num_weights=kind.weights,
        bytes_source=kind.source,
        bytes_stored=kind.stored,
        relative_error=(kind.gap / kind.size) ** 0.5 if kind.size else 0.0,
    )
