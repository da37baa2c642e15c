"""Root-mean-square norms. The mean of squares is taken in float32; where the weight joins in differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from workbench.nn import native
from workbench.nn.precision import as_float
from workbench.nn.tensor_parallel import LOCAL, TensorParallel

__all__ = ["AcrossHeadsRMSNorm", "GatedRMSNorm", "HeadRMSNorm", "RMSNorm", "norm_of", "normalise", "unit_length"]


def normalise(x: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) over the last dimension, in float32."""
    return _Normalise.apply(as_float(x), eps)


def unit_length(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension: on the mean, eps would weigh D times as much."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


class _Normalise(torch.autograd.Function):
    """y = r x with r = (mean(x^2) + eps)^-1/2; the gradient of x is r (g - y mean(g y)), in few passes over memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        scale = (torch.linalg.vecdot(x, x)[..., None] / x.shape[-1]).add_(eps).rsqrt_()
        y = x * scale
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        y, scale = ctx.saved_tensors
        along = torch.linalg.vecdot(grad, y)[..., None] / y.shape[-1]
        return torch.addcmul(grad, y, along, value=-1).mul_(scale), None


class RMSNorm(nn.Module):
    """y = weight * cast(normalised x): rounded to the dtype of `x` before the weight multiplies.

    Where the files hold the weight's difference from an `offset`, y = cast((offset + weight) * normalised x): the sum
    needs more digits than a weight near zero is stored in.
    """

    def __init__(self, dim: int, eps: float, dtype: torch.dtype = torch.float32, *, offset: float = 0.0):
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.empty(dim, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self._weighted(x, self.weight)

    def _weighted(self, x: Tensor, weight: Tensor) -> Tensor:
        if (y := native.rms_norm(x, weight, self.eps, self.offset)) is not None:
            return y
        normed = normalise(x, self.eps)
        if self.offset:
            return (normed * (as_float(weight) + self.offset)).to(x.dtype)
        return weight * normed.to(x.dtype)


def norm_of(kind: str, dim: int, eps: float, dtype: torch.dtype) -> RMSNorm | nn.LayerNorm:
    """A norm as a spec calls it: "rms" or "layer"."""
    return RMSNorm(dim, eps, dtype) if kind == "rms" else nn.LayerNorm(dim, eps, dtype=dtype)


class GatedRMSNorm(nn.Module):
    """y = weight * normalised x * activation(gate), all in float32 and rounded once to the dtype of `gate`.

    One weight serves every head, so under tensor parallelism its gradient is the sum over the ranks' heads.
    """

    def __init__(self, dim: int, eps: float, activation: Callable[[Tensor], Tensor] = torch.sigmoid):
        super().__init__()
        self.eps, self.activation = eps, activation
        self.weight = nn.Parameter(torch.empty(dim, dtype=torch.float32))
        self.tp: TensorParallel = LOCAL

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """(T, H, D), (T, H, D) -> (T, H, D)."""
        return (self.tp.enter(self.weight) * normalise(x, self.eps) * self.activation(as_float(gate))).to(gate.dtype)


class HeadRMSNorm(RMSNorm):
    """`RMSNorm` of each head for itself, (T, H, W) -> (T, H, W), by one weight that all heads share.

    Under tensor parallelism its gradient is the sum over the ranks' heads.
    """

    def __init__(self, dim: int, eps: float, dtype: torch.dtype = torch.float32, *, offset: float = 0.0):
        super().__init__(dim, eps, dtype, offset=offset)
        self.tp: TensorParallel = LOCAL

    def forward(self, x: Tensor) -> Tensor:
        return self._weighted(x, self.tp.enter(self.weight))


class AcrossHeadsRMSNorm(nn.Module):
    """One norm over all heads of all tensor-parallel ranks together: (T, H, W) -> (T, H, W), weight (H * W,).

    The mean of squares is summed over the ranks. Heads that several ranks share count as often on each of them, so the
    mean over what all ranks hold is that over the distinct heads.
    """

    def __init__(self, num_heads: int, dim: int, eps: float, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(num_heads * dim, dtype=dtype))
        self.tp: TensorParallel = LOCAL

    def forward(self, x: Tensor) -> Tensor:
        wide = as_float(x).flatten(-2)
        if self.tp.size == 1:
            normed = normalise(wide, self.eps)
        else:
            total = self.tp.enter(self.tp.reduce(wide.square().sum(-1, keepdim=True)))
            normed = wide * torch.rsqrt(total / (wide.shape[-1] * self.tp.size) + self.eps)
        return (self.weight * normed.to(x.dtype)).view(x.shape)
