"""FP8: e4m3 values with one float32 scale per output channel."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from workbench.nn.quant.scheme import Buffers

__all__ = ["FP8", "decode_fp8_reference"]

LARGEST = 448.0  # of float8_e4m3fn


class FP8:
    """w[o, i] = value[o, i] * scale[o]; the largest magnitude of a row becomes 448."""

    name = "fp8"
    column_unit = 1

    def buffers(self, shape: tuple[int, ...]) -> Buffers:
        return {"weight_packed": (shape, torch.float8_e4m3fn), "weight_scale": (shape[:-1], torch.float32)}

    def encode(self, weight: Tensor) -> dict[str, Tensor]:
        values = weight.to(torch.float32)
        scale = values.abs().amax(-1) / LARGEST
        scale = torch.where(scale > 0, scale, 1.0)  # a row of zeros
        # The quotient may exceed 448 by a rounding error, which the cast would turn into NaN.
        scaled = (values / scale[..., None]).clamp(-LARGEST, LARGEST)
        return {"weight_packed": scaled.to(torch.float8_e4m3fn), "weight_scale": scale}

    def decode(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return (parts["weight_packed"].to(torch.float32) * parts["weight_scale"][..., None]).to(dtype)


def decode_fp8_reference(packed: Tensor, scale: Tensor) -> Tensor:
    """(out, in) and (out,) -> (out, in) float64, from the bits: a sign, 4 of exponent (bias 7), 3 of mantissa."""
    result = torch.empty(packed.shape, dtype=torch.float64)
    for row, line in enumerate(packed.view(torch.uint8).tolist()):
        for column, byte in enumerate(line):
            exponent, mantissa = byte >> 3 & 15, byte & 7
            magnitude = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
            result[row, column] = (-magnitude if byte >> 7 else magnitude) * float(scale[row])
    return result
