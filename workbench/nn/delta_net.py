"""Gated delta net: one short convolution over q, k and v, a decay per head, the delta rule, a gated norm.

T tokens, S sequences, G key heads and H value heads held here, Dk and Dv their widths, K taps,
C = 2 G Dk + H Dv channels.

    q | k | v = SiLU(conv(W_qkv x))           q, k scaled to unit length per head, q also by Dk^-1/2
    g         = -exp(A_log) * softplus(W_a x + dt_bias)                     log decay, one of each value head
    beta      = sigmoid(W_b x)
    y         = W_o (norm(delta_rule(q, k, v, g, beta)) * SiLU(W_z x))

Value head h asks with key head h // (H / G). Source: Gated DeltaNet, arXiv 2412.06464, as Qwen3.5 has it.
"""

from __future__ import annotations

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
from workbench.spec import GatedDeltaSpec

__all__ = ["DeltaNet"]


class DeltaNet(nn.Module):
    """(T, D_model) -> (T, D_model). Head counts follow from the weights held here."""

    def __init__(self, spec: GatedDeltaSpec, dim: int, layer_idx: int, precision: Precision):
        super().__init__()
        self.spec, self.layer_idx = spec, layer_idx
        scheme, dtype = precision.projection_scheme, precision.dtype
        self.qkv_proj = Linear(spec.conv_width, dim, scheme=scheme, dtype=dtype)
        self.z_proj = Linear(spec.value_width, dim, scheme=scheme, dtype=dtype)
        self.b_proj = Linear(spec.num_value_heads, dim, dtype=dtype)
        self.a_proj = Linear(spec.num_value_heads, dim, dtype=dtype)
        self.conv = ShortConv(spec.conv_width, spec.conv_size)
        self.A_log = nn.Parameter(torch.empty(spec.num_value_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(spec.num_value_heads, dtype=torch.float32))
        self.o_norm = GatedRMSNorm(spec.value_dim, spec.norm_eps, F.silu)
        self.o_proj = Linear(dim, spec.value_width, scheme=scheme, dtype=dtype)
        self.tp: TensorParallel = LOCAL

    def forward(self, x: Tensor, segments: Segments, cache: Cache | None) -> Tensor:
        x = self.tp.enter(x)
        before, state = self._read(x, segments, cache)
        inputs = self.qkv_proj(x)
        q, k, v = self._heads(as_float(self.conv(inputs, segments, before)))
        z = as_float(self.a_proj(x)) + self.dt_bias
        g = (-self.A_log.to(z.dtype).exp() * F.softplus(z))[..., None]  # (T, H, 1)
        beta = torch.sigmoid(as_float(self.b_proj(x)))
        output, state = delta_rule(q, k, v, g, beta, state, segments)
        if cache is not None:
            assert before is not None
            after = self.conv.tail(inputs, segments, before)[:, None]
            if segments.tentative:
                rows, settled = segments.tentative_rows, segments.settled
                held = HeldRows(inputs[rows][:, None], k[rows], v[rows], g[rows], beta[rows])
                cache.hold_state(self.layer_idx, segments, held)
                cache.write_state(self.layer_idx, segments.slot_index[settled], after[settled], state[settled])
            else:
                cache.write_state(self.layer_idx, segments.slot_index, after, state)
        gate = self.z_proj(x).unflatten(-1, (-1, self.spec.value_dim))
        return self.tp.reduce(self.o_proj(self.o_norm(output.to(x.dtype), gate).flatten(-2)))

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(T, C) -> q and k (T, H, Dk) of unit length, v (T, H, Dv)."""
        spec, heads = self.spec, self.A_log.shape[0]
        width = (mixed.shape[-1] - heads * spec.value_dim) // 2
        q, k, v = mixed.split([width, width, heads * spec.value_dim], -1)
        q, k = (unit_length(y.unflatten(-1, (-1, spec.key_dim)), spec.l2_eps) for y in (q, k))
        q, k = (y.repeat_interleave(heads // y.shape[1], 1) for y in (q * spec.key_dim**-0.5, k))
        return q, k, v.unflatten(-1, (heads, spec.value_dim))

    def _read(self, x: Tensor, segments: Segments, cache: Cache | None) -> tuple[Tensor | None, Tensor]:
        """Inputs of the convolution before the first new token (S, C, K-1) and state (S, H, Dv, Dk); else zeros."""
        if cache is not None:
            before, state = cache.read_state(self.layer_idx, segments.slot_index, segments.is_fresh)
            return before[:, 0], state
        shape = (segments.num_sequences, self.A_log.shape[0], self.spec.value_dim, self.spec.key_dim)
        return None, as_float(x).new_zeros(shape)
