"""Which work goes to the kernels. Every function here answers None where torch is to do it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast

from workbench.nn.native.calls import KINDS, SCORINGS, HeadNorm, Held, Kernels, RotaryTable, kernels
from workbench.nn.pages import PageTables
from workbench.spec import Activation, MoESpec

__all__ = [
    "MAX_ROWS",
    "HeadNorm",
    "Held",
    "attend",
    "attend_in_pages",
    "end_team",
    "experts",
    "linear",
    "linears",
    "rms_norm",
    "route",
    "serves",
    "turn_heads",
]

# Rows of x up to which reading the weights costs more than multiplying by them; beyond, torch's blocked products win,
# except of 16-bit numbers on a processor without units for them, for which torch has no fast product at all.
MAX_ROWS = 16
MAX_SLOW_ROWS = 1 << 14
LEAST_WEIGHTS = 1 << 12  # of a matrix: below, the call itself is all that is measured


def end_team() -> None:
    """Before another thread takes over what this one has begun: see `docs/native.md`, threads."""
    if (found := kernels()) is not None:
        found.end_team()


def serves(x: Tensor, *others: Tensor) -> bool:
    """Whether it is worth while to prepare a call: there are kernels, and they may be asked about these."""
    return _kernels_for(x, *others) is not None


def linear(x: Tensor, held: Held | None) -> Tensor | None:
    """(..., in), a matrix (out, in) -> (..., out)."""
    found = linears(x, (held,))
    return None if found is None else found[0]


def linears(x: Tensor, matrices: Sequence[Held | None]) -> list[Tensor] | None:
    """(..., in), matrices (out, in), alike in kind -> (..., out) of each."""
    held = [each for each in matrices if each is not None]
    if len(held) < len(matrices) or (found := _kernels_for(x, *(y for each in held for y in each))) is None:
        return None
    columns, is_dense = x.shape[-1], held[0][1] is None
    num = x.numel() // columns if columns else 0
    is_enough = sum(codes.shape[0] for codes, _ in held) * columns >= LEAST_WEIGHTS
    if not (0 < num <= _max_rows(x.dtype) and is_enough):
        return None
    if not all((each[1] is None) is is_dense and _fits(each, x.dtype, columns) for each in held):
        return None
    flat = x.reshape(num, columns).contiguous()
    if not torch.autograd._profiler_enabled():
        ys = found.linears(flat, held)
    else:
        ys = []
        for each in held:  # by the name and the shapes of the operator whose work it is
            with _RecordFunctionFast("native::mm", [flat, each[0].t()]):
                ys += found.linears(flat, (each,))
    return ys if x.ndim == 2 else [y.view(*x.shape[:-1], y.shape[-1]) for y in ys]


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor | None:
    """(..., D), (D,) -> (..., D); any number of rows, so that a prompt's tokens come out as they would alone."""
    if (found := _kernels_for(x, weight)) is None or not x.numel():
        return None
    if weight.dtype is not x.dtype or weight.shape != x.shape[-1:] or not weight.is_contiguous():
        return None
    if not torch.autograd._profiler_enabled():
        return found.rms_norm(x.contiguous(), weight, eps, offset)
    with _RecordFunctionFast("native::rms_norm", [x, weight]):
        return found.rms_norm(x.contiguous(), weight, eps, offset)


def turn_heads(
    xs: Sequence[Tensor], norms: Sequence[HeadNorm | None], table: RotaryTable, *, is_interleaved: bool
) -> list[Tensor] | None:
    """(T, heads, W) each, normed where there is a norm, then turned by cos and sin (T, P / 2) -> the same."""
    weights = [norm[0] for norm in norms if norm is not None]
    if (found := _kernels_for(xs[0], *xs[1:], *weights, *table)) is None:
        return None
    (num, _, width), dtype = xs[0].shape, xs[0].dtype
    if not all(x.dtype is dtype and x.shape[::2] == (num, width) and x.stride(2) == 1 and x.numel() for x in xs):
        return None
    if not all(w.dtype is dtype and w.shape == (width,) and w.is_contiguous() for w in weights):
        return None
    pairs = table[0].shape[-1]
    if 2 * pairs > width or not all(
        t.dtype is torch.float32 and t.shape == (num, pairs) and t.is_contiguous() for t in table
    ):
        return None
    if not torch.autograd._profiler_enabled():
        return found.turn_heads(xs, norms, table, is_interleaved=is_interleaved)
    with _RecordFunctionFast("native::mul", list(xs)):  # what most of a rotation is
        return found.turn_heads(xs, norms, table, is_interleaved=is_interleaved)


