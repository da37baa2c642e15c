"""Gated activations of feed-forward blocks."""

from __future__ import annotations

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
    y = situ(g, u, kind.beta, kind.linear_beta) if kind.kind == "situ" else F.silu(g) * u
    return y.to(gate.dtype)
