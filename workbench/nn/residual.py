"""Block attention residuals: every sublayer reads a softmax mix of the sums saved at block starts and the running sum.

Source: Attention Residuals, arXiv 2603.15031.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from workbench.nn.norm import normalise
from workbench.nn.precision import as_float

__all__ = ["ResidualMix", "ResidualStream"]


class _Vector(nn.Module):
    """A bare weight under its own name (`norm.weight`, `proj.weight`)."""

    def __init__(self, *shape: int, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype))


class ResidualMix(nn.Module):
    """Softmax over sources of a learned score; the sources themselves enter the sum un-normalised.

    score_s = sum_j v_s[j] * rsqrt(mean(v_s^2) + eps) * norm[j] * proj[j]        (no 1/sqrt(D))
    """

    def __init__(self, dim: int, eps: float, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.eps = eps
        self.norm = _Vector(dim, dtype=dtype)
        self.proj = _Vector(1, dim, dtype=dtype)

    def forward(self, sources: tuple[Tensor, ...]) -> Tensor:
        """N tensors (T, D) -> (T, D), mixed in float32 and rounded once."""
        v = as_float(torch.stack(sources))  # (N, T, D)
        direction = as_float(self.norm.weight) * as_float(self.proj.weight[0])
        weights = torch.softmax(normalise(v, self.eps) @ direction, 0)
        return (weights[..., None] * v).sum(0).to(sources[0].dtype)


@dataclass(frozen=True, slots=True)
class ResidualStream:
    """What one layer hands to the next: saved sums (T, D) in the order of saving, and the running sum.

    Every step makes a new stream and no tensor is changed in place: a saved sum that a later `+=` reached would
    silently follow the running sum.
    """

    saved: tuple[Tensor, ...]
    running: Tensor | None

    def mix(self, mixer: ResidualMix | None) -> Tensor:
        """Input of a sublayer; before anything is saved, or without a mixer, the running sum itself."""
        if mixer is None or not self.saved:
            assert self.running is not None
            return self.running
        return mixer(self.saved if self.running is None else (*self.saved, self.running))

    def save(self) -> ResidualStream:
        """Start a block: the running sum joins the saved ones and begins anew."""
        assert self.running is not None
        return ResidualStream((*self.saved, self.running), None)

    def add(self, y: Tensor) -> ResidualStream:
        return replace(self, running=y if self.running is None else self.running + y)

    def rows(self, index: Tensor) -> ResidualStream:
        """The same stream for some of its tokens."""
        assert self.running is not None
        return ResidualStream(tuple(v[index] for v in self.saved), self.running[index])

    def payload(self) -> Tensor:
        """(1 + saved, T, D) for the next pipeline stage: saved sums in order, then the running sum."""
        assert self.running is not None
        return torch.stack([*self.saved, self.running])

    @classmethod
    def from_payload(cls, payload: Tensor) -> ResidualStream:
        *saved, running = payload.unbind(0)
        return cls(tuple(saved), running)
