"""INT8: symmetric, one float32 scale per output channel."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from workbench.nn.quant.scheme import Buffers

__all__ = ["INT8", "decode_int8_reference"]

LARGEST = 127


class INT8:
    """w[o, i] = q[o, i] * scale[o] with q in -127..127; the largest magnitude of a row becomes 127."""

    name = "int8"
    column_unit = 1

    def buffers(self, shape: tuple[int, ...]) -> Buffers:
        return {"weight_packed": (shape, torch.int8), "weight_scale": (shape[:-1], torch.float32)}

    def encode(self, weight: Tensor) -> dict[str, Tensor]:
        values = weight.to(torch.float32)
        scale = values.abs().amax(-1) / LARGEST
        scale = torch.where(scale > 0, scale, 1.0)  # a row of zeros
        codes = (values / scale[..., None]).round().clamp(-LARGEST, LARGEST)
        return {"weight_packed": codes.to(torch.int8), "weight_scale": scale}

    def decode(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return (parts["weight_packed"].to(torch.float32) * parts["weight_scale"][..., None]).to(dtype)


def decode_int8_reference(packed: Tensor, scale: Tensor) -> Tensor:
    """(out, in) and (out,) -> (out, in) float64, one weight at a time, from two's complement bytes."""
    result = torch.empty(packed.shape, dtype=torch.float64)
    for row, line in enumerate(packed.view(torch.uint8).tolist()):
        for column, byte in enumerate(line):
            result[row, column] = (byte - 256 if byte > 127 else byte) * float(scale[row])
    return result
