"""FP8 in square tiles, as DeepSeek-V3 and others publish it: e4m3 values with one float32 scale per tile.

Read only: a tile spans rows, and what is kept in memory here is encoded row by row. Source: DeepSeek-V3,
arXiv 2412.19437, section 3.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.nn.quant.scheme import scale_groups

__all__ = ["FP8Tiles", "decode_fp8_tiles_reference"]


@dataclass(frozen=True, slots=True)
class FP8Tiles:
    """w[o, i] = value[o, i] * scale[o // size, i // size]; named inverse in the files because it undoes a division.

    Rows are decoded from the first row of a tile on; the last tiles of rows and columns may be short.
    """

    size: int
    name: str = "fp8_block"

    def decode(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        values, scale = parts["weight"].to(torch.float32), parts["weight_scale_inv"].to(torch.float32)
        rows = scale.repeat_interleave(self.size, 0)[: values.shape[0]]
        return scale_groups(values, rows, self.size).to(dtype)


def decode_fp8_tiles_reference(values: Tensor, scale: Tensor, size: int) -> Tensor:
    """(out, in) and (ceil(out / size), ceil(in / size)) -> (out, in) float64, one weight at a time."""
    result = torch.empty(values.shape, dtype=torch.float64)
    for row, line in enumerate(values.to(torch.float64).tolist()):
        for column, value in enumerate(line):
            result[row, column] = value * float(scale[row // size, column // size])
    return result
