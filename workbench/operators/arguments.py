"""Arguments of operators: which tensors they hold, the same without contents, and as text to build them from again."""

from __future__ import annotations

import json
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "as_fused",
    "call_text",
    "empty_meta",
    "flatten",
    "is_mixed",
    "on_meta",
    "only_changes_place",
    "tensors_in",
    "without_values",
]


def flatten(value: Any, tensors: list[Tensor]) -> Hashable:
    """`value` with its tensors replaced by their places in `tensors`, which grows; hashable."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return Tensor, len(tensors) - 1
    if isinstance(value, (list, tuple)):
        return tuple(flatten(item, tensors) for item in value)
    return type(value), value


def tensors_in(value: Any) -> list[Tensor]:
    """Tensors in `value`, lists taken apart."""
    found: list[Tensor] = []
    flatten(value, found)
    return found


def is_mixed(tensors: list[Tensor]) -> bool:
    """Whether they lie on different devices."""
    first = tensors[0].device
    return any(x.device != first for x in tensors)


def without_values(x: Tensor) -> Tensor:
    """A tensor on the meta device with the shape, strides and dtype of `x`."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def empty_meta(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor on the meta device that no dispatch mode sees being made."""
    with _disable_current_modes():
        return torch.empty(shape, dtype=dtype, device="meta")


def as_fused(x: Tensor) -> Tensor:
    """Attention's result (..., heads, rows, width) as fused kernels lay it out: heads next to one another in memory.

    The unfused form that runs on the meta device leaves them apart, and the copy that joins them is in no real run.
    """
    *outer, heads, rows, width = x.shape
    return x.new_empty((*outer, rows, heads, width)).transpose(-2, -3)


def on_meta(value: Any) -> Any:
    """`value` with every tensor on the meta device."""
    if isinstance(value, Tensor):
        return value if value.device.type == "meta" else without_values(value)
    if isinstance(value, (list, tuple)):
        return type(value)(on_meta(item) for item in value)
    return value


def only_changes_place(x: Tensor, kwargs: dict[str, Any]) -> bool:
    """A table that indexing carries to the meta device: in a real run it is on the device already."""
    device = kwargs.get("device")
    return (
        device is not None
        and torch.device(device).type == "meta"
        and x.device.type != "meta"
        and kwargs.get("dtype") in (None, x.dtype)
    )


def call_text(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """JSON of [positional, named] arguments, tensors by number, as `OperatorUse.call` describes."""
    count = 0

    def plain(value: Any) -> Any:
        nonlocal count
        match value:
            case Tensor():
                entry: dict[str, Any] = {"t": count}
                if not value.is_contiguous():
                    entry["stride"] = list(value.stride())
                count += 1
                return entry
            case list() | tuple():
                return [plain(item) for item in value]
            case torch.dtype():
                return {"dtype": str(value).removeprefix("torch.")}
            case torch.device():
                return {"device": "own"}
            case torch.memory_format() | torch.layout():
                return {"torch": str(value).removeprefix("torch.")}
            case complex():
                return {"complex": [value.real, value.imag]}
            case _:
                return value

    positional = [plain(value) for value in args]
    named = {key: plain(value) for key, value in kwargs.items()}
    return json.dumps([positional, named])
