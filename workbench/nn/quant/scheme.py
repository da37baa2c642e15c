"""What every quantised storage scheme offers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Buffers", "Decoder", "Scheme", "scale_groups"]

Buffers = dict[str, tuple[tuple[int, ...], torch.dtype]]  # buffer name -> shape, dtype


class Scheme(Protocol):
    """How a matrix (..., out, in) is stored. Rows are independent, so a matrix may be encoded a few rows at a time."""

    @property
    def name(self) -> str: ...

    @property
    def column_unit(self) -> int:
        """Columns that belong together: a matrix split by columns is cut at multiples of this."""
        ...

    def buffers(self, shape: tuple[int, ...]) -> Buffers:
        """Names, shapes and dtypes of the stored parts of a matrix of logical `shape`."""
        ...

    def encode(self, weight: Tensor) -> dict[str, Tensor]:
        """Parts of a floating-point matrix (..., out, in)."""
        ...

    def decode(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """The matrix (..., out, in) that the parts stand for, in `dtype`."""
        ...


class Decoder(Protocol):
    """A stored form that is only read: expanded, or expanded and encoded in a scheme."""

    @property
    def name(self) -> str: ...

    def decode(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Rows (n, in) that the stored parts stand for, in `dtype`."""
        ...


def scale_groups(values: Tensor, scale: Tensor, group_size: int) -> Tensor:
    """Columns times their group's scale: (..., in) and (..., ceil(in / group_size)); the last group may be short."""
    columns = values.shape[-1]
    if columns % group_size == 0:
        return (values.unflatten(-1, (-1, group_size)) * scale[..., None]).flatten(-2)
    return values * scale.repeat_interleave(group_size, -1)[..., :columns]
