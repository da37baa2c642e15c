"""Numbers and matrices that native kernels are tried on, dense and packed."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.nn.native import Held
from workbench.nn.quant import SCHEMES


def draw(*shape: int, seed: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def held(rows: tuple[int, ...], dtype: torch.dtype, *, is_packed: bool, seed: int = 4) -> Held:
    values = draw(*rows, seed=seed) / rows[-1] ** 0.5
    if not is_packed:
        return values.to(dtype), None
    parts = SCHEMES["mxfp4"].encode(values)
    return parts["weight_packed"], parts["weight_scale"]
