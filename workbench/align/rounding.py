"""bf16 rounding for the reference: the same network with the noise of the precision it is served in.

A value is rounded on a grid: bf16(x * grid) / grid. Grid 1 is bf16 itself. Another grid moves the points that values
are rounded to without changing how far apart they lie relative to the value, so the noise is of the same size and drawn
anew. Grids are bf16 numbers, so that 0 and 1 (a padded row, the softmax over one key) stay exact on each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from workbench.base import ConfigError

__all__ = ["BF16_GRIDS", "BF16_UNIT", "Round", "RowRounding", "round_all"]

BF16_UNIT = 2.0**-9  # the most that one rounding to bf16 changes a value, relative to its power of two

# Rounds a tensor whose dim 0 are tokens; a second argument says which of the packed tokens, where not all of them.
Round = Callable[..., Tensor]

# Four draws, spaced evenly over one power of two: 2 ** (0, 1/4, 2/4, 3/4) to seven bits behind the point.
BF16_GRIDS = (1.0, 152 / 128, 181 / 128, 215 / 128)


def round_all(x: Tensor, grid: float | None) -> Tensor:
    """`x` rounded to bf16 on `grid`, in the dtype of `x`; `x` itself where `grid` is None."""
    return x if grid is None else (x * grid).to(torch.bfloat16).to(x.dtype) / grid


class RowRounding:
    """Rounds packed tokens, each sequence on its own grid or (None) not at all."""

    def __init__(self, lengths: Sequence[int], grids: Sequence[float | None], dtype: torch.dtype) -> None:
        for grid in grids:
            if grid is not None and not (grid > 0 and torch.tensor(grid).bfloat16().item() == grid):
                raise ConfigError("not a rounding grid", found=grid, expected="a positive number that bf16 can hold")
        self._is_exact = all(grid is None for grid in grids)
        per_sequence = torch.tensor([grid or 0.0 for grid in grids], dtype=dtype)
        self._grid = per_sequence.repeat_interleave(torch.tensor(lengths))  # (T,), 0 for exact

    def __call__(self, x: Tensor, rows: slice | Tensor = slice(None)) -> Tensor:
        """(n, ...) values of the packed tokens `rows`, rounded."""
        if self._is_exact:
            return x
        grid = self._grid[rows].view(-1, *[1] * (x.ndim - 1))
        is_exact = grid == 0
        scaled = torch.where(is_exact, torch.ones_like(grid), grid)
        return torch.where(is_exact, x, (x * scaled).to(torch.bfloat16).to(x.dtype) / scaled)
