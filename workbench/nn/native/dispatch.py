"""Which work goes to the kernels. Every function here answers None where torch is to do it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast

from workbench.nn.native.calls import KINDS, Held, Kernels, kernels
from workbench.spec import Activation

__all__ = ["MAX_ROWS", "Held", "attend", "experts", "linear", "serves"]

# Rows of x up to which reading the weights costs more than multiplying by them; beyond, torch's blocked products win,
# except of 16-bit numbers on a processor without units for them, for which torch has no fast product at all.
MAX_ROWS = 16
MAX_SLOW_ROWS = 1 << 14
LEAST_WEIGHTS = 1 << 12  # of a matrix: below, the call itself is all that is measured


def serves(x: Tensor, *others: Tensor) -> bool:
    """Whether it is worth while to prepare a call: there are kernels, and they may be asked about these."""
    return _kernels_for(x, *others) is not None


def linear(x: Tensor, held: Held | None) -> Tensor | None:
    """(..., in), a matrix (out, in) -> (..., out)."""
    if held is None or (found := _kernels_for(x, *held)) is None:
        return None
    codes = held[0]
    columns, rows = x.shape[-1], codes.shape[0]
    num = x.numel() // columns if columns else 0
    if not (0 < num <= _max_rows(x.dtype) and rows * columns >= LEAST_WEIGHTS and _fits(held, x.dtype)):
        return None
    flat = x.reshape(num, columns).contiguous()
    if not torch.autograd._profiler_enabled():
        return found.linear(flat, held).view(*x.shape[:-1], rows)
    with _RecordFunctionFast("native::mm", [flat, codes.t()]):  # as the operator whose work it is
        return found.linear(flat, held).view(*x.shape[:-1], rows)


def experts(
    x: Tensor,
    slots: Tensor,
    matrices: tuple[Held | None, Held | None, Held | None],
    biases: Sequence[Tensor | None],
    activation: Activation,
) -> Tensor | None:
    """(T, L) or, each visit with an input of its own, (T * K, L), and slots (T, K) int64 -> (T, K, L), zeros at -1.

    w1 and w3 (E, F, L), w2 (E, L, F); b1, b2 and b3 in the dtype of `x`.
    """
    w1, w2, w3 = matrices
    if w1 is None or w2 is None or w3 is None:
        return None
    tensors = [y for y in (*w1, *w2, *w3, *biases) if y is not None]
    if (found := _kernels_for(x, slots, *tensors)) is None:
        return None
    num, width = slots.shape[0], w1[0].shape[1]
    is_few = 0 < num <= _max_rows(x.dtype) and slots.shape[1] > 0 and width * x.shape[-1] >= LEAST_WEIGHTS
    is_alike = (w1[1] is None) == (w2[1] is None) == (w3[1] is None) and all(_fits(w, x.dtype) for w in (w1, w2, w3))
    if not (is_few and is_alike and all(b is None or (b.dtype is x.dtype and b.is_contiguous()) for b in biases)):
        return None
    three = (w1, w2, w3)
    if not torch.autograd._profiler_enabled():
        return found.experts(x.contiguous(), slots.contiguous(), three, biases, activation)
    with _RecordFunctionFast("native::experts", [x, slots, w1[0], w2[0], w3[0]]):
        return found.experts(x.contiguous(), slots.contiguous(), three, biases, activation)


def attend(
    q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], *, scale: float, sinks: Tensor | None = None
) -> Tensor | None:
    """One new token of each of S sequences over all the rows given: (S, H, W), (L, G, W) and (L, G, V) each ->
    (S, H, V). Query head h reads key-value head h // (H / G); `sinks` (H,)."""
    if not keys or (found := _kernels_for(q, *keys, *values)) is None:
        return None
    for table in (keys, values):
        strides, dtype = table[0].stride(), q.dtype
        if strides[-1] != 1 or any(x.dtype is not dtype or x.stride() != strides or not x.shape[0] for x in table):
            return None
    own_sinks = None if sinks is None else sinks.detach().float().contiguous()
    if not torch.autograd._profiler_enabled():
        return found.attend(q.contiguous(), keys, values, scale, own_sinks)
    with _RecordFunctionFast("native::scaled_dot_product_attention", [q, keys[0], values[0]]):
        return found.attend(q.contiguous(), keys, values, scale, own_sinks)


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


def _fits(held: Held, dtype: torch.dtype) -> bool:
    codes, scales = held
    if scales is None:
        return codes.dtype is dtype and codes.is_contiguous()
    return codes.is_contiguous() and scales.is_contiguous()
