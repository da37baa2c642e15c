"""Projector: merged vision vectors into the text model's embedding space."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.nn.linear import Linear
from workbench.nn.norm import RMSNorm
from workbench.spec import ProjectorSpec

__all__ = ["Projector"]


class Projector(nn.Module):
    """Two layers with an exact (erf) GELU between them, then RMSNorm: (tokens, m * m, C) -> (tokens, D).

    Small and used once per image: every tensor-parallel rank holds all of it.
    """

    def __init__(self, spec: ProjectorSpec, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.fc0 = Linear(spec.hidden_width, spec.input_width, dtype=dtype)
        self.fc1 = Linear(spec.output_width, spec.hidden_width, dtype=dtype)
        self.norm = RMSNorm(spec.output_width, spec.norm_eps, dtype)

    def forward(self, merged: Tensor) -> Tensor:
        return self.norm(self.fc1(F.gelu(self.fc0(merged.flatten(1)))))
