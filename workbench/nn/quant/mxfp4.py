"""MXFP4: 4-bit floats, two per byte, with one power-of-two scale per 32 columns.

Byte for byte the layout of the published Kimi K3 experts (compressed-tensors "mxfp4-pack-quantized"), so those pass
through unchanged. Low nibble: even column. Source: OCP Microscaling Formats specification 1.0, sections 5.2 to 6.3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.nn.quant.scheme import Buffers, scale_groups

__all__ = ["GROUP_SIZE", "MXFP4", "decode_mxfp4_reference"]

GROUP_SIZE = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1 without its sign bit, which is worth 8
CODE_VALUES = (*MAGNITUDES, *(-value for value in MAGNITUDES))
SCALE_VALUES = (*(math.ldexp(1.0, code - 127) for code in range(255)), math.nan)  # E8M0

# Halfway points of neighbouring magnitudes. A tie goes to the even code: down at 0.25, 1.25, 2.5, 5, up at the others,
# whose threshold is therefore one step lower ("greater than the float before 0.75" is "at least 0.75").
_TIES_DOWN, _TIES_UP = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)


@lru_cache(maxsize=32)
def _tables(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values of both nibbles of each byte, and (256,) scales; all exact in bf16 and wider.

    A pair of values is one integer of the same bits where there is one so wide: (256,), else (256, 2). Picking single
    numbers is several times as fast as picking rows of two.
    """
    values = [(CODE_VALUES[byte & 15], CODE_VALUES[byte >> 4]) for byte in range(256)]
    pairs = torch.tensor(values, dtype=dtype, device=device)
    as_integer = {2: torch.int32, 4: torch.int64}.get(dtype.itemsize)
    if as_integer is not None:
        pairs = pairs.view(as_integer).squeeze(1)
    return pairs, torch.tensor(SCALE_VALUES, dtype=dtype, device=device)


class MXFP4:
    """Exact to decode; encoding rounds to nearest, ties to even, and saturates at the largest magnitude."""

    name = "mxfp4"
    column_unit = GROUP_SIZE

    def buffers(self, shape: tuple[int, ...]) -> Buffers:
        *rows, columns = shape
        return {
            "weight_packed": ((*rows, columns // 2), torch.uint8),
            "weight_scale": ((*rows, -(-columns // GROUP_SIZE)), torch.uint8),
        }

    def exponents(self, weight: Tensor) -> Tensor:
        """(..., in) -> (..., ceil(in / 32)) int32: the power of two of each group's scale that `encode` takes.

        The largest magnitude of a group lands in [4, 8), the top binade of E2M1.
        """
        largest = _groups(weight).abs().amax(-1)
        # frexp gives the largest as m * 2^e, m < 1
        return torch.where(largest > 0, torch.frexp(largest).exponent - 3, 0).clamp(min=-127)

    def encode(self, weight: Tensor, exponent: Tensor | None = None) -> dict[str, Tensor]:
        """Parts of a matrix; `exponent`, in the form of `exponents`, to have other scales than those."""
        groups, columns = _groups(weight), weight.shape[-1]
        exponent = self.exponents(weight) if exponent is None else exponent
        scaled = torch.ldexp(groups, -exponent[..., None]).flatten(-2)[..., :columns]
        codes = torch.bucketize(scaled.abs(), _thresholds(weight.device)) + 8 * torch.signbit(scaled)
        low, high = codes.to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
        return {"weight_packed": low | high << 4, "weight_scale": (exponent + 127).to(torch.uint8)}

    def decode(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        packed, scale = parts["weight_packed"], parts["weight_scale"]
        pairs, scales = _tables(packed.device, dtype)
        *rows, num_bytes = packed.shape
        values = pairs.index_select(0, packed.flatten().int()).view(dtype).view(*rows, 2 * num_bytes)
        return scale_groups(values, scales[scale.int()], GROUP_SIZE)


def _groups(weight: Tensor) -> Tensor:
    """(..., in) -> (..., groups, 32) float32, a short last group filled up with zeros."""
    return F.pad(weight.to(torch.float32), (0, -weight.shape[-1] % GROUP_SIZE)).unflatten(-1, (-1, GROUP_SIZE))


@lru_cache(maxsize=8)
def _thresholds(device: torch.device) -> Tensor:
    below = torch.nextafter(torch.tensor(_TIES_UP), torch.tensor(0.0))
    return torch.cat([torch.tensor(_TIES_DOWN), below]).sort().values.to(device)


def decode_mxfp4_reference(packed: Tensor, scale: Tensor) -> Tensor:
    """(out, in / 2) and (out, in / 32) bytes -> (out, in) float64, one weight at a time."""
    num_rows, num_columns = packed.shape[0], packed.shape[1] * 2
    result = torch.empty(num_rows, num_columns, dtype=torch.float64)
    for row in range(num_rows):
        for column in range(num_columns):
            byte = int(packed[row, column // 2])
            code = byte >> 4 if column % 2 else byte & 15
            magnitude = MAGNITUDES[code & 7] * (-1.0 if code & 8 else 1.0)
            result[row, column] = magnitude * 2.0 ** (int(scale[row, column // 32]) - 127)
    return result
