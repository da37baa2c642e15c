"""NVFP4: 4-bit floats, two per byte, an e4m3 scale per 16 columns, and one float32 scale for the matrix. Read only.

Two producers store the float32 scale as each other's inverse, under names of their own: modelopt multiplies by
`weight_scale_2`, compressed-tensors divides by `weight_global_scale`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.nn.quant.mxfp4 import CODE_VALUES
from workbench.nn.quant.scheme import scale_groups

__all__ = ["NVFP4"]

GROUP_SIZE = 16


@dataclass(frozen=True, slots=True)
class NVFP4:
    """w[o, i] = E2M1(code[o, i]) * scale[o, i // 16] * factor, or / factor where it `divides`.

    Parts: weight or weight_packed (out, in / 2) bytes, low nibble the even column; weight_scale (out, ceil(in / 16))
    float8_e4m3fn; weight_scale_2 or weight_global_scale one float32.
    """

    divides: bool

    @property
    def name(self) -> str:
        return "nvfp4_packed" if self.divides else "nvfp4"

    def decode(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        packed = parts["weight_packed" if self.divides else "weight"]
        values = torch.tensor(CODE_VALUES, device=packed.device)
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
        scale = parts["weight_scale"].float()
        factor = parts["weight_global_scale" if self.divides else "weight_scale_2"]
        scale = scale / factor if self.divides else scale * factor
        return scale_groups(values[codes.int()], scale, GROUP_SIZE).to(dtype)
