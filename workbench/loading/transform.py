"""What happens to a tensor between the file and the model: copied, cast, expanded, encoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from workbench.nn.quant import AWQ, GPTQ, NVFP4, SCHEMES, Decoder, FP8Tiles, PackedInt4, Scheme
from workbench.nn.quant.int4 import GROUP_SIZE as INT4_GROUP_SIZE
from workbench.spec.storage import SchemeName

__all__ = ["DTYPES", "StoredForm", "Transform", "choose_transform"]

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

STORED_AS_HELD = ("", "mxfp4")  # plain tensors, and the scheme whose parts have our own names and shapes

# Temporary bytes per weight, at most, while rows are expanded (codes as indices, then values before and after scaling)
# and while they are encoded (groups, magnitudes, scaled values, 64-bit bucket numbers of MXFP4).
EXPAND_BYTES, ENCODE_BYTES = 14, 36
WITH_ZERO_POINTS, ZERO_POINT_BYTES = ("int4_awq", "int4_gptq"), 14  # a zero point and a scale for each weight


@dataclass(frozen=True, slots=True)
class StoredForm:
    """The pieces of one matrix or vector in the files, by part, and the scheme that the config declares for them."""

    dtypes: Mapping[str, torch.dtype]
    scheme: SchemeName | None = None
    group_size: int = 1


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
        zero_points = ZERO_POINT_BYTES if self.stored in WITH_ZERO_POINTS else 0
        return (EXPAND_BYTES + zero_points if self.decode else 0) + (ENCODE_BYTES if self.encode else 0)

    @property
    def direct_targets(self) -> dict[str, str]:
        """Targets whose bytes are those of the stored part, if their dtypes agree."""
        is_plain = self.decode is None and self.encode is None and not self.twin_targets
        return self.targets if is_plain and self.stored in STORED_AS_HELD else {}

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
    stored: StoredForm,
    scheme: Scheme | None,
    prefix: str,
    own: Mapping[str, Tensor],
) -> Transform | None:
    """How `stored` parts become the tensors `own` of the module at `prefix`, held in `scheme`; None for no way.

    stored \\ held     dense           same scheme    another scheme
    plain             copy or cast    -              encode
    a scheme          expand          copy           expand and encode
    """
    if stored.scheme is None:
        if stored.dtypes.keys() != {"weight"}:
            return None
        if scheme is not None:
            return Transform(f"encode {scheme.name}", _targets(prefix, own), encode=scheme)
        ((leaf, target),) = own.items()
        found = stored.dtypes["weight"]
        name = "copy" if found == target.dtype else f"cast {_short(found)} to {_short(target.dtype)}"
        return Transform(name, {f"{prefix}.{leaf}": "weight"})
    decoder = _decoder(stored.scheme, stored)
    if decoder is None:
        return None
    if scheme is None:
        ((leaf, target),) = own.items()
        name = f"expand {stored.scheme} to {_short(target.dtype)}"
        return Transform(
            name,
            {f"{prefix}.{leaf}": "weight"},
            decode=decoder,
            dtype=target.dtype,
            stored=stored.scheme,
        )
    if scheme.name == decoder.name:
        return Transform("copy", _targets(prefix, own), stored=stored.scheme)
    name = f"expand {stored.scheme}, encode {scheme.name}"
    return Transform(name, _targets(prefix, own), decode=decoder, encode=scheme, stored=stored.scheme)


def _decoder(scheme: SchemeName, stored: StoredForm) -> Decoder | None:
    """What expands the stored parts, in our own form where a scheme of ours says the same; None for those not read."""
    group_size = stored.group_size
    if scheme == "int4_packed":
        is_own = group_size == INT4_GROUP_SIZE and stored.dtypes["weight_scale"] == torch.bfloat16
        return SCHEMES["int4"] if is_own else PackedInt4(group_size)
    decoders: dict[SchemeName, Decoder] = {
        "mxfp4": SCHEMES["mxfp4"],
        "mxfp4_blocks": SCHEMES["mxfp4"],
        "nvfp4": NVFP4(divides=False),
        "nvfp4_packed": NVFP4(divides=True),
        "fp8_tensor": SCHEMES["fp8"],
        "fp8_channel": SCHEMES["fp8"],
        "fp8_block": FP8Tiles(group_size),
        "int8_channel": SCHEMES["int8"],
        "int4_awq": AWQ(group_size),
        "int4_gptq": GPTQ(group_size),
    }
    return decoders.get(scheme)


def _own_form(scheme: str, parts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Stored parts under the names and shapes of our scheme; the bytes of codes stay as they are."""
    if scheme in ("fp8_channel", "int8_channel"):
        return {"weight_packed": parts["weight"], "weight_scale": parts["weight_scale"].squeeze(-1).float()}
    if scheme == "fp8_tensor":  # one scale for all rows, and so for each of these
        rows = parts["weight"].shape[0]
        return {"weight_packed": parts["weight"], "weight_scale": parts["weight_scale"].float().flatten().expand(rows)}
    if scheme == "mxfp4_blocks":  # 16 bytes to a block of 32 columns: the same bytes, one block behind another
        return {"weight_packed": parts["blocks"].flatten(-2), "weight_scale": parts["scales"]}
    if scheme == "int4_packed":  # eight codes to a word, lowest first, are two to a byte, lower first
        return {"weight_packed": parts["weight_packed"].view(torch.uint8), "weight_scale": parts["weight_scale"]}
    return parts


def _targets(prefix: str, own: Mapping[str, Tensor]) -> dict[str, str]:
    return {f"{prefix}.{name}": name for name in own}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
