"""What one operator call costs, from its arguments alone: FLOPs of matrix work, bytes moved, and its kind of work.

FLOPs count a multiplication and an addition of every product; operators that multiply no matrices count 0, since their
bytes bound them. Bytes are those of each distinct element once: an expanded tensor counts what it is expanded from, a
gather what it picks, a view nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.operators.inventory import Category

__all__ = ["ATTENTION", "categorise", "count_bytes", "count_flops", "is_view", "stored_bytes"]

aten = torch.ops.aten

Shapes = Sequence[tuple[int, ...]]

ATTENTION = aten.scaled_dot_product_attention
_MATRIX: dict[object, Callable[[Shapes], int]] = {
    aten.mm: lambda s: 2 * s[0][0] * s[0][1] * s[1][1],
    aten.addmm: lambda s: 2 * s[1][0] * s[1][1] * s[2][1],
    aten.bmm: lambda s: 2 * math.prod(s[0]) * s[1][2],
    aten.baddbmm: lambda s: 2 * math.prod(s[1]) * s[2][2],
    aten.mv: lambda s: 2 * math.prod(s[0]),
    aten.addmv: lambda s: 2 * math.prod(s[1]),
    aten.dot: lambda s: 2 * s[0][0],
    aten.vdot: lambda s: 2 * s[0][0],
    aten._int_mm: lambda s: 2 * s[0][0] * s[0][1] * s[1][1],
    aten._scaled_mm: lambda s: 2 * s[0][0] * s[0][1] * s[1][1],
    aten.convolution: lambda s: 2 * math.prod(s[1]) * s[0][0] * math.prod(s[0][2:]),
}
_BATCHED = {aten.bmm, aten.baddbmm}
_GATHERS = {aten.index, aten.index_select, aten.gather, aten.embedding, aten.take}
_PUTS = {aten.index_put, aten.index_copy, aten.scatter, aten.index_add}  # in place: only what is put moves
_FILLS = {aten.zeros, aten.ones, aten.full, aten.arange, aten.eye, aten.zeros_like, aten.ones_like, aten.full_like}
_FILLS |= {aten.new_zeros, aten.new_ones, aten.new_full, aten.fill, aten.zero}
_ALLOCATIONS = {aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided}
_FREE = _ALLOCATIONS | {aten.lift_fresh, aten.detach, aten.alias, aten._local_scalar_dense, aten._unsafe_view}
_MOVES = _GATHERS | _PUTS | _FILLS | _FREE
_MOVES |= {aten.cat, aten.stack, aten.clone, aten.copy, aten._to_copy, aten.constant_pad_nd, aten.index_fill}
_MOVES |= {aten.masked_fill, aten.repeat, aten.where, aten.repeat_interleave}
_ROUTING = {aten.topk, aten.sort, aten.argsort, aten.bincount, aten.nonzero}


def is_view(func: Any) -> bool:
    """Whether an operator only looks at its input in another way (it aliases and writes nothing)."""
    infos = [argument.alias_info for argument in func._schema.arguments]
    aliases = any(info is not None and not info.is_write for info in infos)
    return aliases and not any(info is not None and info.is_write for info in infos)


def stored_bytes(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> int:
    """Bytes of the distinct elements behind a tensor: a dimension of stride 0 repeats one of them."""
    count = 1
    for size, step in zip(shape, stride, strict=True):
        if step or not size:
            count *= size
    return count * itemsize


def _bytes_of(x: Tensor) -> int:
    return stored_bytes(x.shape, x.stride(), x.element_size())


def _base(func: Any) -> tuple[object, bool]:
    """The packet without its in-place underscore, and whether it had one."""
    packet = func.overloadpacket
    name: str = packet.__name__
    if not name.endswith("_") or name.endswith("__"):
        return packet, False
    return getattr(aten, name[:-1], packet), True


def count_flops(func: Any, inputs: Sequence[Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """FLOPs of one call; attention that is causal counts the pairs it may see, one with a mask counts all of them."""
    packet, _ = _base(func)
    if packet is ATTENTION:
        query, key, value = (tuple(x.shape) for x in inputs[:3])
        rows, seen = query[-2], key[-2]
        is_causal = bool(kwargs.get("is_causal", args[5] if len(args) > 5 else False))
        pairs = sum(min(i + 1, seen) for i in range(rows)) if is_causal else rows * seen
        return 2 * math.prod(query[:-2]) * pairs * (query[-1] + value[-1])
    formula = _MATRIX.get(packet)
    return 0 if formula is None else formula([tuple(x.shape) for x in inputs])


def count_bytes(
    func: Any, inputs: Sequence[Tensor], weights: Sequence[bool], outputs: Sequence[Tensor]
) -> tuple[int, int, int]:
    """(read, written, read from weights); `weights` says of each input whether it is one."""
    packet, is_in_place = _base(func)
    if is_view(func) or packet in _FREE:
        return 0, 0, 0
    made = sum(x.numel() * x.element_size() for x in outputs)
    if packet in _FILLS:
        return 0, made, 0
    if packet in _GATHERS:
        picked = sum(_bytes_of(x) for x in inputs[1:])
        return made + picked, made, made if weights[0] else 0
    if is_in_place:
        given = sum(_bytes_of(x) for x in inputs[1:])
        if packet in _PUTS:
            values = max((_bytes_of(x) for x in inputs[1:] if x.dtype == inputs[0].dtype), default=0)
            return given, values, 0
        if packet is aten.index_fill:
            rows = inputs[1].numel() if len(inputs) > 1 else 0
            return given, rows * made // max(1, inputs[0].shape[0]), 0
        own = 0 if packet is aten.copy else _bytes_of(inputs[0])
        return own + given, _bytes_of(inputs[0]), 0
    sizes = [_bytes_of(x) for x in inputs]
    return sum(sizes), made, sum(size for size, is_weight in zip(sizes, weights, strict=True) if is_weight)


def categorise(func: Any, area: str) -> Category:
    """What kind of work a call is, from the operator and the part of the model that makes it."""
    packet, _ = _base(func)
    is_matrix = packet in _MATRIX
    match area:
        case "dequantise":
            return "dequantise"
        case "vision":
            return "vision"
        case "norm":
            return "norm"
        case "conv":
            return "conv"
        case "routing":
            return "routing"
        case "experts" if is_matrix:
            return "grouped_gemm"
        case "linear_attention" if packet in _BATCHED:
            return "linear_attention"
        case "attention" if packet in _BATCHED or packet is aten._softmax:
            return "attention"
    if packet is ATTENTION:
        return "attention"
    if is_matrix:
        return "gemm"
    if packet in _ROUTING:
        return "routing"
    return "movement" if is_view(func) or packet in _MOVES else "elementwise"
