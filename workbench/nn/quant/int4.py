"""INT4: symmetric, one bfloat16 scale per 32 columns, two codes per byte."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.nn.quant.scheme import Buffers, scale_groups

__all__ = ["INT4", "decode_int4_reference"]

GROUP_SIZE = 32
LARGEST = 7
OFFSET = 8  # a nibble holds q + 8


class INT4:
    """w[o, i] = q[o, i] * scale[o, i // 32] with q in -7..7. Low nibble: even column. The last group may be short."""

    name = "int4"
    column_unit = 2

    def buffers(self, shape: tuple[int, ...]) -> Buffers:
        *rows, columns = shape
        return {
            "weight_packed": ((*rows, columns // 2), torch.uint8),
            "weight_scale": ((*rows, -(-columns // GROUP_SIZE)), torch.bfloat16),
        }

    def encode(self, weight: Tensor) -> dict[str, Tensor]:
        values = weight.to(torch.float32)
        columns = values.shape[-1]
        groups = F.pad(values, (0, -columns % GROUP_SIZE)).unflatten(-1, (-1, GROUP_SIZE))
        # Rounded to its stored form before it divides, so that codes fit the scale that will multiply them.
        scale = (groups.abs().amax(-1) / LARGEST).to(torch.bfloat16)
        scale = torch.where(scale > 0, scale, 1.0)  # a group of zeros
        codes = (groups / scale[..., None].float()).round().clamp(-LARGEST, LARGEST) + OFFSET
        low, high = codes.to(torch.uint8).flatten(-2)[..., :columns].unflatten(-1, (-1, 2)).unbind(-1)
        return {"weight_packed": low | high << 4, "weight_scale": scale}

    def decode(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        packed = parts["weight_packed"]
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).to(torch.float32) - OFFSET
        return scale_groups(codes, parts["weight_scale"].to(torch.float32), GROUP_SIZE).to(dtype)


def decode_int4_reference(packed: Tensor, scale: Tensor) -> Tensor:
    """(out, in / 2) bytes and (out, ceil(in / 32)) -> (out, in) float64, one weight at a time."""
    num_rows, num_columns = packed.shape[0], packed.shape[1] * 2
    result = torch.empty(num_rows, num_columns, dtype=torch.float64)
    for row in range(num_rows):
        for column in range(num_columns):
            byte = int(packed[row, column // 2])
            code = byte >> 4 if column % 2 else byte & 15
            result[row, column] = (code - OFFSET) * float(scale[row, column // GROUP_SIZE])
    return result
