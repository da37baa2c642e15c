"""What happens to a tensor between the file and the model: copied, cast, expanded, encoded.

Storage that no scheme of ours has is expanded: FP8 in tiles always, MXFP4 in blocks unless it is held as MXFP4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from workbench.nn.quant import SCHEMES, FP8Tiles, Scheme
from workbench.nn.quant.scheme import Decoder

__all__ = ["DTYPES", "Transform", "choose_transform"]

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
# Parts in the file, by dtype -> the scheme of ours that means the same.
STORED_SCHEMES: dict[str, dict[str, torch.dtype]] = {
    "mxfp4": {"weight_packed": torch.uint8, "weight_scale": torch.uint8},
    "mxfp4_blocks": {"blocks": torch.uint8, "scales": torch.uint8},
    "fp8_block": {"weight": torch.float8_e4m3fn, "weight_scale_inv": torch.float32},
    "fp8": {"weight": torch.float8_e4m3fn, "weight_scale": torch.float32},
    "int8": {"weight": torch.int8, "weight_scale": torch.bfloat16},
    "int4": {"weight_packed": torch.int32, "weight_scale": torch.bfloat16},
}
OURS = {"mxfp4_blocks": "mxfp4"}  # the scheme of ours that holds the same bytes in another arrangement

# Temporary bytes per weight, at most, while rows are expanded (codes as indices, then values before and after scaling)
# and while they are encoded (groups, magnitudes, scaled values, 64-bit bucket numbers of MXFP4).
EXPAND_BYTES, ENCODE_BYTES = 14, 36
TILE_BYTES = 8  # values in float32, scaled in place, and their cast


@dataclass(frozen=True, slots=True)
class Transform:
    """`name` as the ledger shows it. `targets` are the model's tensors that are written, by the part they receive.

    decode: scheme of the stored parts that is expanded, None where the stored form is used as it is.
    encode: scheme that the result is stored in, None where it is stored as it is (and cast to the target's dtype).
    turns: which of the alternating rows a target receives, where they alternate.
    """

    name: str
    targets: dict[str, str]  # name of the tensor in the model -> part
    decode: Decoder | None = None
    encode: Scheme | None = None
    dtype: torch.dtype = torch.float32  # what `decode` yields
    stored: str = ""  # scheme of the stored parts, where they are those of one
    turns: Mapping[str, int] = field(default_factory=dict)

    @property
    def temporary_bytes(self) -> int:
        """Host bytes per weight beyond the staged bytes and the target."""
        expand = TILE_BYTES if isinstance(self.decode, FP8Tiles) else EXPAND_BYTES
        return (expand if self.decode else 0) + (ENCODE_BYTES if self.encode else 0)

    def trimmed(self) -> Transform:
        return replace(self, name=f"{self.name}, zero padding trimmed")

    def in_turns(self, others: Sequence[Transform]) -> Transform:
        """One transform for parameters whose rows alternate, this one's first; all do the same to their rows."""
        targets, turns = dict(self.targets), dict.fromkeys(self.targets, 0)
        for turn, other in enumerate(others, 1):
            assert (other.name, other.dtype) == (self.name, self.dtype)
            targets |= other.targets
            turns |= dict.fromkeys(other.targets, turn)
        return replace(self, name=f"{self.name}, rows in turns", targets=targets, turns=turns)

    def apply(self, parts: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Rows of the stored parts -> rows of each target by its name, and its plain values where they were formed."""
        values: Tensor | None = None
        parts = _own_form(self.stored, parts)
        if self.decode is not None:
            values = self.decode.decode(parts, self.dtype)
            parts = {"weight": values}
        if self.encode is not None:
            values = parts["weight"]
            parts = self.encode.encode(values)
        outputs = {target: self._own_turn(target, parts[part]) for target, part in self.targets.items()}
        if values is None:
            return outputs, {}
        return outputs, {target: self._own_turn(target, values) for target in self.targets}

    def _own_turn(self, target: str, rows: Tensor) -> Tensor:
        return rows[:, self.turns[target]] if self.turns else rows


def choose_transform(
    stored: Mapping[str, torch.dtype], scheme: Scheme | None, prefix: str, own: Mapping[str, Tensor], *, tile: int = 1
) -> Transform | None:
    """How `stored` parts (with their dtypes) become the tensors `own` of the module at `prefix`, held in `scheme`.

    `tile`: rows and columns of a tile, for storage in tiles. None where there is no way.

        stored \\ held     dense           same scheme    another scheme
        plain             copy or cast    -              encode
        a scheme          expand          copy           expand and encode
    """
    if stored.keys() in ({"weight"}, {"bias"}):
        ((part, dtype),) = stored.items()
        if scheme is not None:
            return Transform(f"encode {scheme.name}", _targets(prefix, own), encode=scheme)
        ((leaf, target),) = own.items()
        name = "copy" if dtype == target.dtype else f"cast {_short(dtype)} to {_short(target.dtype)}"
        return Transform(name, {f"{prefix}.{leaf}": part})
    stored_scheme = next((name for name, parts in STORED_SCHEMES.items() if parts == stored), None)
    if stored_scheme is None:
        return None
    same_bytes = OURS.get(stored_scheme, stored_scheme)
    decoder: Decoder = FP8Tiles(tile) if stored_scheme == "fp8_block" else SCHEMES[same_bytes]
    if scheme is None:
        ((leaf, target),) = own.items()
        name = f"expand {stored_scheme} to {_short(target.dtype)}"
        return Transform(
            name,
            {f"{prefix}.{leaf}": "weight"},
            decode=decoder,
            dtype=target.dtype,
            stored=stored_scheme,
        )
    if scheme.name == same_bytes:
        return Transform("copy", _targets(prefix, own), stored=stored_scheme)
    name = f"expand {stored_scheme}, encode {scheme.name}"
    return Transform(name, _targets(prefix, own), decode=decoder, encode=scheme, stored=stored_scheme)


def _own_form(scheme: str, parts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Stored parts under the names and shapes of our scheme; the bytes of codes stay as they are."""
    if scheme in ("fp8", "int8"):
        return {"weight_packed": parts["weight"], "weight_scale": parts["weight_scale"].squeeze(-1).float()}
    if scheme == "int4":  # eight codes to a word, lowest first, are two to a byte, lower first
        return {"weight_packed": parts["weight_packed"].view(torch.uint8), "weight_scale": parts["weight_scale"]}
    if scheme == "mxfp4_blocks":  # blocks of 16 bytes lie one behind another
        return {"weight_packed": parts["blocks"].flatten(-2), "weight_scale": parts["scales"]}
    return parts


def _targets(prefix: str, own: Mapping[str, Tensor]) -> dict[str, str]:
    return {f"{prefix}.{name}": name for name in own}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
