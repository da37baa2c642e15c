"""Differentiable collectives, in pairs that are each other's backward.

Convention: a value that is whole on several ranks has its whole gradient on each of them. Hence

    copy          identity forward, sum backward      where a whole value enters work that ranks share
    reduce        sum forward, identity backward      where the shared work's partial results become whole again
    gather/split  concatenation in rank order / own piece
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.parallel.collectives import Group

__all__ = [
    "copy_all_to",
    "copy_to",
    "exchange_rows",
    "gather_dim",
    "gather_rows",
    "gather_tokens",
    "keep_connected",
    "pack_rows",
    "reduce_from",
    "return_tokens",
    "split_dim",
    "split_rows",
    "unpack_rows",
]


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(ctx.group.all_reduce(grad) for grad in grads))


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return group.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return torch.cat(group.all_gather(x).unbind(0), dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _own_piece(grad, ctx.dim, ctx.group), None, None


class _SplitDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _own_piece(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return torch.cat(ctx.group.all_gather(grad).unbind(0), ctx.dim), None, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: tuple[int, ...], group: Group) -> Tensor:
        ctx.counts, ctx.rank = counts, group.rank
        return group.gather_rows(x, counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _own_rows(grad, ctx.counts, ctx.rank).contiguous(), None, None


class _SplitRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: tuple[int, ...], group: Group) -> Tensor:
        ctx.counts, ctx.group = counts, group
        return _own_rows(x, counts, group.rank).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.gather_rows(grad, ctx.counts), None, None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, latent: Tensor, weights: Tensor, ids: Tensor, counts: tuple[int, ...], across: Group, experts: Group
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.counts, ctx.across, ctx.experts = counts, across, experts
        parts = (latent, weights, ids.to(torch.int32))
        latent_all, weights_all, ids_all = unpack_rows(across.gather_rows(pack_rows(*parts), counts), *parts)
        ids_all = ids_all.to(torch.int64)
        ctx.mark_non_differentiable(ids_all)
        return latent_all, weights_all, ids_all

    @staticmethod
    def backward(ctx: Any, grad_latent: Tensor, grad_weights: Tensor, _ids: Tensor) -> tuple[Tensor | None, ...]:
        own = [
            _own_rows(ctx.experts.all_reduce(grad), ctx.counts, ctx.across.rank).contiguous()
            for grad in (grad_latent, grad_weights)
        ]
        return own[0], own[1], None, None, None, None


class _ReturnTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, counts: tuple[int, ...], across: Group, experts: Group) -> Tensor:
        ctx.counts, ctx.across = counts, across
        return _own_rows(experts.all_reduce(partial), counts, across.rank).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.across.gather_rows(grad.contiguous(), ctx.counts), None, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: Group, sends: tuple[int, ...], receives: tuple[int, ...], *parts: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.sends, ctx.receives = group, sends, receives
        out = unpack_rows(group.exchange(pack_rows(*parts), sends, receives), *parts)
        ctx.is_float = [part.is_floating_point() for part in parts]
        ctx.mark_non_differentiable(*(t for t, is_float in zip(out, ctx.is_float, strict=True) if not is_float))
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        floats = [grad for grad, is_float in zip(grads, ctx.is_float, strict=True) if is_float]
        back = iter(unpack_rows(ctx.group.exchange(pack_rows(*floats), ctx.receives, ctx.sends), *floats))
        return (None, None, None, *(next(back) if is_float else None for is_float in ctx.is_float))


def copy_to(x: Tensor, group: Group) -> Tensor:
    """Identity; backward sums the gradients of all ranks."""
    return x if group.size == 1 else _Copy.apply(group, x)[0]


def copy_all_to(tensors: Sequence[Tensor], group: Group) -> tuple[Tensor, ...]:
    """`copy_to` of several tensors, whose backward sums in this order on every rank."""
    return tuple(tensors) if group.size == 1 else _Copy.apply(group, *tensors)


def keep_connected(result: Tensor, *inputs: Tensor) -> Tensor:
    """`result`, made to depend on `inputs` where it does not.

    A rank whose experts got no row computes nothing from its inputs. Its backward would then skip the collectives that
    the other ranks enter, and they would wait for ever; a sum of no elements keeps the path without changing a value.
    """
    if result.requires_grad or not torch.is_grad_enabled():
        return result
    return result + sum(x[:0].sum() for x in inputs if x.requires_grad)


def reduce_from(x: Tensor, group: Group) -> Tensor:
    """Sum over the ranks; backward is the identity."""
    return x if group.size == 1 else _Reduce.apply(x, group)


def gather_dim(x: Tensor, dim: int, group: Group) -> Tensor:
    """Equal pieces concatenated along `dim` in rank order; backward keeps the own piece."""
    return x if group.size == 1 else _GatherDim.apply(x, dim, group)


def split_dim(x: Tensor, dim: int, group: Group) -> Tensor:
    """The own piece of `dim`; backward gathers. The extent must be a multiple of the group size."""
    return x if group.size == 1 else _SplitDim.apply(x, dim, group)


def gather_rows(x: Tensor, counts: Sequence[int], group: Group) -> Tensor:
    """Pieces of `counts[r]` rows one behind another; backward keeps the own rows."""
    return x if group.size == 1 else _GatherRows.apply(x, tuple(counts), group)


def split_rows(x: Tensor, counts: Sequence[int], group: Group) -> Tensor:
    """The own rows; backward gathers."""
    return x if group.size == 1 else _SplitRows.apply(x, tuple(counts), group)


def gather_tokens(
    latent: Tensor, weights: Tensor, ids: Tensor, *, counts: Sequence[int], across: Group, experts: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """(T, L), (T, K) fp32, (T, K) of every replica in `across`, one behind another, in one all-gather.

    Every rank of `experts` works on the result, so backward sums over `experts` and keeps the own rows. Ids travel as
    int32 and come back as int64.
    """
    return _GatherTokens.apply(latent, weights, ids, tuple(counts), across, experts)


def return_tokens(partial: Tensor, *, counts: Sequence[int], across: Group, experts: Group) -> Tensor:
    """Sum of the partial results of all ranks of `experts`, own rows only; backward gathers over `across`."""
    return _ReturnTokens.apply(partial, tuple(counts), across, experts)


def exchange_rows(group: Group, sends: Sequence[int], receives: Sequence[int], *parts: Tensor) -> tuple[Tensor, ...]:
    """All-to-all of rows of several tensors in one exchange; backward runs the reverse exchange on the float parts."""
    return parts if group.size == 1 else _Exchange.apply(group, tuple(sends), tuple(receives), *parts)


def pack_rows(*parts: Tensor) -> Tensor:
    """(T, ...) tensors of any dtypes side by side as bytes: (T, bytes of one row of each) uint8."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([_row_bytes(part.detach()) for part in parts], dim=1)


