"""Routers: which K of E experts a token visits, and with which weights. All in float32.

    scores    sigmoid(W x + b), softmax(W x + b), or the logits themselves ("softmax_topk")
    choice    the top K of scores + correction, of the best groups only where experts compete in groups
    weights   the chosen scores without the correction, summing to one where the family renormalises, times a scale;
              for "softmax_topk" their softmax

`workbench.spec.routing.choose_experts` says the same for one token in plain numbers, and is what this is held against.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.base import LoadError
from workbench.nn import native
from workbench.nn.precision import as_float
from workbench.spec import MoESpec

__all__ = ["Router"]


class Router(nn.Module):
    """(T, D) -> ids of K experts, ascending, and their weights. `bias` is the correction of the choice."""

    def __init__(self, spec: MoESpec, dim: int, dtype: torch.dtype):
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(spec.num_experts, dim, dtype=dtype))
        self.bias: nn.Parameter | None = None
        if spec.has_correction_bias:
            self.bias = nn.Parameter(torch.empty(spec.num_experts, dtype=torch.float32), requires_grad=False)
        self.logit_bias = nn.Parameter(torch.empty(spec.num_experts, dtype=dtype)) if spec.has_router_bias else None

    def scores(self, x: Tensor) -> Tensor:
        """(T, D) -> (T, E) float32, without the correction."""
        logits = F.linear(as_float(x), as_float(self.weight))
        if self.logit_bias is not None:
            logits = logits + as_float(self.logit_bias)
        if self.spec.scoring == "sigmoid":
            return torch.sigmoid(logits)
        return torch.softmax(logits, -1) if self.spec.scoring == "softmax" else logits

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(T, D) -> expert ids (T, K) int64 ascending, and their weights (T, K) float32."""
        correction = None if self.bias is None else self._correction()
        if "scores" not in self.__dict__:  # else somebody has put others in place
            found = native.route(x, self.weight, self.logit_bias, correction, self.spec)
            if found is not None:
                return found
        scores = self.scores(x)
        choice = scores if correction is None else scores + correction
        if self.spec.num_groups > 1:
            choice = self._of_best_groups(choice)
        ids = torch.topk(choice, self.spec.top_k, dim=-1).indices.sort(-1).values
        weights = scores.gather(-1, ids)
        if self.spec.scoring == "softmax_topk":
            weights = torch.softmax(weights, -1)
        elif self.spec.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids, weights * self.spec.routed_scale

    def _correction(self) -> Tensor:
        assert self.bias is not None
        if self.bias.dtype is not torch.float32:  # biases of about 7 lie closer together than bf16 can tell apart
            raise LoadError(
                "the router's correction bias was cast and now chooses other experts",
                found=self.bias.dtype,
                expected=torch.float32,
                next_step="Convert weights one by one, never the whole model",
            )
        return self.bias

    def _of_best_groups(self, choice: Tensor) -> Tensor:
        """(T, E), minus infinity outside the groups that win by the sum of their best two."""
        grouped = choice.unflatten(-1, (self.spec.num_groups, -1))
        strength = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)  # (T, groups)
        winners = strength.topk(self.spec.top_groups, -1).indices
        is_out = torch.ones_like(strength, dtype=torch.bool).scatter(-1, winners, False)
        return grouped.masked_fill(is_out[..., None], -torch.inf).flatten(-2)
