"""Matrices that are either dense or kept in a quantised scheme, with one way to fill them.

A dense matrix is the parameter `weight`; a quantised one is the buffers that its scheme names (`weight_packed`,
`weight_scale`) and is expanded when it is used. Rows are outputs, columns inputs; a stack of matrices has a leading E.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.base import LoadError
from workbench.nn import native
from workbench.nn.quant import Scheme

__all__ = ["Linear", "MatrixStore", "StackedLinear", "is_watched", "products"]

ALL_ROWS = slice(None)


class MatrixStore(nn.Module):
    """Weights of logical shape (out, in) or (E, out, in), dense in `dtype` or in `scheme`; empty until written."""

    def __init__(self, shape: tuple[int, ...], *, scheme: Scheme | None, dtype: torch.dtype):
        super().__init__()
        self.scheme = scheme
        self.logical_shape = shape
        if scheme is None:
            self.weight = nn.Parameter(torch.empty(shape, dtype=dtype))
            return
        for name, (part_shape, part_dtype) in scheme.buffers(shape).items():
            self.register_buffer(name, torch.empty(part_shape, dtype=part_dtype))

    @property
    def parts(self) -> dict[str, Tensor]:
        """What is stored: {"weight": ...} or the scheme's buffers."""
        if self.scheme is None:
            return {"weight": self.weight}
        return {name: self.get_buffer(name) for name in self.scheme.buffers(self.logical_shape)}

    @property
    def held(self) -> native.Held | None:
        """What native kernels read: dense weights, or MXFP4 codes and scales; None for a scheme that they do not."""
        if self.scheme is None:
            return self.weight, None
        if self.scheme.name != "mxfp4":
            return None
        return self.get_buffer("weight_packed"), self.get_buffer("weight_scale")

    def dense(self, dtype: torch.dtype, index: int | None = None) -> Tensor:
        """The weights (of matrix `index` of a stack) as a dense tensor of `dtype`; dense weights are not copied."""
        parts = self.parts if index is None else {name: part[index] for name, part in self.parts.items()}
        return parts["weight"].to(dtype) if self.scheme is None else self.scheme.decode(parts, dtype)

    def narrow_(self, shape: tuple[int, ...]) -> None:
        """Become an empty matrix of another (local) shape, on the same device. For use before anything is written."""
        if len(shape) != len(self.logical_shape):
            raise LoadError(f"cannot narrow {self.logical_shape} to {shape}: the number of dimensions differs")
        self.logical_shape = tuple(shape)
        if self.scheme is None:
            self.weight = nn.Parameter(torch.empty(shape, dtype=self.weight.dtype, device=self.weight.device))
            return
        for name, (part_shape, part_dtype) in self.scheme.buffers(self.logical_shape).items():
            device = self.get_buffer(name).device
            self.register_buffer(name, torch.empty(part_shape, dtype=part_dtype, device=device))

    def hold_in(self, scheme: Scheme) -> None:
        """A dense matrix becomes an empty one in `scheme`, on the same device. For use before anything is written."""
        assert self.scheme is None, f"already held in {self.scheme and self.scheme.name}"
        device = self.weight.device
        del self.weight
        self.scheme = scheme
        for name, (shape, dtype) in scheme.buffers(self.logical_shape).items():
            self.register_buffer(name, torch.empty(shape, dtype=dtype, device=device))

    def write(self, values: Tensor, *, rows: slice = ALL_ROWS, index: int | None = None) -> None:
        """Cast or encode whole rows of floats (n, in) and store them as `rows` (of matrix `index` of a stack)."""
        if self.scheme is None:
            self.write_parts({"weight": values}, rows=rows, index=index)
        else:
            device = next(iter(self.parts.values())).device
            self.write_parts(self.scheme.encode(values.to(device)), rows=rows, index=index)

    @torch.no_grad()
    def write_parts(self, parts: Mapping[str, Tensor], *, rows: slice = ALL_ROWS, index: int | None = None) -> None:
        """Store rows that already are in this matrix's own form. Raises LoadError unless every part fits exactly."""
        own = self.parts
        if set(parts) != set(own):
            raise LoadError("parts do not belong to this storage", found=sorted(parts), expected=sorted(own))
        if (index is None) != (len(self.logical_shape) == 2):
            raise LoadError(f"a matrix of shape {self.logical_shape} is not written with index={index}")
        for name, values in parts.items():
            target = (own[name] if index is None else own[name][index])[rows]
            if target.shape != values.shape:
                raise LoadError(f"{name}: rows {rows}", found=tuple(values.shape), expected=tuple(target.shape))
            target.copy_(values)

    def extra_repr(self) -> str:
        return f"{' x '.join(map(str, self.logical_shape))}, {self.scheme.name if self.scheme else 'dense'}"

    @property
    def num_params(self) -> int:
        return math.prod(self.logical_shape)


class Linear(MatrixStore):
    """y = x W^T + b, the bias only where it is asked for: (..., in) -> (..., out), in the dtype of `x`."""

    def __init__(
        self,
        out_dim: int,
        in_dim: int,
        *,
        scheme: Scheme | None = None,
        dtype: torch.dtype = torch.float32,
        has_bias: bool = False,
    ):
        super().__init__((out_dim, in_dim), scheme=scheme, dtype=dtype)
        self.bias = nn.Parameter(torch.empty(out_dim, dtype=dtype)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def product(self, x: Tensor) -> Tensor:
        """x W^T alone, for a caller that adds the bias after summing over ranks."""
        y = native.linear(x, self.held)
        return F.linear(x, self.dense(x.dtype)) if y is None else y


def products(x: Tensor, layers: Sequence[Linear]) -> list[Tensor]:
    """What each layer makes of the same x, by one native call where that is possible and nobody watches a layer."""
    ys = None
    if native.serves(x) and not any(type(layer) is not Linear or is_watched(layer) for layer in layers):
        ys = native.linears(x, [layer.held for layer in layers])
    if ys is None:
        return [layer(x) for layer in layers]
    return [y if layer.bias is None else y + layer.bias.to(y.dtype) for y, layer in zip(ys, layers, strict=True)]


def is_watched(module: nn.Module) -> bool:
    """Whether its own call would do more than its class says: somebody has hooked on to it, or put another in place."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


class StackedLinear(MatrixStore):
    """E matrices of one shape, and E biases where asked for; the caller picks one and multiplies by it."""

    def __init__(
        self,
        num: int,
        out_dim: int,
        in_dim: int,
        *,
        scheme: Scheme | None = None,
        dtype: torch.dtype = torch.float32,
        has_bias: bool = False,
    ):
        super().__init__((num, out_dim, in_dim), scheme=scheme, dtype=dtype)
        self.bias = nn.Parameter(torch.empty(num, out_dim, dtype=dtype)) if has_bias else None

    def matrices(self, dtype: torch.dtype) -> Callable[[int], Tensor]:
        """Matrix by index, dense.

        Where gradients are wanted the stack is taken apart once and its gradient joined once; picking matrices one by
        one would add up as many gradients of the whole stack.
        """
        if self.scheme is None and torch.is_grad_enabled() and self.weight.requires_grad:
            return self.weight.to(dtype).unbind(0).__getitem__
        return partial(self.dense, dtype)
