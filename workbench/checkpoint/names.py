"""Tensor names and headers against the model: is every tensor here that it needs, and is each what it needs?

Only the spec's own list is believed. A name is never repaired, split or guessed at: one that is not on the list is
reported, with what it looks like.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace

from workbench.checkpoint.findings import Finding
from workbench.checkpoint.header import TensorEntry
from workbench.spec import ModelSpec, TensorSpec, draft_tensors, module_kind, published_tensors

__all__ = ["NameMatch", "as_stored", "check_pairs", "check_tensors", "fits", "match_names", "name_findings"]

_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")
# Parts that only a multi-token-prediction layer has, in the spelling of the DeepSeek family and its heirs.
_MTP = re.compile(r"(?:^|\.)(?:mtp\w*|enorm|hnorm|eh_proj|shared_head)(?:\.|$)")
_STACKED = re.compile(r"\.experts\.(?!\d)")
_ALSO_AS = {"F32": ("BF16", "F16"), "BF16": ("F32", "F16"), "I32": ("I64",)}
_PAIRS = (("weight_packed", "weight_scale"), ("weight", "weight_scale_inv"), ("weight", "weight_scale"))
MAX_PADDING = 4096  # zeros behind the used entries; K3 has 32, more than this is another kind of tensor
_HINT_UNKNOWN, _HINT_MISSING = 20, 2000  # closest names are searched only where that is quick


@dataclass(frozen=True, kw_only=True, slots=True)
class NameMatch:
    """Names of a checkpoint sorted by what the model makes of them.

    `mtp` and `beyond` hold names of layers after the last one, by layer number (-1 where the name has none): draft
    layers that say so themselves, and layers that look like ordinary ones. `stacked` are experts stored as one tensor
    where the model has them apart. `draft` are names of the draft layers that the config announces.
    """

    expected: Mapping[str, TensorSpec]
    num_matched: int
    missing: tuple[str, ...]
    unknown: tuple[str, ...]
    mtp: Mapping[int, tuple[str, ...]]
    beyond: Mapping[int, tuple[str, ...]]
    stacked: tuple[str, ...]
    draft: tuple[str, ...] = ()

    @property
    def is_bijection(self) -> bool:
        """Every name is a tensor of the model and every tensor of the model is named."""
        return not (self.missing or self.unknown or self.mtp or self.beyond or self.stacked)


def match_names(spec: ModelSpec, names: Collection[str]) -> NameMatch:
    """Sort `names` against the published tensors of a model. About two seconds for half a million."""
    announced = {tensor.name for tensor in draft_tensors(spec)}
    expected = {tensor.name: tensor for tensor in published_tensors(spec)}
    held = names if isinstance(names, (Mapping, Set)) else frozenset(names)
    unknown, stacked, draft = [], [], []
    extra_layers: dict[int, list[str]] = {}
    for name in names:
        if name in expected:
            continue
        if name in announced:
            draft.append(name)
            continue
        layer = _LAYER.search(name)
        if layer is not None and int(layer[1]) >= spec.num_layers:
            extra_layers.setdefault(int(layer[1]), []).append(name)
        elif layer is None and _MTP.search(name):
            extra_layers.setdefault(-1, []).append(name)
        elif _STACKED.search(name):
            stacked.append(name)
        else:
            unknown.append(name)
    is_mtp = {idx: any(_MTP.search(name) for name in group) for idx, group in extra_layers.items()}
    return NameMatch(
        expected=expected,
        num_matched=sum(name in held for name in expected),
        missing=tuple(name for name in expected if name not in held),
        unknown=tuple(unknown),
        mtp={idx: tuple(group) for idx, group in extra_layers.items() if is_mtp[idx]},
        beyond={idx: tuple(group) for idx, group in extra_layers.items() if not is_mtp[idx]},
        stacked=tuple(stacked),
        draft=tuple(draft),
    )


def name_findings(
    spec: ModelSpec, match: NameMatch, files: Mapping[str, str], explained: Collection[str]
) -> Iterator[Finding]:
    """Findings of a name match. `files` gives the file of a name where known; names in `explained` are not repeated."""
    for name in match.missing:
        if name not in explained:
            tensor = match.expected[name]
            message = f"the model needs it and no file holds it; {tensor.param} would stay empty"
            yield Finding(kind="missing_tensor", severity="error", tensors=(name,), message=message)
    unknown = [name for name in match.unknown if name not in explained]
    for name in unknown:
        message = "the model has no place for it" + _hint(name, unknown, match.missing)
        yield Finding(kind="unknown_tensor", severity="error", file=files.get(name), tensors=(name,), message=message)
    for idx, group in match.mtp.items():
        what = f"layer {idx}, after the last of {spec.num_layers}," if idx >= 0 else "this group"
        message = f"{what} is a multi-token-prediction layer; the config announces none and it is not loaded"
        yield Finding(kind="mtp_layer", severity="warning", file=files.get(group[0]), tensors=group, message=message)
    if match.draft:
        assert spec.draft is not None
        message = f"{spec.draft.num_layers} announced multi-token-prediction layers; kept apart and not loaded"
        yield Finding(
            kind="mtp_layer", severity="info", file=files.get(match.draft[0]), tensors=match.draft, message=message
        )
    for idx, group in match.beyond.items():
        message = (
            f"the config has {spec.num_layers} layers (0..{spec.num_layers - 1}) and this is layer {idx}; "
            "either the config is too short or this is a draft layer of an unknown form"
        )
        yield Finding(
            kind="layer_beyond_last", severity="error", file=files.get(group[0]), tensors=group, message=message
        )
    if match.stacked:
        message = (
            "experts are stored as one stacked tensor; this family publishes one tensor per expert and matrix, and a "
            "stacked one leaves the order of gate and up and the orientation to guesswork"
        )
        yield Finding(
            kind="stacked_experts",
            severity="error",
            file=files.get(match.stacked[0]),
            tensors=match.stacked,
            message=message,
        )


def check_pairs(entries: Mapping[str, TensorEntry], names: Collection[str]) -> Iterator[Finding]:
    """Packed or 8-bit matrices without a scale, and scales without a matrix; by names alone, whatever the model.

    `names` are all names the checkpoint claims, `entries` those whose dtype is known.
    """
    for name in names:
        module, _, part = name.rpartition(".")
        file = entries[name].file if name in entries else None
        if part == "weight_packed":
            if f"{module}.weight_scale" not in names:
                message = f"packed codes without their {module}.weight_scale"
                yield Finding(kind="unpaired", severity="error", file=file, tensors=(name,), message=message)
        elif part == "weight":
            is_fp8 = name in entries and entries[name].dtype.startswith("F8")
            if is_fp8 and not any(f"{module}.{scale}" in names for matrix, scale in _PAIRS if matrix == part):
                message = f"{entries[name].dtype} matrix without a scale"
                yield Finding(kind="unpaired", severity="error", file=file, tensors=(name,), message=message)
        elif part in ("weight_scale", "weight_scale_inv") and not any(
            f"{module}.{matrix}" in names for matrix, scale in _PAIRS if scale == part
        ):
            message = f"scale without its matrix: neither {module}.weight_packed nor {module}.weight is here"
            yield Finding(kind="unpaired", severity="error", file=file, tensors=(name,), message=message)


def check_tensors(
    spec: ModelSpec, expected: Mapping[str, TensorSpec], entries: Iterable[TensorEntry]
) -> Iterator[Finding]:
    """Dtype, shape and orientation of every stored tensor that the model knows."""
    square: dict[str, list[str]] = {}
    for entry in entries:
        want = expected.get(entry.name)
        if want is None:
            continue
        want = as_stored(entry, want)
        if entry.dtype != want.dtype:
            yield _refused("wrong_dtype", spec, entry, want, f"stored as {entry.dtype}")
        if not fits(entry, want):
            if entry.shape in _turned(spec, want):
                yield _refused("transposed", spec, entry, want, f"{list(entry.shape)} is the transpose")
            else:
                yield _refused("wrong_shape", spec, entry, want, f"shape {list(entry.shape)}")
        elif entry.shape in _turned(spec, want):
            square.setdefault(module_kind(entry.name), []).append(entry.name)
    for kind, names in square.items():
        message = (
            f"{kind} ({len(names)}) has the same shape transposed: only a comparison of outputs with a "
            "reference can tell which way round they are stored"
        )
        yield Finding(kind="square", severity="info", tensors=tuple(names), message=message)


def as_stored(entry: TensorEntry, want: TensorSpec) -> TensorSpec:
    """`want` as this header has it, where publishers differ and the header says all there is to know: the float type of
    scales, the integer type of a shape written down, and a single number with or without a dimension of one."""
    if want.scheme is None:
        return want
    dtypes = _ALSO_AS.get(want.dtype, ()) if want.part in ("weight_scale", "weight_shape") else ()
    is_number = math.prod(want.shape) == 1 and entry.shape in ((), (1,)) and len(want.shape) < 2
    return replace(
        want,
        dtype=entry.dtype if entry.dtype in dtypes else want.dtype,
        shape=entry.shape if is_number else want.shape,
    )


def fits(entry: TensorEntry, want: TensorSpec) -> bool:
    if want.used_rows is None:
        return entry.shape == want.shape
    # Stored longer than used: the header has the last word on the length, the spec on what is used.
    return (
        len(entry.shape) == len(want.shape) and entry.shape[0] >= want.used_rows and entry.shape[1:] == want.shape[1:]
    )


def _turned(spec: ModelSpec, want: TensorSpec) -> tuple[tuple[int, ...], ...]:
    """Shapes that this tensor would have if the matrix behind it had been stored transposed."""
    if len(want.shape) < 2:
        return ()
    if want.part == "weight" and not want.is_quantised:
        return (want.shape[::-1],) if want.num_stacked is None else ((want.shape[0], *want.shape[:0:-1]),)
    if want.part not in ("weight_packed", "weight_scale") or len(want.shape) != 2 or want.dtype != "U8":
        return ()
    rows, columns = want.shape
    unit = 2 if want.part == "weight_packed" or spec.quant is None else spec.quant.group_size
    # The stored array turned, and the logical matrix turned before it was packed along its columns.
    return ((columns, rows), (columns * unit, rows // unit))


def _refused(kind: str, spec: ModelSpec, entry: TensorEntry, want: TensorSpec, found: str) -> Finding:
    assert kind in ("wrong_dtype", "wrong_shape", "transposed")
    return Finding(
        kind=kind,  # type: ignore[arg-type]
        severity="error",
        file=entry.file,
        tensors=(entry.name,),
        message=f"{found}, expected {want.dtype} {list(want.shape)} (rule: {_rule(spec, want)})",
    )


def _rule(spec: ModelSpec, want: TensorSpec) -> str:
    place = f"fills {want.param}" + (f", expert {want.expert}" if want.expert is not None else "")
    if want.part == "weight_packed" and want.dtype == "U8":
        return f"{place}, two 4-bit codes per byte along columns"
    if want.part == "weight_scale" and want.dtype == "U8":
        group = spec.quant.group_size if spec.quant else 0
        return f"{place}, one exponent byte per {group} columns, value 2**(byte - 127)"
    if want.used_rows is not None:
        return f"{place}, at least {want.used_rows} entries, the rest zero"
    if want.is_quantised:
        return f"{place}, {want.part} of a quantised matrix"
    return f"{place}, role {want.role}"


def _hint(name: str, unknown: list[str], missing: tuple[str, ...]) -> str:
    if len(unknown) > _HINT_UNKNOWN or len(missing) > _HINT_MISSING:
        return ""
    close = difflib.get_close_matches(name, missing, n=1, cutoff=0.8)
    return f"; is it {close[0]}, which is missing?" if close else ""
