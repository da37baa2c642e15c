"""Multi-head latent attention, with or without rotary positions, a query latent and an output gate.

T tokens, H heads held here, R latent width, P width of the key part that all heads share, N key width of one head from
the latent, V value width.

    q        = W_qb norm(W_qa x)  or  W_q x          (H, N + P); with rotary positions its last P columns are turned
    c | s    = W_kva x,  c <- norm(c)                (R | P), all that is cached; s is not normed, and turned as q is
    k_h, v_h = W_kvb c                               k = [k_h | s]
    y        = W_o (softmax(q k^T scale) v * sigmoid(W_g x))

`scale` is (N + P)^-1/2, times YaRN's where the family has that; the gate is there where the family has one.

Where the family has an indexer (`indexer.py`), a token attends to those that it picked, and a layer without one of its
own to those that the last layer with one picked.

Naive form: expand k and v of every token (prefill). Absorbed form: q_h^T W_k c = (W_k^T q_h)^T c, so all heads attend
to the cached rows themselves (decode). Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.base import UnsupportedModelError
from workbench.nn import native, workspace
from workbench.nn.batch import Segments
from workbench.nn.cache import Cache
from workbench.nn.indexer import Indexer, choose_tokens
from workbench.nn.linear import Linear
from workbench.nn.norm import RMSNorm
from workbench.nn.precision import Precision, as_float
from workbench.nn.rotary import rotary_table, rotate
from workbench.nn.tensor_parallel import LOCAL, TensorParallel
from workbench.spec import MLASpec

__all__ = ["MLA", "absorbed_attention", "naive_attention", "whole_attention"]


class MLA(nn.Module):
    """(T, D_model) -> (T, D_model). The head count follows from the weights held here."""

    def __init__(self, spec: MLASpec, dim: int, layer_idx: int, precision: Precision):
        super().__init__()
        if spec.has_rotary and spec.rope is None:
            raise UnsupportedModelError("latent attention with rotary positions needs their settings (`rope`)")
        self.spec, self.layer_idx = spec, layer_idx
        scheme, dtype = precision.projection_scheme, precision.dtype
        out_width = spec.num_heads * spec.v_dim
        if spec.q_rank:
            self.q_a_proj = Linear(spec.q_rank, dim, scheme=scheme, dtype=dtype)
            self.q_a_norm = RMSNorm(spec.q_rank, spec.latent_norm_eps, dtype)
            self.q_b_proj = Linear(spec.num_heads * spec.qk_dim, spec.q_rank, scheme=scheme, dtype=dtype)
        else:
            self.q_proj = Linear(spec.num_heads * spec.qk_dim, dim, scheme=scheme, dtype=dtype)
        self.kv_a_proj = Linear(spec.cache_dim, dim, scheme=scheme, dtype=dtype)
        self.kv_a_norm = RMSNorm(spec.kv_rank, spec.latent_norm_eps, dtype)
        self.kv_b_proj = Linear(spec.num_heads * (spec.nope_dim + spec.v_dim), spec.kv_rank, dtype=dtype)
        self.indexer: Indexer | None = None
        if spec.indexer is not None and spec.indexer.owns_choice:
            self.indexer = Indexer(spec.indexer, dim, spec.q_rank, dtype)
        self.g_proj = Linear(out_width, dim, scheme=scheme, dtype=dtype) if spec.has_output_gate else None
        self.o_proj = Linear(dim, out_width, scheme=scheme, dtype=dtype)
        self.tp: TensorParallel = LOCAL

    def forward(self, x: Tensor, segments: Segments, cache: Cache | None) -> Tensor:
        # Latents are computed whole by every rank; the split region begins where heads do.
        q_latent = self.q_a_norm(self.q_a_proj(x)) if self.spec.q_rank else None
        q_rows = self.q_proj(self.tp.enter(x)) if q_latent is None else self.q_b_proj(self.tp.enter(q_latent))
        q = q_rows.unflatten(-1, (-1, self.spec.qk_dim))  # (T, H, N + P)
        c, shared_key = self.kv_a_proj(x).split([self.spec.kv_rank, self.spec.rope_dim], -1)
        if (rope := self.spec.rope) is not None and self.spec.has_rotary:
            table = rotary_table(rope, segments)
            q_head, q_shared = q.split([self.spec.nope_dim, self.spec.rope_dim], -1)
            q = torch.cat([q_head, rotate(q_shared, table, is_interleaved=rope.is_interleaved)], -1)
            shared_key = rotate(shared_key[:, None], table, is_interleaved=rope.is_interleaved)[:, 0]
        latent = self.tp.enter(torch.cat([self.kv_a_norm(c), shared_key], -1))
        if cache is not None:
            cache.append_latent(self.layer_idx, segments.token_slots, segments.positions, latent)
        gate = None if self.g_proj is None else torch.sigmoid(self.g_proj(self.tp.enter(x)))
        if self.spec.indexer is None:
            attended = self._attend(q, latent, segments, cache).flatten(-2)
        else:
            if self.indexer is not None:
                assert q_latent is not None
                segments.choice = self._choose(x, q_latent, segments, cache)
            attended = self._attend_chosen(q, latent, segments, cache).flatten(-2)
        return self.tp.reduce(self.o_proj(attended if gate is None else attended * gate))

    def _choose(self, x: Tensor, q_latent: Tensor, segments: Segments, cache: Cache | None) -> list[Tensor]:
        """(n, L) bool of every sequence: which of its L tokens each of its n new ones reads."""
        assert self.indexer is not None
        assert self.spec.rope is not None
        table = rotary_table(self.spec.rope, segments)
        keys = self.indexer.keys(x, table)
        q, weights = self.indexer.queries(x, q_latent, table)
        if cache is not None:
            cache.append_index(self.layer_idx, segments.token_slots, segments.positions, keys)
        choice = []
        for s in range(segments.num_sequences):
            rows, length = segments.rows_of(s), segments.starts[s] + segments.lengths[s]
            known = keys[rows] if cache is None else cache.index_view(self.layer_idx, segments.slots[s], length)
            choice.append(choose_tokens(q[rows], weights[rows], known, self.indexer.spec.top_k))
        return choice

    def _attend_chosen(self, q: Tensor, latent: Tensor, segments: Segments, cache: Cache | None) -> Tensor:
        """As `_attend`, reading chosen tokens alone; one new token reads their rows and no others."""
        kv_b, pieces = self.kv_b_proj.dense(q.dtype), []
        if segments.choice is None:
            raise UnsupportedModelError("this layer follows the choice of an indexer that stands on another stage")
        for s, chosen in enumerate(segments.choice):
            rows, length = segments.rows_of(s), segments.starts[s] + segments.lengths[s]
            context = latent[rows] if cache is None else cache.latent_view(self.layer_idx, segments.slots[s], length)
            if len(chosen) == 1:
                own = context[chosen[0]][None]
                pieces.append(absorbed_attention(q[rows], own, None, kv_b, self.spec))
            else:
                pieces.append(naive_attention(q[rows], context, kv_b, self.spec, is_seen=chosen))
        return torch.cat(pieces) if pieces else q.new_zeros(0, q.shape[1], self.spec.v_dim)

    def _attend(self, q: Tensor, latent: Tensor, segments: Segments, cache: Cache | None) -> Tensor:
        """(T, H, N + P), (T, R + P) -> (T, H, V), each sequence for itself."""
        kv_b = self.kv_b_proj.dense(q.dtype)
        if cache is None:
            return whole_attention(q, latent, kv_b, self.spec, segments)

        lengths = [start + new for start, new in zip(segments.starts, segments.lengths, strict=True)]
        decoded = self._decode(q, kv_b, segments, cache, lengths)
        if segments.longest <= 1:
            return decoded
        pieces, singles = [], iter(decoded.split(1))
        for s, length in enumerate(lengths):
            if segments.lengths[s] == 1:
                pieces.append(next(singles))
            else:
                context = cache.latent_view(self.layer_idx, segments.slots[s], length)
                pieces.append(naive_attention(q[segments.rows_of(s)], context, kv_b, self.spec))
        return torch.cat(pieces)

    def _decode(self, q: Tensor, kv_b: Tensor, segments: Segments, cache: Cache, lengths: list[int]) -> Tensor:
        """All sequences of one new token at once: -> (their number, H, V)."""
        sequences = [s for s, length in enumerate(segments.lengths) if length == 1]
        if sequences and native.serves(q, kv_b):
            new = q if len(sequences) == len(q) else q[segments.single_rows]
            if (y := self._decode_natively(new, kv_b, sequences, segments, cache, lengths)) is not None:
                return y
        if len(sequences) == 1:  # its own rows and no others: nothing is copied and nothing masked
            (s,) = sequences
            context = cache.latent_view(self.layer_idx, segments.slots[s], lengths[s])
            return absorbed_attention(q[segments.rows_of(s)], context[None], None, kv_b, self.spec)
        visible = [lengths[s] for s in sequences]
        context = cache.latents(self.layer_idx, segments.slot_index[segments.singles], max(visible, default=0))
        return absorbed_attention(q[segments.single_rows], context, segments.table(visible), kv_b, self.spec)

    def _decode_natively(
        self, q: Tensor, kv_b: Tensor, sequences: list[int], segments: Segments, cache: Cache, lengths: list[int]
    ) -> Tensor | None:
        """The same by a kernel, reading rows where they lie unless they are codes: (S, H, N + P) -> (S, H, V)."""
        q_latent, w_value = _absorb(q, kv_b, self.spec)
        rank, scale = self.spec.kv_rank, self.spec.softmax_scale
        # All heads read one key-value head, whose values are the first columns of its keys.
        if (place := cache.latents_in_place(self.layer_idx)) is not None:
            rows, tables = place[0][:, None], place[1]
            seen = segments.once(
                ("seen", None, None),
                lambda: segments.table((segments.slots[s], 0, lengths[s]) for s in sequences),
            )
            mixed = native.attend_in_pages(q_latent, rows, rows[..., :rank], tables, seen, scale=scale)
        else:
            views = [cache.latent_view(self.layer_idx, segments.slots[s], lengths[s])[:, None] for s in sequences]
            mixed = native.attend(q_latent, views, [view[..., :rank] for view in views], scale=scale)
        return None if mixed is None else torch.einsum("shr,hvr->shv", mixed, w_value)


def naive_attention(q: Tensor, latent: Tensor, kv_b: Tensor, spec: MLASpec, *, is_seen: Tensor | None = None) -> Tensor:
    """Causal attention of the last n of L tokens: (n, H, N + P), (L, R + P), kv_b (H * (N + V), R) -> (n, H, V).

    `is_seen` (n, L) bool narrows down what each reads, and says what is causal then. Beyond `nn.workspace`'s limit
    heads are taken in groups and queries in blocks.
    """
    num_new, num_all, itemsize = q.shape[0], latent.shape[0], q.element_size()
    columns = spec.nope_dim + spec.v_dim + spec.qk_dim + max(spec.qk_dim, spec.v_dim)
    needed = num_all * q.shape[1] * columns * itemsize
    if is_seen is not None or num_new < num_all:
        needed += workspace.mask_bytes(num_new, num_all, itemsize)
    if not workspace.is_within(needed):
        return _attend_in_groups(q, latent, kv_b, spec, is_seen)
    keys, values = _expand(latent, kv_b, spec)
    mask = is_seen
    if mask is None and num_new < num_all:  # token i of the new ones stands at num_all - num_new + i
        mask = torch.ones(num_new, num_all, dtype=torch.bool, device=q.device).tril(num_all - num_new)
    q, keys, values = (x.transpose(0, 1)[None] for x in (q, keys, values))
    attended = F.scaled_dot_product_attention(
        q, keys, values, attn_mask=mask, is_causal=mask is None, scale=spec.softmax_scale
    )
    return attended[0].transpose(0, 1)[..., : spec.v_dim]


def _attend_in_groups(q: Tensor, latent: Tensor, kv_b: Tensor, spec: MLASpec, is_seen: Tensor | None) -> Tensor:
    """`naive_attention`, a group of heads at a time."""
    by_head = kv_b.view(-1, spec.nope_dim + spec.v_dim, spec.kv_rank)
    columns = spec.qk_dim + spec.v_dim + max(spec.qk_dim, spec.v_dim)  # while values are being made
    masks, pieces = workspace.BlockMasks(len(q), len(latent), is_seen=is_seen, like=q), []
    for heads in workspace.spans(len(by_head), latent.shape[0] * columns * q.element_size()):
        keys, values = _expand_group(latent, by_head[heads], spec)
        y = workspace.attend_in_blocks(q[:, heads], keys, values, masks, scale=spec.softmax_scale)
        pieces.append(y[..., : spec.v_dim])
        del keys, values  # before the next ones are made
    return torch.cat(pieces, 1)


def _expand_group(latent: Tensor, by_head: Tensor, spec: MLASpec) -> tuple[Tensor, Tensor]:
    """As `_expand` with weights (H', N + V, R) of some heads, keys and values one after the other: less at a time."""
    c, shared_key = latent.split([spec.kv_rank, spec.rope_dim], -1)
    w_key, w_value = (w.flatten(0, 1) for w in by_head.split([spec.nope_dim, spec.v_dim], 1))
    keys = F.linear(c, w_key).unflatten(-1, (-1, spec.nope_dim))
    keys = torch.cat([keys, shared_key[:, None].expand(-1, keys.shape[1], -1)], -1)
    values = F.linear(c, w_value).unflatten(-1, (-1, spec.v_dim))
    width = spec.qk_dim - spec.v_dim
    return keys, F.pad(values, (0, width)) if width > 0 else values


def whole_attention(q: Tensor, latent: Tensor, kv_b: Tensor, spec: MLASpec, segments: Segments) -> Tensor:
    """`naive_attention` of every sequence from its first token: (T, H, N + P), (T, R + P) -> (T, H, V).

    Sequences of similar length go side by side. What fills a short one up stands behind its end, where the causal mask
    hides it from all real tokens.
    """
    keys, values = _expand(latent, kv_b, spec)
    total = values.new_zeros(()).expand(values.shape)
    for group in segments.padded():
        own_q, own_k, own_v = (group.table(x).transpose(1, 2) for x in (q, keys, values))  # (S', H, L, width)
        attended = F.scaled_dot_product_attention(own_q, own_k, own_v, is_causal=True, scale=spec.softmax_scale)
        total = total + group.rows(attended.transpose(1, 2))
    return total[..., : spec.v_dim]


def _expand(latent: Tensor, kv_b: Tensor, spec: MLASpec) -> tuple[Tensor, Tensor]:
    """Keys (L, H, N + P) and values of (L, R + P); values as wide as keys, as the fused attention kernels want them.

    Columns of zeros change nothing and are cut off again.
    """
    c, shared_key = latent.split([spec.kv_rank, spec.rope_dim], -1)
    keys, values = (
        F.linear(c, kv_b).unflatten(-1, (-1, spec.nope_dim + spec.v_dim)).split([spec.nope_dim, spec.v_dim], -1)
    )
    keys = torch.cat([keys, shared_key[:, None].expand(-1, keys.shape[1], -1)], -1)
    width = spec.qk_dim - spec.v_dim
    return keys, F.pad(values, (0, width)) if width > 0 else values


def absorbed_attention(q: Tensor, latent: Tensor, lengths: Tensor | None, kv_b: Tensor, spec: MLASpec) -> Tensor:
    """One new token of each of S sequences, attending to latents: (S, H, N + P), (S, L, R + P), (S,) -> (S, H, V).

    Sequence s sees its first `lengths[s]` rows, or all (None); what stands beyond them does not matter.
    """
    q_latent, w_value = _absorb(q, kv_b, spec)
    is_beyond = None
    if lengths is not None:
        is_beyond = torch.arange(latent.shape[1], device=q.device) >= lengths[:, None]  # (S, L)
        latent = latent.masked_fill(is_beyond[..., None], 0)  # a weight of 0 would not stop a NaN
    scores = as_float((q_latent @ latent.mT) * spec.softmax_scale)
    if is_beyond is not None:
        scores = scores.masked_fill(is_beyond[:, None], -torch.inf)
    mixed = torch.softmax(scores, -1).to(q.dtype) @ latent[..., : spec.kv_rank]
    return torch.einsum("shr,hvr->shv", mixed, w_value)


def _absorb(q: Tensor, kv_b: Tensor, spec: MLASpec) -> tuple[Tensor, Tensor]:
    """Queries that read latents (S, H, R + P), and what turns a mix of latents into values (H, V, R)."""
    w_key, w_value = kv_b.view(-1, spec.nope_dim + spec.v_dim, spec.kv_rank).split([spec.nope_dim, spec.v_dim], 1)
    q_head, q_shared = q.split([spec.nope_dim, spec.rope_dim], -1)
    return torch.cat([torch.einsum("shn,hnr->shr", q_head, w_key), q_shared], -1), w_value
