"""Sparse indexer: a small attention that picks, for each token, the few earlier ones that the large attention reads.

T tokens, H index heads, W their width, L tokens of one sequence so far, K tokens picked.

    q = rotate(W_q c)                        (H, W), c the query latent of the layer
    k = rotate(layer_norm(W_k x))            (W,), one for all heads, cached beside the layer's latents
    score(t, s) = sum_h w_h(t) relu(q_h(t) . k(s)) W^-1/2 H^-1/2,   w = W_w x,   for s up to t
    choice(t)   = the K tokens s of the highest score, all of them where there are no more than K

The first columns of q and k are rotated. Heads are not split over ranks: every rank of a tensor-parallel group computes
the same choice from the same inputs. Published kernels turn q and k by one more orthogonal matrix and score in FP8;
products are the same without, and exact. Source: DeepSeek-V3.2 report and its inference code.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.nn.linear import Linear
from workbench.nn.precision import as_float
from workbench.nn.rotary import RotaryTable, rotate
from workbench.nn.workspace import spans
from workbench.spec import IndexerSpec

__all__ = ["Indexer", "choose_tokens"]

KEY_NORM_EPS = 1e-6


class Indexer(nn.Module):
    """Index keys of tokens, and the choice of a token among them. All weights are whole on every rank."""

    def __init__(self, spec: IndexerSpec, dim: int, q_rank: int, dtype: torch.dtype):
        super().__init__()
        self.spec = spec
        self.q_b_proj = Linear(spec.num_heads * spec.head_dim, q_rank, dtype=dtype)
        self.k_proj = Linear(spec.head_dim, dim, dtype=dtype)
        self.k_norm = nn.LayerNorm(spec.head_dim, eps=KEY_NORM_EPS, dtype=torch.float32)
        self.weights_proj = Linear(spec.num_heads, dim, dtype=dtype)

    def keys(self, x: Tensor, table: RotaryTable) -> Tensor:
        """(T, D) -> (T, W) in the dtype of `x`."""
        wide = as_float(self.k_proj(x))
        weight, bias = self.k_norm.weight.to(wide.dtype), self.k_norm.bias.to(wide.dtype)
        k = F.layer_norm(wide, (self.spec.head_dim,), weight, bias, self.k_norm.eps).to(x.dtype)
        return rotate(k[:, None], table, is_interleaved=self.spec.is_interleaved)[:, 0]

    def queries(self, x: Tensor, q_latent: Tensor, table: RotaryTable) -> tuple[Tensor, Tensor]:
        """(T, D), (T, R) -> queries (T, H, W) and the weights of the heads (T, H) float32, scaled."""
        q = self.q_b_proj(q_latent).unflatten(-1, (-1, self.spec.head_dim))
        scale = (self.spec.head_dim * self.spec.num_heads) ** -0.5
        weights = as_float(self.weights_proj(x)) * scale
        return rotate(q, table, is_interleaved=self.spec.is_interleaved), weights


def choose_tokens(q: Tensor, weights: Tensor, keys: Tensor, top_k: int) -> Tensor:
    """The last n of L tokens of one sequence: (n, H, W), (n, H), (L, W) -> (n, L) bool, at most `top_k` in a row.

    Equal scores, of which a rectifier makes many, go to the earlier token, so that a choice does not depend on how many
    tokens are asked about at once. Beyond `nn.workspace`'s limit they are asked about in blocks.
    """
    (num_new, num_heads, _), num_all = q.shape, keys.shape[0]
    before = num_all - num_new
    # Scores of all heads before and after the rectifier; their sum twice, sorted, and where it stood; what is seen.
    blocks = spans(num_new, num_all * ((2 * num_heads + 3) * 4 + 8 + 3))
    if top_k >= num_all or len(blocks) == 1:
        return _choose(q, weights, keys, top_k, before)
    keys = as_float(keys)
    chosen = torch.empty(num_new, num_all, dtype=torch.bool, device=q.device)
    for rows in blocks:
        chosen[rows] = _choose(q[rows], weights[rows], keys, top_k, before + rows.start)
    return chosen


def _choose(q: Tensor, weights: Tensor, keys: Tensor, top_k: int, first: int) -> Tensor:
    """`choose_tokens` of the tokens from place `first` on."""
    num_new, num_all = q.shape[0], keys.shape[0]
    is_seen = torch.ones(num_new, num_all, dtype=torch.bool, device=q.device).tril(first)
    if top_k >= num_all:
        return is_seen
    scores = torch.relu(torch.einsum("nhw,lw->nhl", as_float(q), as_float(keys)))
    total = torch.einsum("nh,nhl->nl", weights, scores).masked_fill(~is_seen, -torch.inf)
    best = total.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    return torch.zeros_like(is_seen).scatter(-1, best, True) & is_seen
