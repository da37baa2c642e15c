"""What happens to a tensor between the file and the model: copied, cast, expanded, encoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from workbench.nn.quant import SCHEMES, Decoder, FP8Tiles, Scheme

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
    "F8_E8M0": torch.float8_e8m0fnu,
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

# Temporary bytes per weight, at most, while rows are expanded (codes as indices, then values before and after scaling)
# and while they are encoded (groups, magnitudes, scaled values, 64-bit bucket numbers of MXFP4).
EXPAND_BYTES, ENCODE_BYTES = 14, 36


@dataclass(frozen=True, slots=True)
class Transform:
    """`name` as the ledger shows it. `targets` are the model's tensors that are written, by the part they receive.

    decode: scheme of the stored parts that is expanded, None where the stored form is used as it is.
    encode: scheme that the result is stored in, None where it is stored as it is (and cast to the target's dtype).
    """

    name: str
    targets: dict[str, str]  # name of the tensor in the model -> part
    decode: Decoder | None = None
    encode: Scheme | None = None
    dtype: torch.dtype = torch.float32  # what `decode` yields
    stored: str = ""  # scheme of the stored parts, where they are those of one
    twin_targets: dict[str, str] = field(default_factory=dict)  # where rows of two parameters take turns: of the other

    @property
    def temporary_bytes(self) -> int:
        """Host bytes per weight beyond the staged bytes and the target."""
        return (EXPAND_BYTES if self.decode else 0) + (ENCODE_BYTES if self.encode else 0)

    def trimmed(self) -> Transform:
        return replace(self, name=f"{self.name}, zero padding trimmed")

    @property
    def all_targets(self) -> dict[str, str]:
        return self.targets | self.twin_targets

    def with_twin(self, prefix: str, twin_prefix: str) -> Transform:
        """The same for the even rows, and for the odd ones the same into the module at `twin_prefix`."""
        targets = {f"{twin_prefix}{name.removeprefix(prefix)}": part for name, part in self.targets.items()}
        return replace(self, name=f"{self.name}, rows in turns", twin_targets=targets)

    def apply(self, parts: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor | None]]:
        """Rows of the stored parts -> by target its rows, and the plain values where they were formed."""
        if not self.twin_targets:
            return self._apply(parts, self.targets)
        even, odd = ({name: part[:, turn] for name, part in parts.items()} for turn in (0, 1))
        return self._apply(even, self.targets) | self._apply(odd, self.twin_targets)

    def _apply(
        self, parts: Mapping[str, Tensor], targets: Mapping[str, str]
    ) -> dict[str, tuple[Tensor, Tensor | None]]:
        values = None
        parts = _own_form(self.stored, parts)
        if self.decode is not None:
            values = self.decode.decode(parts, self.dtype)
            parts = {"weight": values}
        if self.encode is not None:
            values = parts["weight"]
            parts = self.encode.encode(values)
        return {target: (parts[part], values) for target, part in targets.items()}


def choose_transform(
    stored: Mapping[str, torch.dtype],
    scheme: Scheme | None,
    prefix: str,
    own: Mapping[str, Tensor],
    *,
    tile: int = 1,
) -> Transform | None:
    """How `stored` parts (with their dtypes) become the tensors `own` of the module at `prefix`, held in `scheme`.

    `tile`: rows and columns that share a scale where the parts are tiles. None where there is no way.

        stored \\ held     dense           same scheme    another scheme
        plain             copy or cast    -              encode
        a scheme          expand          copy           expand and encode
    """
    if stored.keys() == {"weight"}:
        if scheme is not None:
            return Transform(f"encode {scheme.name}", _targets(prefix, own), encode=scheme)
        ((leaf, target),) = own.items()
        is_same = stored["weight"] == target.dtype
        name = "copy" if is_same else f"cast {_short(stored['weight'])} to {_short(target.dtype)}"
        return Transform(name, {f"{prefix}.{leaf}": "weight"})
    stored_scheme = next((name for name, parts in STORED_SCHEMES.items() if parts == stored), None)
    if stored_scheme is None:
        return None
    decoder: Decoder = _decoder(stored_scheme, tile)
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
    if scheme.name == decoder.name:
        return Transform("copy", _targets(prefix, own), stored=stored_scheme)
    name = f"expand {stored_scheme}, encode {scheme.name}"
    return Transform(name, _targets(prefix, own), decode=decoder, encode=scheme, stored=stored_scheme)


def _decoder(stored: str, tile: int) -> Decoder:
    """What expands the stored parts, in our own form; tiles are only ever expanded or encoded anew."""
    if stored == "fp8_block":
        return FP8Tiles(tile)
    return SCHEMES["mxfp4" if stored == "mxfp4_blocks" else stored]


def _own_form(scheme: str, parts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Stored parts under the names and shapes of our scheme; the bytes of codes stay as they are."""
    if scheme in ("fp8", "int8"):
        return {"weight_packed": parts["weight"], "weight_scale": parts["weight_scale"].squeeze(-1).float()}
    if scheme == "mxfp4_blocks":  # 16 bytes to a block of 32 columns: the same bytes, one block behind another
        return {"weight_packed": parts["blocks"].flatten(-2), "weight_scale": parts["scales"]}
    if scheme == "int4":  # eight codes to a word, lowest first, are two to a byte, lower first
        return {"weight_packed": parts["weight_packed"].view(torch.uint8), "weight_scale": parts["weight_scale"]}
    return parts


def _targets(prefix: str, own: Mapping[str, Tensor]) -> dict[str, str]:
    return {f"{prefix}.{name}": name for name in own}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
