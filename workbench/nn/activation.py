"""Gated activations of feed-forward blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.nn.precision import as_float
from workbench.spec import Activation

__all__ = ["gated_activation", "situ"]


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """SiTU-GLU: beta * tanh(g / beta) * sigmoid(g) * linear_beta * tanh(u / linear_beta).

    Near zero it is SiLU(g) * u; far out it saturates at beta * linear_beta, so no input overflows.
    """
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * linear_beta * torch.tanh(up / linear_beta)


def gated_activation(kind: Activation, gate: Tensor, up: Tensor) -> Tensor:
    """(..., F), (..., F) -> (..., F): computed in float32, rounded once to the dtype of `gate`."""
    g, u = as_float(gate), as_float(up)
    if kind.limit is not None:
        g, u = g.clamp(max=kind.limit), u.clamp(-kind.limit, kind.limit)
    if kind.kind == "situ":
        y = _SiTU.apply(g, u, kind.beta, kind.linear_beta)
    elif kind.kind == "silu":
        y = F.silu(g) * u
    else:
        y = g * torch.sigmoid(kind.alpha * g) * (u + 1)
    return y.to(gate.dtype)


class _SiTU(torch.autograd.Function):
    """`situ` in fewer passes over memory, forward and backward.

    With a = tanh(g / b), s = sigmoid(g), c = tanh(u / l):  y = b l a s c,
    dy/dg = l c s ((1 - a^2) + b a (1 - s)),  dy/du = b a s (1 - c^2)
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
        a, s, c = (gate / beta).tanh_(), torch.sigmoid(gate), (up / linear_beta).tanh_()
        ctx.save_for_backward(a, s, c)
        ctx.betas = beta, linear_beta
        return (a * s).mul_(c).mul_(beta * linear_beta)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        a, s, c = ctx.saved_tensors
        beta, linear_beta = ctx.betas
        weighted = grad * s
        grad_up = torch.addcmul(weighted, weighted * c, c, value=-1).mul_(a).mul_(beta)
        slope = torch.addcmul(a, a, s, value=-1).mul_(beta).addcmul_(a, a, value=-1).add_(1)
        return slope.mul_(weighted).mul_(c).mul_(linear_beta), grad_up, None, None