def route(
    x: Tensor, weight: Tensor, bias: Tensor | None, correction: Tensor | None, spec: MoESpec
) -> tuple[Tensor, Tensor] | None:
    """(T, D), (E, D), biases (E,) of the logits and of the choice -> ids (T, K) int64, weights (T, K) float32."""
    if (found := _kernels_for(x, weight, bias, correction)) is None:
        return None
    if spec.num_groups > 1 or spec.scoring not in SCORINGS or x.ndim != 2 or not x.numel():
        return None
    held = [y for y in (weight, bias) if y is not None]
    if not all(y.dtype is x.dtype and y.is_contiguous() for y in held) or weight.shape[1] != x.shape[1]:
        return None
    if correction is not None and not (correction.dtype is torch.float32 and correction.is_contiguous()):
        return None
    if not 0 < spec.top_k <= weight.shape[0]:
        return None
    if not torch.autograd._profiler_enabled():
        return found.route(x.contiguous(), weight, bias, correction, spec)
    with _RecordFunctionFast("native::topk", [x, weight.t()]):
        return found.route(x.contiguous(), weight, bias, correction, spec)


def experts(
    x: Tensor,
    slots: Tensor,
    matrices: tuple[Held | None, Held | None, Held | None],
    biases: Sequence[Tensor | None],
    activation: Activation,
    *,
    weights: Tensor | None = None,
    is_summed: bool = False,
) -> Tensor | None:
    """(T, L) or, each visit with an input of its own, (T * K, L), and slots (T, K) int64 -> (T, K, L), zeros at -1.

    w1 and w3 (E, F, L), w2 (E, L, F); b1, b2 and b3 in the dtype of `x`. With `is_summed` -> (T, L) float32: the sum
    over the visits in their order, each taken by its weight, (T, K) float32, where there are weights.
    """
    w1, w2, w3 = matrices
    if w1 is None or w2 is None or w3 is None:
        return None
    tensors = [y for y in (*w1, *w2, *w3, *biases) if y is not None]
    if (found := _kernels_for(x, slots, weights, *tensors)) is None:
        return None
    num, width = slots.shape[0], w1[0].shape[1]
    is_few = 0 < num <= _max_rows(x.dtype) and slots.shape[1] > 0 and width * x.shape[-1] >= LEAST_WEIGHTS
    is_alike = (w1[1] is None) == (w2[1] is None) == (w3[1] is None)
    if not (is_few and is_alike and all(b is None or (b.dtype is x.dtype and b.is_contiguous()) for b in biases)):
        return None
    (num_experts, width), latent = w1[0].shape[:2], x.shape[-1]
    up, down = (num_experts, width), (num_experts, latent)
    if not (_fits(w1, x.dtype, latent, up) and _fits(w2, x.dtype, width, down) and _fits(w3, x.dtype, latent, up)):
        return None
    if slots.dtype is not torch.int64 or x.shape[0] not in (num, slots.numel()):
        return None
    if weights is not None and (weights.dtype is not torch.float32 or weights.shape != slots.shape):
        return None
    weights = None if weights is None else weights.contiguous()
    x, slots, three = x.contiguous(), slots.contiguous(), (w1, w2, w3)
    if not torch.autograd._profiler_enabled():
        return found.experts(x, slots, three, biases, activation, weights=weights, is_summed=is_summed)
    with _RecordFunctionFast("native::experts", [x, slots, w1[0], w2[0], w3[0]]):
        return found.experts(x, slots, three, biases, activation, weights=weights, is_summed=is_summed)


