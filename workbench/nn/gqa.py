"""Grouped-query attention: H query heads share G key-value heads, with the options that families differ in.

T tokens, H query and G key-value heads held here, W width of a query or key, V width of a value.

    q, k, v = W_q x + b_q, W_k x + b_k, W_v x + b_v
    q, k    = norm(q), norm(k)                            per head, or across all heads of all ranks
    q, k    = rotate(q), rotate(k)                        where a family clips q, k and v, it does so before this
    y       = W_o softmax(q k^T W^-1/2, sink) v + b_o     a sink takes its share of the softmax and adds nothing

Keys that are seen: all up to the own one, or those of a window, or (`chunk`) those of the same aligned block of
positions. Without a learned weight q and k are normed after the rotation; where a family has a temperature (f, s),
queries at position p are then scaled by 1 + s log(1 + floor((p + 1) / f)): attention over long texts stays sharp.

With an output gate W_q gives query and gate of each head, one behind the other, and sigmoid(gate) scales the head's
output before W_o; the gate is neither normed nor rotated.

Query head h reads key-value head h // (H / G). Where a tensor-parallel group has more ranks than there are key-value
heads, neighbours hold the same one. Source: arXiv 2305.13245; sinks, arXiv 2309.17453 and the gpt-oss code.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.nn import native, workspace
from workbench.nn.batch import Segments
from workbench.nn.cache import Cache
from workbench.nn.linear import Linear, is_watched, products
from workbench.nn.norm import AcrossHeadsRMSNorm, HeadRMSNorm, normalise
from workbench.nn.precision import Precision, as_float
from workbench.nn.rotary import rotary_table, rotate
from workbench.nn.tensor_parallel import LOCAL, TensorParallel
from workbench.spec import GQASpec

__all__ = ["GQA", "attend", "attend_all", "attend_chunk", "attention_reference"]

SCORE_BYTES = 16  # of a query and a key where there is a sink: fp32 scores, beside the sink, their softmax; the mask


class GQA(nn.Module):
    """(T, D_model) -> (T, D_model). Head counts follow from the weights held here."""

    def __init__(self, spec: GQASpec, dim: int, layer_idx: int, precision: Precision):
        super().__init__()
        self.spec, self.layer_idx = spec, layer_idx
        scheme, dtype, bias = precision.projection_scheme, precision.dtype, spec.has_bias
        q_width, k_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        v_width, out_width = spec.num_kv_heads * spec.v_dim, spec.num_heads * spec.v_dim
        self.q_proj = Linear(
            q_width * (2 if spec.has_output_gate else 1), dim, scheme=scheme, dtype=dtype, has_bias=bias
        )
        self.k_proj = Linear(k_width, dim, scheme=scheme, dtype=dtype, has_bias=bias)
        self.v_proj = Linear(v_width, dim, scheme=scheme, dtype=dtype, has_bias=bias)
        self.o_proj = Linear(dim, out_width, scheme=scheme, dtype=dtype, has_bias=spec.has_output_bias)
        self.q_norm: HeadRMSNorm | AcrossHeadsRMSNorm | None = None
        self.k_norm: HeadRMSNorm | AcrossHeadsRMSNorm | None = None
        if spec.qk_norm == "head":
            self.q_norm = HeadRMSNorm(spec.head_dim, spec.qk_norm_eps, dtype, offset=spec.qk_norm_offset)
            self.k_norm = HeadRMSNorm(spec.head_dim, spec.qk_norm_eps, dtype, offset=spec.qk_norm_offset)
        elif spec.qk_norm == "full":
            self.q_norm = AcrossHeadsRMSNorm(spec.num_heads, spec.head_dim, spec.qk_norm_eps, dtype)
            self.k_norm = AcrossHeadsRMSNorm(spec.num_kv_heads, spec.head_dim, spec.qk_norm_eps, dtype)
        self.sinks = nn.Parameter(torch.empty(spec.num_heads, dtype=dtype)) if spec.has_sinks else None
        self.tp: TensorParallel = LOCAL

    def forward(self, x: Tensor, segments: Segments, cache: Cache | None) -> Tensor:
        x = self.tp.enter(x)
        (queries, keys, values), gate = products(x, (self.q_proj, self.k_proj, self.v_proj)), None
        if self.spec.has_output_gate:
            both = queries.unflatten(-1, (-1, 2, self.spec.head_dim))  # (T, H, query | gate, W)
            queries, gate = (y.flatten(-2) for y in both.unbind(-2))
        q, k = (y.unflatten(-1, (-1, self.spec.head_dim)) for y in (queries, keys))
        v = values.unflatten(-1, (-1, self.spec.v_dim))
        q, k, v = self._placed(q, k, v, segments)
        if self.spec.qk_norm == "l2":
            q, k = (normalise(y, self.spec.qk_norm_eps).to(y.dtype) for y in (q, k))
        if (temperature := self.spec.temperature) is not None:
            q = (q * _sharpness(segments.positions, *temperature)[:, None, None]).to(q.dtype)
        if cache is not None:
            cache.append_kv(self.layer_idx, segments.token_slots, segments.positions, k, v)
        attended = self._attend(q, k, v, segments, cache).flatten(-2)
        y = self.tp.reduce(self.o_proj.product(attended if gate is None else attended * torch.sigmoid(gate)))
        return y if self.o_proj.bias is None else y + self.o_proj.bias.to(y.dtype)

    def _placed(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, Tensor, Tensor]:
        """(T, H, W), (T, G, W), (T, G, V): q and k normed and turned, all three clipped where the family does so."""
        rope, limit = self.spec.rope, self.spec.qkv_limit
        table = None if rope is None else rotary_table(rope, segments)
        if rope is not None and table is not None and limit is None and (norms := self._head_norms) is not None:
            turned = native.turn_heads((q, k), norms, table, is_interleaved=rope.is_interleaved)
            if turned is not None:
                return turned[0], turned[1], v
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if limit is not None:
            q, k, v = (y.clamp(-limit, limit) for y in (q, k, v))
        if rope is not None and table is not None:
            q, k = (rotate(y, table, is_interleaved=rope.is_interleaved) for y in (q, k))
        return q, k, v

    @property
    def _head_norms(self) -> list[native.HeadNorm | None] | None:
        """The norms of q and k as a kernel takes them; None where they are of another kind or somebody watches."""
        norms: list[native.HeadNorm | None] = []
        for norm in (self.q_norm, self.k_norm):
            if isinstance(norm, AcrossHeadsRMSNorm) or (norm is not None and is_watched(norm)):
                return None
            norms.append(None if norm is None else (norm.weight, norm.eps, norm.offset))
        return norms

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, cache: Cache | None) -> Tensor:
        """(T, H, W), (T, G, W), (T, G, V) -> (T, H, V), each sequence for itself."""
        attend_own = partial(attend, window=self.spec.window, chunk=self.spec.chunk, sinks=self.sinks)
        if cache is None:
            total = v.new_zeros(()).expand(*q.shape[:-1], self.spec.v_dim)
            for group in segments.padded():  # what fills a short sequence up stands behind its end, unseen
                attended = attend_own(group.table(q), group.table(k), group.table(v), starts=None)
                total = total + group.rows(attended)
            return total
        lengths = [start + new for start, new in zip(segments.starts, segments.lengths, strict=True)]
        decoded = self._decode(q, segments, cache, lengths)
        if segments.longest <= 1:
            return decoded
        pieces, singles = [], iter(decoded.split(1))
        for s, length in enumerate(lengths):
            if segments.lengths[s] == 1:
                pieces.append(next(singles))
                continue
            keys, values = cache.kv_view(self.layer_idx, segments.slots[s], length)
            starts, new, spec = segments.table([segments.starts[s]]), q[segments.rows_of(s)], self.spec
            more = {"window": spec.window, "chunk": spec.chunk}
            pieces.append(attend_chunk(new, keys, values, starts=starts, sinks=self.sinks, **more))
        return torch.cat(pieces)

    def _decode(self, q: Tensor, segments: Segments, cache: Cache, lengths: list[int]) -> Tensor:
        """All sequences of one new token at once: -> (their number, H, V)."""
        sequences = [s for s, length in enumerate(segments.lengths) if length == 1]
        if sequences and native.serves(q):
            new = q if len(sequences) == len(q) else q[segments.single_rows]
            if (y := self._decode_natively(new, sequences, segments, cache, lengths)) is not None:
                return y
        if len(sequences) == 1:  # its own rows and no others: nothing is copied and nothing masked
            (s,) = sequences
            keys, values = self._seen(cache, segments.slots[s], lengths[s])
            return attend_all(q[segments.rows_of(s)], keys[None], values[None], sinks=self.sinks)
        visible = [lengths[s] for s in sequences]
        keys, values = cache.kv(self.layer_idx, segments.slot_index[segments.singles], max(visible, default=0))
        starts = segments.table(length - 1 for length in visible)
        # What an ended sequence left beyond the end (even NaN) must not reach the sum: a weight of 0 would not stop it.
        is_beyond = torch.arange(keys.shape[1], device=q.device) > starts[:, None]
        values = values.masked_fill(is_beyond[..., None, None], 0)
        spec, new = self.spec, q[segments.single_rows][:, None]
        attended = attend(new, keys, values, starts=starts, window=spec.window, chunk=spec.chunk, sinks=self.sinks)
        return attended[:, 0]

    def _decode_natively(
        self, q: Tensor, sequences: list[int], segments: Segments, cache: Cache, lengths: list[int]
    ) -> Tensor | None:
        """The same by a kernel, reading rows where they lie unless they are codes: (S, H, W) -> (S, H, V)."""
        scale = q.shape[-1] ** -0.5
        if (place := cache.kv_in_place(self.layer_idx)) is not None:
            spans = [(segments.slots[s], self._first_seen(lengths[s]), lengths[s]) for s in sequences]
            seen = segments.once(("seen", self.spec.window, self.spec.chunk), lambda: segments.table(spans))
            return native.attend_in_pages(q, *place, seen, scale=scale, sinks=self.sinks)
        keys, values = zip(*(self._seen(cache, segments.slots[s], lengths[s]) for s in sequences), strict=True)
        return native.attend(q, keys, values, scale=scale, sinks=self.sinks)

    def _seen(self, cache: Cache, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values that the last of `length` tokens sees: (L, G, W), (L, G, V)."""
        keys, values = cache.kv_view(self.layer_idx, slot, length)
        first = self._first_seen(length)
        return keys[first:], values[first:]

    def _first_seen(self, length: int) -> int:
        """The first token that the last of `length` tokens sees."""
        first = 0 if self.spec.window is None else max(0, length - self.spec.window)
        chunk = self.spec.chunk
        return first if chunk is None else max(first, (length - 1) // chunk * chunk)


def _sharpness(positions: Tensor, floor: float, scale: float) -> Tensor:
    """(T,) -> (T,) float32."""
    return 1 + scale * torch.log1p(torch.floor((positions.float() + 1) / floor))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    starts: Tensor | None,
    window: int | None = None,
    chunk: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of S sequences: (S, n, H, W), (S, L, G, W), (S, L, G, V) -> (S, n, H, V).

    New token i of sequence s stands at position `starts[s] + i` (None: all from 0) and sees keys up to its own, with a
    `window` those less than that far back, with a `chunk` those of its own block of positions. `sinks` (H,).
    """
    share = q.shape[2] // k.shape[2]
    reaches_all = all(span is None or span >= k.shape[1] for span in (window, chunk))
    is_plain = starts is None and sinks is None and reaches_all
    mask = None if is_plain else _visible(q.shape[1], k.shape[1], starts, window, chunk, q.device)
    q, k, v = (y.transpose(1, 2) for y in (q, k, v))
    if share > 1 and q.shape[2] == 1 and mask is not None:
        return _weigh(_fold(q, share), k, v, mask, sinks=_fold_sinks(sinks, share)).flatten(1, 2)[:, None]
    if share > 1:
        k, v = (y.repeat_interleave(share, 1) for y in (k, v))
    return _weigh(q, k, v, mask, is_causal=mask is None, sinks=_fold_sinks(sinks, 1)).transpose(1, 2)


def attend_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    starts: Tensor,
    window: int | None = None,
    chunk: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`attend` of one sequence whose last n of L tokens are new: (n, H, W), (L, G, W), (L, G, V) -> (n, H, V).

    Beyond `nn.workspace`'s limit one key-value head is taken at a time, as it lies in the cache; queries in blocks, and
    no keys from before a window or chunk.
    """
    (num_new, num_heads, _), num_all = q.shape, k.shape[0]
    share, itemsize = num_heads // k.shape[1], q.element_size()
    needed = workspace.mask_bytes(num_new, num_all, itemsize)
    if share > 1:
        needed += num_all * num_heads * (k.shape[-1] + v.shape[-1]) * itemsize
    if sinks is not None:
        needed += num_heads * num_new * num_all * SCORE_BYTES
    if workspace.is_within(needed):
        return attend(q[None], k[None], v[None], starts=starts, window=window, chunk=chunk, sinks=sinks)[0]
    begin, pieces = num_all - num_new, []
    edges = [num_all] if chunk is None else [*range(begin // chunk * chunk + chunk, num_all, chunk), num_all]
    for first, end in pairwise([begin, *edges]):  # places of new tokens, all in one chunk
        seen = 0 if window is None else max(0, first - window + 1)
        seen = seen if chunk is None else max(seen, first // chunk * chunk)
        own, new = slice(first - begin, end - begin), end - first
        masks = workspace.BlockMasks(new, end - seen, window=window, like=q) if sinks is None else None
        by_head = []
        for head, heads in enumerate(slice(i, i + share) for i in range(0, num_heads, share)):
            own_q, own_k, own_v = q[own, heads], k[seen:end, head], v[seen:end, head]
            if masks is not None:
                by_head.append(_attend_head(own_q, own_k, own_v, masks))
            elif sinks is not None:
                by_head.append(_attend_head_with_sinks(own_q, own_k, own_v, window, sinks[heads]))
        pieces.append(torch.cat(by_head, 1))
    return torch.cat(pieces)


def _attend_head(q: Tensor, k: Tensor, v: Tensor, masks: workspace.BlockMasks) -> Tensor:
    """The R query heads of one key-value head: (n, R, W), (L, W), (L, V) -> (n, R, V)."""
    width = q.shape[-1]
    wide = F.pad(v, (0, width - v.shape[-1])) if width > v.shape[-1] else v  # as in `_weigh`
    keys, values = (x[:, None].expand(-1, q.shape[1], -1) for x in (k, wide))
    return workspace.attend_in_blocks(q, keys, values, masks, scale=width**-0.5)[..., : v.shape[-1]]


def _attend_head_with_sinks(q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor) -> Tensor:
    """`_attend_head` with sinks (R,): the scores of a block of queries at a time."""
    (num_new, share, _), num_all = q.shape, k.shape[0]
    pieces = []
    for rows in workspace.spans(num_new, share * num_all * SCORE_BYTES):
        num, first = rows.stop - rows.start, num_all - num_new + rows.start
        is_seen = torch.ones(num, num_all, dtype=torch.bool, device=q.device).tril_(first)
        if window is not None:
            is_seen.triu_(first - window + 1)
        folded = q[rows].transpose(0, 1).flatten(0, 1)  # heads are rows of one product, and no key is copied
        own_sinks = sinks.repeat_interleave(num)[None]
        mask = is_seen.repeat(share, 1)[None, None]
        y = _weigh(folded[None, None], k[None, None], v[None, None], mask, sinks=own_sinks)
        pieces.append(y[0, 0].unflatten(0, (share, num)).transpose(0, 1))
    return torch.cat(pieces)


def attend_all(q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None) -> Tensor:
    """One token of each of S sequences over all the rows given: (S, H, W), (S, L, G, W), (S, L, G, V) -> (S, H, V)."""
    share = q.shape[1] // k.shape[2]
    q, k, v = q[:, :, None], k.transpose(1, 2), v.transpose(1, 2)
    return _weigh(_fold(q, share), k, v, None, sinks=_fold_sinks(sinks, share)).flatten(1, 2)


def _fold(q: Tensor, share: int) -> Tensor:
    """(S, H, 1, W) -> (S, G, H / G, W): heads that read the same keys are rows of one product, and no key is copied."""
    return q[:, :, 0].unflatten(1, (-1, share))


def _fold_sinks(sinks: Tensor | None, share: int) -> Tensor | None:
    return None if sinks is None else sinks.unflatten(0, (-1, share))


def _weigh(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, is_causal: bool = False, sinks: Tensor | None
) -> Tensor:
    """(S, G, R, W), (S, G, L, W), (S, G, L, V), mask (S or 1, 1, R or 1, L) -> (S, G, R, V); `sinks` (G, R or 1)."""
    scale = q.shape[-1] ** -0.5
    if sinks is None:
        width = k.shape[-1] - v.shape[-1]  # the fused kernels want values as wide as keys; zeros are cut off again
        wide = F.pad(v, (0, width)) if width > 0 else v
        y = F.scaled_dot_product_attention(q, k, wide, attn_mask=mask, is_causal=is_causal, scale=scale)
        return y[..., : v.shape[-1]]
    scores = as_float(q @ k.mT) * scale
    scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    extra = as_float(sinks)[..., None].expand(*scores.shape[:-1], 1)
    weights = torch.softmax(torch.cat([scores, extra], -1), -1)[..., :-1]
    return weights.to(v.dtype) @ v


def _visible(
    num_new: int, num_all: int, starts: Tensor | None, window: int | None, chunk: int | None, device: torch.device
) -> Tensor:
    """(S or 1, 1, n, L) bool."""
    first = torch.zeros(1, dtype=torch.int64, device=device) if starts is None else starts
    position = first[:, None, None, None] + torch.arange(num_new, device=device)[:, None]
    keys = torch.arange(num_all, device=device)
    back = position - keys
    is_seen = (back >= 0) if window is None else (back >= 0) & (back < window)
    return is_seen if chunk is None else is_seen & (position // chunk == keys // chunk)


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    start: int = 0,
    window: int | None = None,
    chunk: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """One sequence of `attend` in float64, one query at a time: (n, H, W), (L, G, W), (L, G, V) -> (n, H, V)."""
    q, k, v = q.double(), k.double(), v.double()
    out, share = q.new_zeros(*q.shape[:2], v.shape[-1]), q.shape[1] // k.shape[1]
    for i, head in ((i, head) for i in range(q.shape[0]) for head in range(q.shape[1])):
        last = start + i
        first = 0 if window is None else max(0, last - window + 1)
        first = first if chunk is None else max(first, last - last % chunk)
        scores = k[first : last + 1, head // share] @ q[i, head] * q.shape[-1] ** -0.5
        weights = (scores - scores.max()).exp()
        total = weights.sum() + (0.0 if sinks is None else (sinks[head].double() - scores.max()).exp())
        out[i, head] = weights / total @ v[first : last + 1, head // share]
    return out
