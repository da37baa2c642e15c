"""Products of matrices and attention in the arithmetic that the processor has.

torch multiplies bf16 matrices on a CPU without units for them in a plain loop: 5 to 50 times slower than fp32 (torch
2.13 on an AVX2 machine, 64 and 1000 rows). There, factors are widened, multiplied in fp32 and the result is rounded
once, which is what the units would do. Elsewhere this is torch's own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["attention", "cpu_multiplies_bf16", "linear"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: (..., in), (out, in), (out,) -> (..., out), all of one dtype."""
    if _is_widened(x):
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
    return F.linear(x, weight, bias)


def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """torch's `scaled_dot_product_attention`: (..., L, width) queries, (..., S, width) keys and values."""
    if _is_widened(q):
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), **options).to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, **options)


def _is_widened(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and not cpu_multiplies_bf16()


@cache
def cpu_multiplies_bf16() -> bool:
    """Whether torch has more than a plain loop for bf16 matrices on this CPU."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
