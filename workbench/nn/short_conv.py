"""The short causal convolution of KDA: depthwise, over the last few tokens of the same sequence, then SiLU.

T tokens, C channels, K taps, S sequences; in float32 throughout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.nn.batch import Segments
from workbench.nn.precision import as_float

__all__ = ["ShortConv", "tail_of"]


class ShortConv(nn.Module):
    """y_t = SiLU(sum_i w_i x_(t - K + 1 + i)): the newest tap is the last one."""

    def __init__(self, width: int, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, 1, size, dtype=torch.float32))

    def forward(self, x: Tensor, segments: Segments, before: Tensor | None = None) -> Tensor:
        """(T, C) new inputs and, where sequences go on, the K - 1 inputs before them (S, C, K - 1) -> (T, C)."""
        taps = self.weight[:, 0]
        if before is None:
            return F.silu(_WholeConv.apply(as_float(x), taps, segments.reach(taps.shape[1]))).to(x.dtype)
        rows = as_float(_prepend(x, before))
        windows, _ = segments.windows(taps.shape[1])
        y = rows[windows[:, 0]] * taps[:, 0]
        for i in range(1, taps.shape[1]):
            y = torch.addcmul(y, rows[windows[:, i]], taps[:, i])
        return F.silu(y).to(x.dtype)

    def tail(self, x: Tensor, segments: Segments, before: Tensor) -> Tensor:
        """The last K - 1 inputs of every sequence (S, C, K - 1): what the next call needs as `before`."""
        return tail_of(x, segments, before)


class _WholeConv(torch.autograd.Function):
    """Sequences from their first token: shifted rows, without gathering; `reach[j - 1]` hides those of a neighbour.

    y_t = w_last x_t + sum_j w_(last - j) reach_j,t x_(t - j)
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: Tensor, reach: Tensor) -> Tensor:
        ctx.save_for_backward(x, taps, reach)
        y = x * taps[:, -1]
        for j in range(1, min(taps.shape[1], len(x))):
            y[j:].addcmul_(x[:-j] * reach[j - 1, j:], taps[:, -1 - j])
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, taps, reach = ctx.saved_tensors
        grad_x, grad_taps = grad * taps[:, -1], torch.zeros_like(taps)
        grad_taps[:, -1] = (grad * x).sum(0)
        for j in range(1, min(taps.shape[1], len(x))):
            reached = grad[j:] * reach[j - 1, j:]
            grad_x[:-j].addcmul_(reached, taps[:, -1 - j])
            grad_taps[:, -1 - j] = reached.mul_(x[:-j]).sum(0)
        return grad_x, grad_taps, None


def tail_of(x: Tensor, segments: Segments, before: Tensor) -> Tensor:
    """The last K - 1 inputs of every sequence (S, C, K - 1), from new ones (T, C) and those before (S, C, K - 1)."""
    _, tails = segments.windows(before.shape[-1] + 1)
    return _prepend(x, before)[tails].mT


def _prepend(x: Tensor, before: Tensor) -> Tensor:
    """(T, C) and (S, C, K-1) -> (S * (K-1) + T, C), the list that `Segments.windows` points into."""
    return torch.cat([before.mT.flatten(0, 1), x])
