"""Taking values out of a running model by name, through forward hooks.

    layers.3.mixer_norm:in           first input of a module
    layers.3.mixer:out               its output
    layers.3.ffn.router:out.1        an element of a tuple
    layers.3:out.running             a field of a record; several tensors are stacked
    cache.state.0, cache.conv.0, cache.latent.3        what the cache holds after the pass, one row per sequence

Values come back as numpy arrays, bf16 as float32. A name is looked up on every rank and given by those that have the
module; a rank of a later pipeline stage has no early layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from workbench.base import RequestError
from workbench.nn.cache import StateCache
from workbench.nn.rows import RowTable

__all__ = ["capturing", "read_cache", "to_numpy"]

CACHE_TABLES = ("state", "conv", "latent")


@contextmanager
def capturing(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, np.ndarray]]:
    """Within this block every pass of `model` writes the named values into the dictionary, the latest one staying.

    Raises RequestError for a name that is no module name with ":in" or ":out".
    """
    modules = dict(model.named_modules())
    values: dict[str, np.ndarray] = {}
    handles = []
    try:
        for name in names:
            if name.startswith("cache."):
                continue
            module_name, side, path = _parse(name)
            if module_name in modules:
                hook = _hook(values, name, path)
                # An input is read before others may replace it.
                handles.append(
                    modules[module_name].register_forward_pre_hook(lambda _module, args, hook=hook: hook(args[0]))
                    if side == "in"
                    else modules[module_name].register_forward_hook(lambda _module, _args, out, hook=hook: hook(out))
                )
        yield values
    finally:
        for handle in handles:
            handle.remove()


def read_cache(cache: StateCache, names: Sequence[str]) -> dict[str, np.ndarray]:
    """The cache values among `names` that this rank's stage has. Raises RequestError for an unknown table."""
    values = {}
    for name in names:
        if not name.startswith("cache."):
            continue
        _, table, layer, *_ = [*name.split("."), "", ""]
        if table not in CACHE_TABLES or not layer.isdecimal():
            raise RequestError(f"no cache value {name!r}", expected="cache.state.N, cache.conv.N or cache.latent.N")
        held: dict[int, Tensor | RowTable] = getattr(cache, table)
        if int(layer) in held:
            rows = held[int(layer)]
            values[name] = to_numpy(rows if isinstance(rows, Tensor) else rows.dense())
    return values


def to_numpy(value: Tensor) -> np.ndarray:
    """A copy on the host; types that numpy lacks become float32."""
    value = value.detach().to("cpu", copy=True)
    return value.float().numpy() if value.dtype in (torch.bfloat16, torch.float8_e4m3fn) else value.numpy()


def _parse(name: str) -> tuple[str, str, list[str]]:
    module_name, colon, rest = name.partition(":")
    side, *path = rest.split(".")
    if not colon or side not in ("in", "out"):
        raise RequestError(f"cannot capture {name!r}", expected="MODULE:in or MODULE:out, or cache.TABLE.LAYER")
    return module_name, side, path


def _hook(values: dict[str, np.ndarray], name: str, path: list[str]) -> Callable[[object], None]:
    def hook(value: object) -> None:
        for step in path:
            value = value[int(step)] if step.isdecimal() else getattr(value, step)  # type: ignore[index]
        if isinstance(value, tuple):
            value = torch.stack(value)
        if not isinstance(value, Tensor):
            raise RequestError(f"{name} is no tensor", found=type(value).__name__)
        values[name] = to_numpy(value)

    return hook
