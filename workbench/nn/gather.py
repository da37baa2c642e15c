"""Moving rows between two arrangements of the same tokens, quickly in both directions.

The backward pass of indexing adds gradients up, row by row, because an index may name a row twice. Here it never does,
so the backward pass is a gather as well: that of the inverse map.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["RowMap"]


class RowMap:
    """Target row i is source row `index[i]`, or zeros where that is -1; no source row is named twice.

    `map(x)` brings source rows (S, ...) into target order (T, ...), `map.back(y)` the other way round: source rows that
    no target names become zeros. Both are differentiable.
    """

    def __init__(self, index: Tensor, num_source: int):
        self.index = _Index(index)
        places = torch.full((num_source,), -1, dtype=torch.int64, device=index.device)
        named = (index >= 0).nonzero()[:, 0]
        places[index[named]] = named
        self.places = _Index(places)

    def __call__(self, x: Tensor) -> Tensor:
        return _Gather.apply(x, self.index, self.places)

    def back(self, y: Tensor) -> Tensor:
        return _Gather.apply(y, self.places, self.index)


class _Index:
    """Rows to take, and the positions that get zeros instead."""

    def __init__(self, rows: Tensor):
        self.rows = rows.clamp(min=0)
        self.nothing = (rows < 0).nonzero()[:, 0]

    def take(self, x: Tensor) -> Tensor:
        if not len(x):  # nothing to take from: all zeros
            return x.new_zeros((len(self.rows), *x.shape[1:]))
        out = x.index_select(0, self.rows)
        return out.index_fill_(0, self.nothing, 0) if len(self.nothing) else out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: _Index, places: _Index) -> Tensor:
        ctx.places = places
        return index.take(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.places.take(grad), None, None
