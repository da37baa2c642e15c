"""Element types by their safetensors names, with sizes; no torch needed."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["DTYPE_BITS", "num_bytes"]

# Names as they stand in a safetensors header. F4 packs two values into a byte.
DTYPE_BITS: dict[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


def num_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a dense tensor. Raises KeyError for an unknown dtype, ValueError if the bits do not fill whole bytes."""
    bits = DTYPE_BITS[dtype] * math.prod(shape)
    if bits % 8:
        raise ValueError(f"{dtype} {list(shape)} is {bits} bits, not whole bytes")
    return bits // 8
