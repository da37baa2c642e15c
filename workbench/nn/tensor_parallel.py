"""The four places where a block that was written for one device meets the other ranks of its tensor-parallel group.

Blocks call these hooks where a region of split weights begins and ends. With one rank every hook is the identity;
`parallel` supplies the real ones. Each hook's backward is its transpose, so the same blocks train:

    hook     forward                          backward
    enter    identity                         sum over ranks     replicated value -> split region
    reduce   sum over ranks                   identity           partial results  -> replicated value
    gather   join the pieces in rank order    keep own piece
    split    keep own piece                   join the pieces
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

__all__ = ["LOCAL", "SingleRank", "TensorParallel"]


class TensorParallel(Protocol):
    """Hook points of one tensor-parallel group; `rank` of `size`."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def enter(self, x: Tensor) -> Tensor:
        """Identity; backward sums over ranks. Also right for a small weight that every rank applies to its own part."""
        ...

    def reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks; backward passes the gradient through."""
        ...

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """Concatenation of all ranks' pieces along `dim`, in rank order."""
        ...

    def split(self, x: Tensor, dim: int) -> Tensor:
        """This rank's equal piece of a replicated tensor along `dim`."""
        ...


class SingleRank:
    """A group of one: every hook is the identity."""

    size = 1
    rank = 0

    def enter(self, x: Tensor) -> Tensor:
        return x

    def reduce(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor, dim: int) -> Tensor:
        return x

    def split(self, x: Tensor, dim: int) -> Tensor:
        return x


LOCAL = SingleRank()
