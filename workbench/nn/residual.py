"""Block attention residuals: every sublayer reads a softmax mix of the sums saved at block starts and the running sum.

Source: Attention Residuals, arXiv 2603.15031.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

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
        direction = as_float(self.norm.weight) * as_float(self.proj.weight[0])
        mix = _Mix.apply(direction, self.eps, *(as_float(v) for v in sources))
        return mix.to(sources[0].dtype)


class _Mix(torch.autograd.Function):
    """sum_n a_n v_n with a = softmax_n(r_n v_n . d) and r_n = (mean(v_n^2) + eps)^-1/2: source by source, unstacked.

    With e_n = a_n (g . v_n - sum_m a_m g . v_m) r_n, g the gradient of the mix:
    the gradient of v_n is a_n g + e_n d - (e_n v_n . d) r_n^2 / D v_n, that of d is sum_n e_n v_n
    """

    @staticmethod
    def forward(ctx: Any, direction: Tensor, eps: float, *sources: Tensor) -> Tensor:
        mean_squares = torch.stack([torch.linalg.vector_norm(v, dim=-1) for v in sources]).square_() / len(direction)
        scales = torch.rsqrt(mean_squares + eps)  # (N, T)
        products = torch.stack([v @ direction for v in sources])
        weights = torch.softmax(scales * products, 0)
        ctx.save_for_backward(direction, scales, products, weights, *sources)
        mix = sources[0] * weights[0, :, None]
        for v, a in zip(sources[1:], weights[1:], strict=True):
            mix.addcmul_(v, a[:, None])
        return mix

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        direction, scales, products, weights, *sources = ctx.saved_tensors
        reach = torch.stack([torch.linalg.vecdot(grad, v) for v in sources])
        effect = weights * (reach - (weights * reach).sum(0)) * scales
        pull = effect * products * scales.square() / len(direction)
        grads = []
        for v, a, e, p in zip(sources, weights, effect, pull, strict=True):
            own = grad * a[:, None]
            grads.append(own.addcmul_(e[:, None], direction).addcmul_(v, p[:, None], value=-1))
        grad_direction = torch.stack([e @ v for v, e in zip(sources, effect, strict=True)]).sum(0)
        return grad_direction, None, *grads


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
        return ResidualStream(self.saved, y if self.running is None else self.running + y)

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
