"""Wrong ways to compute a step, as functions that take the place of the right one on a bench (see `equations.py`)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.align.reference import L2_EPS, normalise

__all__ = [
    "as_bf16",
    "awq_order",
    "gated_linear_step",
    "half_turn",
    "layer_norm",
    "late_read_step",
    "norm_in_bf16",
    "offset_norm",
    "permute_heads",
    "reinterpreted",
    "softplus_decay",
    "swap_nibbles",
    "unit_with_mean",
    "without_norm",
    "without_row_scale",
    "without_weight",
    "yarn_factor",
]

Tensors = tuple[Tensor, Tensor]


def as_bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


# -- norms -------------------------------------------------------------------------------------------------------------


def offset_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The weight stored as a distance from one."""
    return (1.0 + weight) * normalise(x, eps)


def layer_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * normalise(x - x.mean(-1, keepdim=True), eps)


def without_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x


def without_weight(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return normalise(x, eps)


def norm_in_bf16(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Squares and their running sum rounded to bf16, one element after another."""
    total = torch.zeros_like(x[..., 0])
    for column in as_bf16(as_bf16(x).square()).unbind(-1):
        total = as_bf16(total + column)
    scale = as_bf16(torch.rsqrt(as_bf16(as_bf16(total / x.shape[-1]) + eps)))
    return weight * x * scale.unsqueeze(-1)


# -- weights -----------------------------------------------------------------------------------------------------------


def reinterpreted(w: Tensor) -> Tensor:
    """(out, in) read from memory that holds (in, out)."""
    return w.T.reshape(w.shape)


def swap_nibbles(w: Tensor) -> Tensor:
    """Both columns of a byte exchanged; the scale of their group is the same."""
    return w.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def awq_order(w: Tensor) -> Tensor:
    """Codes packed in plain order, read in the order 0 2 4 6 1 3 5 7 of eight."""
    if w.shape[-1] % 8:
        return w
    return w.unflatten(-1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(-2)


def without_row_scale(largest: float, w: Tensor) -> Tensor:
    """The codes of a row, whose largest is `largest`, taken for its values."""
    return w * (largest / w.abs().amax(-1, keepdim=True).clamp(min=1e-30))


def permute_heads(num: int, way: str) -> Callable[[Tensor], Tensor]:
    """Rows by head in another order: "reversed", or "interleaved", (heads, width) laid out as (width, heads)."""

    def change(w: Tensor) -> Tensor:
        heads = w.unflatten(0, (num, -1))
        return (heads.flip(0) if way == "reversed" else heads.transpose(0, 1)).flatten(0, 1)

    return change


# -- linear attention --------------------------------------------------------------------------------------------------


def unit_with_mean(x: Tensor) -> Tensor:
    """The epsilon added to the mean of squares, where the sum is meant."""
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + L2_EPS * x.shape[-1])


def softplus_decay(z: Tensor, a_log: Tensor, bias: Tensor, bound: float) -> Tensor:
    """The unbounded decay of Kimi Linear."""
    return -torch.exp(a_log).unsqueeze(-1) * F.softplus(z + bias)


def gated_linear_step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> Tensors:
    """Without the correction: what the state already answers for a key is added once more."""
    written = k.unsqueeze(-1) * (beta.unsqueeze(-1) * v).unsqueeze(-2)
    state = alpha.unsqueeze(-1) * state + written
    return state, torch.einsum("hkv,hk->hv", state, q)


def late_read_step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> Tensors:
    """The output read before the token is written."""
    state = alpha.unsqueeze(-1) * state
    out = torch.einsum("hkv,hk->hv", state, q)
    correction = beta.unsqueeze(-1) * (v - torch.einsum("hkv,hk->hv", state, k))
    return state + k.unsqueeze(-1) * correction.unsqueeze(-2), out


# -- positions ---------------------------------------------------------------------------------------------------------


def half_turn(x: Tensor, width: int, *, is_paired: bool, theta: float = 10000.0) -> Tensor:
    """Rotary positions on (T, H, width): neighbours as pairs, or one half against the other."""
    frequency = theta ** (-torch.arange(0, width, 2, dtype=x.dtype) / width)
    angle = torch.arange(len(x), dtype=x.dtype).outer(frequency).unsqueeze(1)  # (T, 1, width / 2)
    cos, sin = torch.cos(angle), torch.sin(angle)
    a, b = (x[..., 0::2], x[..., 1::2]) if is_paired else x.chunk(2, -1)
    turned = (a * cos - b * sin, a * sin + b * cos)
    return torch.stack(turned, -1).flatten(-2) if is_paired else torch.cat(turned, -1)


def yarn_factor(stretch: float) -> float:
    """What YaRN multiplies the softmax scale by for a context stretched so many times."""
    return (0.1 * math.log(stretch) + 1.0) ** 2
