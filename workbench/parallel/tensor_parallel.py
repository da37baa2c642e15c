"""The four hooks of `nn`, over a process group."""

from __future__ import annotations

from torch import Tensor

from workbench.parallel.collectives import Group
from workbench.parallel.functions import copy_to, gather_dim, reduce_from, split_dim

__all__ = ["GroupTensorParallel"]


class GroupTensorParallel:
    """`nn.TensorParallel` over a group of ranks; differentiable, and the identity for a group of one."""

    def __init__(self, group: Group) -> None:
        self.group = group

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def rank(self) -> int:
        return self.group.rank

    def enter(self, x: Tensor) -> Tensor:
        return copy_to(x, self.group)

    def reduce(self, x: Tensor) -> Tensor:
        return reduce_from(x, self.group)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        return gather_dim(x, dim, self.group)

    def split(self, x: Tensor, dim: int) -> Tensor:
        return split_dim(x, dim, self.group)
