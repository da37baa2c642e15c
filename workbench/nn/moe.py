"""Mixture of experts: a router on the full width, experts at that width or at a narrower one of their own.

T tokens, D model width, L width of the experts' inputs and outputs (a latent width, or D), F inner width of an expert,
E experts, K experts per token.
Source: Kimi K3 report, arXiv 2607.24653; latent experts, arXiv 2601.18089.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.nn import native
from workbench.nn.activation import gated_activation
from workbench.nn.ffn import GatedFFN
from workbench.nn.gather import RowMap
from workbench.nn.linear import Linear, StackedLinear
from workbench.nn.norm import RMSNorm
from workbench.nn.precision import Precision, as_float
from workbench.nn.router import Router
from workbench.nn.tensor_parallel import LOCAL, TensorParallel
from workbench.spec import MoESpec

__all__ = ["ExpertDispatch", "ExpertWeights", "Experts", "LocalDispatch", "MoE", "Router"]

# w1, w2, w3 of one expert and their biases
ExpertWeights = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


class Experts(nn.Module):
    """The routed experts held here, stacked. w1 gate and w3 up (E, F, L), w2 down (E, L, F), each with a bias or not.

    `adds_down_bias`: whether this rank is the one, of those that share an expert's width, that adds the bias of w2.
    `scales_input`: an expert's weight scales what it reads, not what it gives, which its activation tells apart.
    """

    def __init__(self, spec: MoESpec, precision: Precision):
        super().__init__()
        scheme, dtype = precision.expert_scheme, precision.dtype
        num, up, down = spec.num_experts, (spec.width, spec.latent_dim), (spec.latent_dim, spec.width)
        self.activation, self.scales_input = spec.activation, spec.scales_input
        self.adds_down_bias = True
        self.w1 = StackedLinear(num, *up, scheme=scheme, dtype=dtype, has_bias=spec.has_expert_bias)
        self.w2 = StackedLinear(num, *down, scheme=scheme, dtype=dtype, has_bias=spec.has_expert_bias)
        self.w3 = StackedLinear(num, *up, scheme=scheme, dtype=dtype, has_bias=spec.has_expert_bias)

    @property
    def num_local(self) -> int:
        return self.w1.logical_shape[0]

    def forward(self, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        """(T, L), (T, K) int64 rows of the stack or -1 where the expert is not held here, (T, K) -> (T, L) float32.

        The result is the weighted sum over the experts held here: complete only where they all are.
        """
        each = x
        if self.scales_input:
            each = (as_float(x[:, None]) * weights[..., None]).to(x.dtype).flatten(0, 1)
        own_weights = None if self.scales_input else weights
        if (combined := self.at_once(each, slots, own_weights, is_summed=True)) is not None:
            return combined
        order, counts = group_by_expert(slots, self.num_local)
        by_expert = RowMap(order, slots.numel())
        if not self.scales_input:
            each = x[:, None].expand(-1, slots.shape[1], -1).flatten(0, 1)
        grouped = by_expert(each)
        pieces = self.each(grouped, counts)
        # Without any token the result still depends on x: every rank takes part in the backward's collectives.
        outputs = by_expert.back(torch.cat(pieces) if pieces else grouped).view(*slots.shape, x.shape[-1])
        visits = as_float(outputs) * (1.0 if own_weights is None else own_weights[..., None])
        if native.serves(x):  # one after another, as the kernel: torch's order depends on how many columns there are
            return reduce(torch.add, visits.unbind(1))
        return visits.sum(1)

    def at_once(
        self, x: Tensor, slots: Tensor, weights: Tensor | None = None, *, is_summed: bool = False
    ) -> Tensor | None:
        """Every token through its experts by one native kernel, (T, L) or (T * K, L) -> (T, K, L); None without it.

        With `is_summed` their sum, taken by `weights` (T, K) where there are any -> (T, L) float32.
        """
        if not native.serves(x):
            return None
        stores = (self.w1, self.w2, self.w3)
        b1, b2, b3 = (None if store.bias is None else store.bias.to(x.dtype) for store in stores)
        biases = (b1, b2 if self.adds_down_bias else None, b3)
        w1, w2, w3 = (store.held for store in stores)
        return native.experts(x, slots, (w1, w2, w3), biases, self.activation, weights=weights, is_summed=is_summed)

    def each(self, grouped: Tensor, counts: list[int]) -> list[Tensor]:
        """Every expert on its own rows, one after another: (sum of counts, L) -> results of those that have any."""
        weights_of = self.weights_of(grouped.dtype)
        return [
            self.one(own, *weights_of(expert)) for expert, own in enumerate(grouped.split(counts)) if counts[expert]
        ]

    def weights_of(self, dtype: torch.dtype) -> Callable[[int], ExpertWeights]:
        """By expert: w1, w2, w3, dense in `dtype`, and their biases or None."""
        stores = (self.w1, self.w2, self.w3)
        w1, w2, w3 = (store.matrices(dtype) for store in stores)
        b1, b2, b3 = (None if store.bias is None else store.bias.to(dtype) for store in stores)
        own_b2 = b2 if self.adds_down_bias else None

        def pick(expert: int) -> ExpertWeights:
            c1, c2, c3 = (None if b is None else b[expert] for b in (b1, own_b2, b3))
            return w1(expert), w2(expert), w3(expert), c1, c2, c3

        return pick

    def one(
        self,
        x: Tensor,
        w1: Tensor,
        w2: Tensor,
        w3: Tensor,
        b1: Tensor | None = None,
        b2: Tensor | None = None,
        b3: Tensor | None = None,
    ) -> Tensor:
        """One expert on its tokens: (n, L) -> (n, L)."""
        if x.ndim == 2 and native.serves(x, w1, w2, w3):
            stacks = ((w1[None], None), (w2[None], None), (w3[None], None))
            biases = [None if b is None else b[None] for b in (b1, b2, b3)]
            y = native.experts(x, x.new_zeros((len(x), 1), dtype=torch.int64), stacks, biases, self.activation)
            if y is not None:
                return y[:, 0]
        return F.linear(gated_activation(self.activation, F.linear(x, w1, b1), F.linear(x, w3, b3)), w2, b2)


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
    split by columns and joins the shared experts' reduction. Without a latent width the sum of experts is the result,
    and without shared experts nothing joins it. Where the family has a gate for them, its sigmoid scales their part.
    """

    def __init__(self, spec: MoESpec, dim: int, precision: Precision):
        super().__init__()
        dtype = precision.dtype
        self.router = Router(spec, dim, dtype)
        self.latent_in = Linear(spec.latent_dim, dim, dtype=dtype) if spec.has_latent else None
        self.experts = Experts(spec, precision)
        self.latent_norm = RMSNorm(spec.latent_dim, spec.norm_eps, dtype) if spec.has_latent_norm else nn.Identity()
        self.latent_out = Linear(dim, spec.latent_dim, dtype=dtype) if spec.has_latent else None
        self.shared: GatedFFN | None = None
        if spec.shared_width:
            self.shared = GatedFFN(dim, spec.shared_width, spec.activation, precision, is_partial=True)
        self.shared_gate = Linear(1, dim, dtype=dtype) if spec.has_shared_gate else None
        self.dispatch: ExpertDispatch = LocalDispatch()
        self.tp: TensorParallel = LOCAL

    def forward(self, x: Tensor) -> Tensor:
        expert_ids, weights = self.router(x)
        latent = x if self.latent_in is None else self.latent_in(x)
        combined = self.latent_norm(self.dispatch(latent, expert_ids, weights, self.experts).to(x.dtype))
        if self.latent_out is None:
            return combined if self.shared is None else combined + self.tp.reduce(self._shared(x))
        routed = self.latent_out(self.tp.split(combined, -1))
        return self.tp.reduce(routed if self.shared is None else routed + self._shared(x))

    def _shared(self, x: Tensor) -> Tensor:
        """This rank's share of the shared experts' sum: (T, D) -> (T, D)."""
        assert self.shared is not None
        y = self.shared(x)
        return y if self.shared_gate is None else y * self.tp.enter(torch.sigmoid(self.shared_gate(x)))