def unpack_rows(packed: Tensor, *like: Tensor) -> list[Tensor]:
    """Inverse of `pack_rows`; `like` gives the dtype and width of each part, its row count does not matter."""
    if len(like) == 1:
        return [packed]
    parts, at = [], 0
    for part in like:
        width = part.shape[1:].numel() * part.element_size()
        column = packed[:, at : at + width].clone(memory_format=torch.contiguous_format).view(part.dtype)
        parts.append(column.view(packed.shape[0], *part.shape[1:]))
        at += width
    return parts


def _row_bytes(part: Tensor) -> Tensor:
    if not part.shape[0]:  # strides of an empty tensor may be anything, and then it has no byte view
        return part.new_empty((0, part.shape[1:].numel() * part.element_size()), dtype=torch.uint8)
    return part.contiguous().flatten(1).view(torch.uint8)


def _own_piece(x: Tensor, dim: int, group: Group) -> Tensor:
    assert x.shape[dim] % group.size == 0, f"{tuple(x.shape)} does not split over {group.size} ranks along {dim}"
    return x.tensor_split(group.size, dim)[group.rank].contiguous()


def _own_rows(x: Tensor, counts: Sequence[int], rank: int) -> Tensor:
    start = sum(counts[:rank])
    return x[start : start + counts[rank]]
