"""Kimi Delta Attention: short convolutions, a decay per head and key channel, the delta rule, a gated norm.

T tokens, S sequences, H heads held here, D head width, C = H * D, K taps.

    q, k, v = SiLU(conv(W x))                 q, k scaled to unit length per head, q also by D^-1/2
    g       = bound * sigmoid(exp(A_log) * (f_b f_a x + dt_bias))             log decay in (bound, 0), or, unbounded,
              -exp(A_log) * softplus(f_b f_a x + dt_bias)
    beta    = sigmoid(b x)
    y       = W_o (norm(delta_rule(q, k, v, g, beta)) * sigmoid(W_g x))       W_g full or of low rank, g_b g_a

Source: Kimi Linear, arXiv 2510.26692; the bounded decay is that of the published Kimi K3 code.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.nn.batch import Segments
from workbench.nn.cache import Cache
from workbench.nn.delta_rule import delta_rule
from workbench.nn.linear import Linear
from workbench.nn.norm import GatedRMSNorm, unit_length
from workbench.nn.precision import Precision, as_float
from workbench.nn.rewind import HeldRows
from workbench.nn.short_conv import ShortConv
from workbench.nn.tensor_parallel import LOCAL, TensorParallel
from workbench.spec import KDASpec

__all__ = ["KDA", "ShortConv"]

FORGETS_ALL = -80.0  # log decay; e^-80 of a state lies below what float32 keeps of the sum it joins


class KDA(nn.Module):
    """(T, D_model) -> (T, D_model). Head count and widths follow from the weights held here."""

    def __init__(self, spec: KDASpec, dim: int, layer_idx: int, precision: Precision):
        super().__init__()
        self.spec, self.layer_idx = spec, layer_idx
        width, scheme, dtype = spec.width, precision.projection_scheme, precision.dtype
        self.q_proj = Linear(width, dim, scheme=scheme, dtype=dtype)
        self.k_proj = Linear(width, dim, scheme=scheme, dtype=dtype)
        self.v_proj = Linear(width, dim, scheme=scheme, dtype=dtype)
        self.q_conv = ShortConv(width, spec.conv_size)
        self.k_conv = ShortConv(width, spec.conv_size)
        self.v_conv = ShortConv(width, spec.conv_size)
        self.f_a_proj = Linear(spec.decay_rank, dim, dtype=dtype)
        self.f_b_proj = Linear(width, spec.decay_rank, dtype=dtype)
        self.b_proj = Linear(spec.num_heads, dim, dtype=dtype)
        self.A_log = nn.Parameter(torch.empty(spec.num_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(width, dtype=torch.float32))
        if spec.gate_rank is None:
            self.g_proj = Linear(width, dim, scheme=scheme, dtype=dtype)
        else:
            self.g_a_proj = Linear(spec.gate_rank, dim, dtype=dtype)
            self.g_b_proj = Linear(width, spec.gate_rank, dtype=dtype)
        self.o_norm = GatedRMSNorm(spec.head_dim, spec.norm_eps)
        self.o_proj = Linear(dim, width, scheme=scheme, dtype=dtype)
        self.tp: TensorParallel = LOCAL

    def forward(self, x: Tensor, segments: Segments, cache: Cache | None) -> Tensor:
        low_rank = self.f_a_proj(x)  # every rank holds f_a whole: it is outside the split region
        gate_rank = None if self.spec.gate_rank is None else self.g_a_proj(x)  # and so is g_a
        x = self.tp.enter(x)
        before, state = self._read(x, segments, cache)
        inputs = [proj(x) for proj in (self.q_proj, self.k_proj, self.v_proj)]
        convs = (self.q_conv, self.k_conv, self.v_conv)
        q, k, v = (
            as_float(self._heads(conv(new, segments, old)))
            for conv, new, old in zip(convs, inputs, before, strict=True)
        )
        eps = self.spec.l2_eps
        q, k = unit_length(q, eps) * self.spec.head_dim**-0.5, unit_length(k, eps)
        g = self._log_decay(self.f_b_proj(self.tp.enter(low_rank)))
        beta = torch.sigmoid(as_float(self.b_proj(x)))
        output, state = self._delta_rule(q, k, v, g, beta, state, segments)
        if cache is not None:
            known = (old for old in before if old is not None)  # all, where there is a cache
            tails = [conv.tail(new, segments, old) for conv, new, old in zip(convs, inputs, known, strict=True)]
            after = torch.stack(tails, 1)
            if segments.tentative:
                rows, settled = segments.tentative_rows, segments.settled
                held = HeldRows(torch.stack(inputs, 1)[rows], k[rows], v[rows], g[rows], beta[rows])
                cache.hold_state(self.layer_idx, segments, held)
                cache.write_state(self.layer_idx, segments.slot_index[settled], after[settled], state[settled])
            else:
                cache.write_state(self.layer_idx, segments.slot_index, after, state)
        gate = self.g_proj(x) if gate_rank is None else self.g_b_proj(self.tp.enter(gate_rank))
        gated = self.o_norm(output.to(x.dtype), self._heads(gate))
        return self.tp.reduce(self.o_proj(gated.flatten(-2)))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.spec.head_dim))

    def _log_decay(self, z: Tensor) -> Tensor:
        """(T, C) -> (T, H, D) in (bound, 0); not a clamp: a sigmoid whose steepness exp(A_log) each head learns."""
        z = self._heads(as_float(z) + self.dt_bias)
        steepness = self.A_log.to(z.dtype).exp()[:, None]
        if math.isinf(self.spec.decay_bound):
            return -steepness * F.softplus(z)
        return self.spec.decay_bound * torch.sigmoid(steepness * z)

    def _delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, segments: Segments
    ) -> tuple[Tensor, Tensor]:
        """`delta_rule`. Without a bound on the decay it is computed in float64.

        Its chunks measure decays from the middle of 16 tokens, so exponents of eight log decays occur on both sides of
        zero; float32 overflows at 88, float64 at 709. A log decay of -80 forgets everything as far as float32 can tell.
        """
        if not math.isinf(self.spec.decay_bound) or segments.longest <= 1:
            return delta_rule(q, k, v, g, beta, state, segments)
        q_wide, k_wide, v_wide, g_wide = (x.double() for x in (q, k, v, g.clamp(min=FORGETS_ALL)))
        output, after = delta_rule(q_wide, k_wide, v_wide, g_wide, beta.double(), state.double(), segments)
        return output.to(q.dtype), after.to(state.dtype)

    def _read(
        self, x: Tensor, segments: Segments, cache: Cache | None
    ) -> tuple[tuple[Tensor, ...] | tuple[None, ...], Tensor]:
        """Inputs of q, k and v before the first new token (S, C, K-1) and state (S, H, D, D); else None and zeros."""
        if cache is not None:
            before, state = cache.read_state(self.layer_idx, segments.slot_index, segments.is_fresh)
            return before.unbind(1), state
        num, heads, dim = segments.num_sequences, self.A_log.shape[0], self.spec.head_dim
        return (None, None, None), as_float(x).new_zeros((num, heads, dim, dim))