def attend(
    q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], *, scale: float, sinks: Tensor | None = None
) -> Tensor | None:
    """One new token of each of S sequences over all the rows given: (S, H, W), (L, G, W) and (L, G, V) each ->
    (S, H, V). Query head h reads key-value head h // (H / G); `sinks` (H,)."""
    if not keys or not all(x.shape[0] for x in keys):
        return None
    return _attend(q, keys, values, scale, sinks, None, None)


def attend_in_pages(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: PageTables,
    seen: Tensor,
    *,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor | None:
    """As `attend`, reading rows where they lie in a pool: (S, H, W), (rows, G, W), (rows, G, V) -> (S, H, V).

    `seen` (S, 3) int64, of each sequence (slot, first, stop): it sees tokens [first, stop) of that slot, at least one,
    all of which have rows.
    """
    return _attend(q, (keys,), (values,), scale, sinks, tables, seen)


def _attend(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    scale: float,
    sinks: Tensor | None,
    tables: PageTables | None,
    seen: Tensor | None,
) -> Tensor | None:
    if (found := _kernels_for(q, *keys, *values)) is None:
        return None
    for table in (keys, values):
        strides, dtype = table[0].stride(), q.dtype
        if strides[-1] != 1 or any(x.dtype is not dtype or x.stride() != strides for x in table):
            return None
    (num_kv_heads, width), num_heads = keys[0].shape[1:], q.shape[1]
    if q.shape[2] != width or values[0].shape[1] != num_kv_heads or num_heads % num_kv_heads:
        return None
    if sinks is not None and sinks.shape != (num_heads,):
        return None
    own_sinks = None if sinks is None else sinks.detach().float().contiguous()
    if not torch.autograd._profiler_enabled():
        return found.attend(q.contiguous(), keys, values, scale, own_sinks, tables, seen)
    longest = None if seen is None else int((seen[:, 2] - seen[:, 1]).max())  # not the whole pool, which nobody reads
    with _RecordFunctionFast("native::scaled_dot_product_attention", [q, keys[0][:longest], values[0][:longest]]):
        return found.attend(q.contiguous(), keys, values, scale, own_sinks, tables, seen)


def _kernels_for(x: Tensor, *others: Tensor | None) -> Kernels | None:
    """The kernels, where they may be asked at all.

    Not while a dispatch mode listens: what it records, counts or replaces are operators of torch.
    """
    if not x.is_cpu or x.dtype not in KINDS or type(x) is not Tensor or torch._C._len_torch_dispatch_stack():
        return None
    may_need_gradients = torch.is_grad_enabled()
    if may_need_gradients and x.requires_grad:
        return None
    for other in others:
        if other is not None and (not other.is_cpu or (may_need_gradients and other.requires_grad)):
            return None
    return kernels()


def _max_rows(dtype: torch.dtype) -> int:
    return MAX_ROWS if _has_fast_products(dtype) else MAX_SLOW_ROWS


@cache
def _has_fast_products(dtype: torch.dtype) -> bool:
    """Whether torch multiplies matrices of this kind by the processor's own units."""
    if dtype is torch.float32:
        return True
    test = "_is_mkldnn_bf16_supported" if dtype is torch.bfloat16 else "_is_mkldnn_fp16_supported"
    return bool(getattr(torch.ops.mkldnn, test)())


def _fits(held: Held, dtype: torch.dtype, columns: int, rows: tuple[int, ...] | None = None) -> bool:
    """Whether a matrix, or a stack whose other dimensions are `rows`, may be read at all: a kernel does not look."""
    codes, scales = held
    if rows is not None and codes.shape[:-1] != rows:
        return False
    if scales is None:
        return codes.dtype is dtype and codes.shape[-1] == columns and codes.is_contiguous()
    is_alike = columns % 2 == 0 and codes.shape[-1] == columns // 2
    return is_alike and codes.is_contiguous() and scales.is_contiguous()
