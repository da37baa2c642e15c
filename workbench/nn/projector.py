"""Projector: vision vectors of neighbouring patches into the text model's embedding space."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.nn.linear import Linear
from workbench.nn.norm import norm_of
from workbench.spec import ProjectorSpec

__all__ = ["Projector"]


class Projector(nn.Module):
    """Two layers with an exact (erf) GELU between them, and a norm: (tokens, m * m, C) -> (tokens, D).

    With n states of DeepStack these come as n further groups of m * m, each is projected for itself, and the results
    stand side by side: (tokens, (1 + n) * m * m, C) -> (tokens, (1 + n) * D). Small and used once per image: every
    tensor-parallel rank holds all of it.
    """

    def __init__(self, spec: ProjectorSpec, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.spec, bias = spec, spec.has_bias
        self.fc0 = Linear(spec.hidden_width, spec.input_width, dtype=dtype, has_bias=bias)
        self.fc1 = Linear(spec.output_width, spec.hidden_width, dtype=dtype, has_bias=bias)
        width = {"output": spec.output_width, "patch": spec.patch_width, "merged": spec.input_width}[spec.norm_at]
        self.norm = norm_of(spec.norm, width, spec.norm_eps, dtype)
        later = replace(spec, norm_at="merged", num_deepstack=0)
        self.deepstack = nn.ModuleList(Projector(later, dtype) for _ in range(spec.num_deepstack))

    def forward(self, merged: Tensor) -> Tensor:
        if not self.deepstack:
            return self._own(merged)
        own, *states = merged.chunk(1 + len(self.deepstack), 1)
        return torch.cat([self._own(own), *(each(x) for each, x in zip(self.deepstack, states, strict=True))], -1)

    def _own(self, merged: Tensor) -> Tensor:
        at = self.spec.norm_at
        x = (self.norm(merged) if at == "patch" else merged).flatten(1)
        y = self.fc1(F.gelu(self.fc0(self.norm(x) if at == "merged" else x)))
        return self.norm(y) if at == "output" else y
