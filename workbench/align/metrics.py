"""Distances: between two tensors, between two sets of logits, between two choices of experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

__all__ = ["Distance", "LogitAgreement", "RouterAgreement", "logit_agreement", "measure", "router_agreement"]

_FRACTION_BITS = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23, torch.float64: 52}
TOP = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Distance:
    """Found against expected. `relative`: ||found - expected|| / ||expected||. `ulp`, `ulp_max`: the median and the
    largest element in units of the last place of the working dtype at the expected value. Infinite where found holds
    something that is not finite."""

    relative: float
    max_abs: float
    ulp: float
    ulp_max: float
    cosine: float

    def to_json(self) -> dict[str, object]:
        return {key: value if math.isfinite(value) else str(value) for key, value in asdict(self).items()}


def measure(expected: Tensor, found: Tensor, dtype: torch.dtype) -> Distance:
    """Distance of two tensors of one shape, in units of `dtype`'s last place; nothing apart where both are empty."""
    want, have = expected.detach().to("cpu", torch.float64), found.detach().to("cpu", torch.float64)
    if want.numel() == 0:
        return Distance(relative=0.0, max_abs=0.0, ulp=0.0, ulp_max=0.0, cosine=1.0)
    delta = (have - want).abs()
    if not bool(delta.isfinite().all()):
        return Distance(relative=math.inf, max_abs=math.inf, ulp=math.inf, ulp_max=math.inf, cosine=0.0)
    size, gap = want.norm().item(), delta.norm().item()
    # Below a thousandth of the rms a last place says nothing about the sum that an element came from.
    smallest = max(want.square().mean().sqrt().item() * 1e-3, torch.finfo(dtype).tiny)
    exponent = torch.frexp(want.abs().clamp(min=smallest)).exponent - 1
    places = delta / torch.ldexp(torch.ones_like(want), exponent - _FRACTION_BITS[dtype])
    both = size * have.norm().item()
    return Distance(
        relative=gap / size if size else (0.0 if gap == 0.0 else math.inf),
        max_abs=delta.max().item(),
        ulp=places.median().item(),
        ulp_max=places.max().item(),
        cosine=(want.flatten() @ have.flatten()).item() / both if both else float(gap == 0.0),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitAgreement:
    """Found logits against expected ones over all positions. KL in nats, of expected to found."""

    positions: int
    kl_mean: float
    kl_max: float
    top1: float  # share of positions with the same highest logit
    top5: float  # mean share of the five highest that both have

    def to_json(self) -> dict[str, object]:
        return {key: value if math.isfinite(value) else str(value) for key, value in asdict(self).items()}

    def describe(self) -> str:
        return (
            f"logits of {self.positions} positions: KL {self.kl_mean:.2e} nats on average, {self.kl_max:.2e} at most; "
            f"same first choice {self.top1:.2%}, top-5 overlap {self.top5:.2%}"
        )


def logit_agreement(expected: Tensor, found: Tensor) -> LogitAgreement:
    """(T, V) and (T, V); logits that are not finite are as far away as can be."""
    want, have = expected.detach().to("cpu", torch.float64), found.detach().to("cpu", torch.float64)
    if not bool(have.isfinite().all()):
        return LogitAgreement(positions=len(want), kl_mean=math.inf, kl_max=math.inf, top1=0.0, top5=0.0)
    p, q = torch.log_softmax(want, -1), torch.log_softmax(have, -1)
    kl = (p.exp() * (p - q)).sum(-1).clamp(min=0.0)
    k = min(TOP, want.shape[-1])
    first, second = (x.topk(k, -1).indices for x in (want, have))
    shared = (first[:, :, None] == second[:, None, :]).any(-1).double().mean().item()
    same = (want.argmax(-1) == have.argmax(-1)).double().mean().item()
    return LogitAgreement(positions=len(want), kl_mean=kl.mean().item(), kl_max=kl.max().item(), top1=same, top5=shared)


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterAgreement:
    """Sets of chosen experts over all tokens of one layer's router."""

    layer: int
    tokens: int
    same_sets: float  # share of tokens whose whole set agrees
    overlap: float  # mean share of a token's experts that both chose

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def router_agreement(expected: Mapping[int, Tensor], found: Mapping[int, Tensor]) -> tuple[RouterAgreement, ...]:
    """Layer -> (T, K) ids of each side, for layers where both have the same shape."""
    result = []
    for layer in sorted(expected.keys() & found.keys()):
        want, have = expected[layer].long().cpu().sort(-1).values, found[layer].long().cpu().sort(-1).values
        if want.shape != have.shape or not len(want):
            continue
        shared = (want[:, :, None] == have[:, None, :]).any(-1).double().mean().item()
        same = (want == have).all(-1).double().mean().item()
        result.append(RouterAgreement(layer=layer, tokens=len(want), same_sets=same, overlap=shared))
    return tuple(result)
