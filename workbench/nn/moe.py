"""Latent mixture of experts: a sigmoid router on the full width, experts at their own narrower width.

T tokens, D model width, L latent width, F inner width of an expert, E experts, K experts per token.
Source: Kimi K3 report, arXiv 2607.24653; latent experts, arXiv 2601.18089.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.base import LoadError
from workbench.nn.activation import gated_activation
from workbench.nn.arithmetic import linear
from workbench.nn.ffn import GatedFFN
from workbench.nn.gather import RowMap
from workbench.nn.linear import Linear, StackedLinear
from workbench.nn.norm import RMSNorm
from workbench.nn.precision import Precision, as_float
from workbench.nn.tensor_parallel import LOCAL, TensorParallel
from workbench.spec import MoESpec

__all__ = ["ExpertDispatch", "Experts", "LocalDispatch", "MoE", "Router"]


class Router(nn.Module):
    """Chooses K experts by sigmoid score plus correction bias, and weighs them by the score alone; all in float32."""

    def __init__(self, spec: MoESpec, dim: int, dtype: torch.dtype):
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(spec.num_experts, dim, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(spec.num_experts, dtype=torch.float32), requires_grad=False)

    def scores(self, x: Tensor) -> Tensor:
        """(T, D) -> (T, E) float32, without the bias."""
        return torch.sigmoid(F.linear(as_float(x), as_float(self.weight)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(T, D) -> expert ids (T, K) int64 ascending, and their weights (T, K) float32."""
        if self.bias.dtype is not torch.float32:  # biases of about 7 lie closer together than bf16 can tell apart
            raise LoadError(
                "the router's correction bias was cast and now chooses other experts",
                found=self.bias.dtype,
                expected=torch.float32,
                next_step="Convert weights one by one, never the whole model",
            )
        scores = self.scores(x)
        ids = torch.topk(scores + self.bias, self.spec.top_k, dim=-1).indices.sort(-1).values
        weights = scores.gather(-1, ids)
        if self.spec.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids, weights * self.spec.routed_scale


class Experts(nn.Module):
    """The routed experts held here, stacked. w1 gate and w3 up (E, F, L), w2 down (E, L, F)."""

    def __init__(self, spec: MoESpec, precision: Precision):
        super().__init__()
        scheme, dtype = precision.expert_scheme, precision.dtype
        num, up, down = spec.num_experts, (spec.width, spec.latent_dim), (spec.latent_dim, spec.width)
        self.activation = spec.activation
        self.w1 = StackedLinear(num, *up, scheme=scheme, dtype=dtype)
        self.w2 = StackedLinear(num, *down, scheme=scheme, dtype=dtype)
        self.w3 = StackedLinear(num, *up, scheme=scheme, dtype=dtype)

    @property
    def num_local(self) -> int:
        return self.w1.logical_shape[0]

    def forward(self, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        """(T, L), (T, K) int64 rows of the stack or -1 where the expert is not held here, (T, K) -> (T, L) float32.

        The result is the weighted sum over the experts held here: complete only where they all are.
        """
        order, counts = group_by_expert(slots, self.num_local)
        by_expert = RowMap(order, slots.numel())
        grouped = by_expert(x[:, None].expand(-1, slots.shape[1], -1).flatten(0, 1))
        pieces = self.each(grouped, counts)
        # Without any token the result still depends on x: every rank takes part in the collectives of the backward.
        outputs = by_expert.back(torch.cat(pieces) if pieces else grouped).view(*slots.shape, x.shape[-1])
        return (as_float(outputs) * weights[..., None]).sum(1)

    def each(self, grouped: Tensor, counts: list[int]) -> list[Tensor]:
        """Every expert on its own rows, one after another: (sum of counts, L) -> results of those that have any."""
        w1, w2, w3 = (store.matrices(grouped.dtype) for store in (self.w1, self.w2, self.w3))
        return [
            self.one(own, w1(expert), w2(expert), w3(expert))
            for expert, own in enumerate(grouped.split(counts))
            if counts[expert]
        ]

    def one(self, x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        """One expert on its tokens: (n, L) -> (n, L)."""
        return linear(gated_activation(self.activation, linear(x, w1), linear(x, w3)), w2)


def group_by_expert(slots: Tensor, num_local: int) -> tuple[Tensor, list[int]]:
    """Positions in the flattened (T, K) `slots` ordered by expert, without the -1s, and how many each expert has."""
    flat = slots.flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat + 1, minlength=num_local + 1).tolist()
    return order[counts[0] :], counts[1:]


class ExpertDispatch(Protocol):
    """How tokens reach their experts. Also called with T = 0, and must then take part in its collectives."""

    def __call__(self, latent: Tensor, expert_ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
        """(T, L), (T, K) int64 global ids, (T, K) -> (T, L) float32: the complete weighted sum for each token here."""
        ...


class LocalDispatch:
    """All experts are held here."""

    def __call__(self, latent: Tensor, expert_ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
        return experts(latent, expert_ids, weights)


class MoE(nn.Module):
    """latent_out(norm(sum of weighted experts)) + shared experts: (T, D) -> (T, D).

    The norm needs the complete sum of experts, so `dispatch` ends with a reduction of its own; what follows the norm is
    split by columns and joins the shared experts' reduction.
    """

    def __init__(self, spec: MoESpec, dim: int, precision: Precision):
        super().__init__()
        dtype = precision.dtype
        self.router = Router(spec, dim, dtype)
        self.latent_in = Linear(spec.latent_dim, dim, dtype=dtype)
        self.experts = Experts(spec, precision)
        self.latent_norm = RMSNorm(spec.latent_dim, spec.norm_eps, dtype) if spec.has_latent_norm else nn.Identity()
        self.latent_out = Linear(dim, spec.latent_dim, dtype=dtype)
        self.shared = GatedFFN(dim, spec.shared_width, spec.activation, precision, is_partial=True)
        self.dispatch: ExpertDispatch = LocalDispatch()
        self.tp: TensorParallel = LOCAL

    def forward(self, x: Tensor) -> Tensor:
        expert_ids, weights = self.router(x)
        combined = self.dispatch(self.latent_in(x), expert_ids, weights, self.experts).to(x.dtype)
        routed = self.latent_out(self.tp.split(self.latent_norm(combined), -1))
        return self.tp.reduce(routed + self.shared(x))
