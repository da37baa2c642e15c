"""A model made to compute every step on inputs from elsewhere: what it adds by itself, without what it inherits.

    given      L3.attn_in   L3.kda_q ...   L3.attn_out            the other implementation's tensors
                   |            |              |
    model      [mixer_norm] [conv] ... [o_proj]  ...              each block reads the given tensor and its own
                             own L3.kda_q   own L3.attn_out       result is captured, then replaced by the given one

A captured value is what the block itself made of given inputs, so its distance to the other implementation's is the
error added at this block. Experts are chosen and weighed by the model itself, on the given input of the router, so that
the experts that it runs are those that it would run; latents of MLA are its own too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workbench.align.merge import redo_split
from workbench.align.sources import CACHE_SOURCE, FINAL_NAMES, in_model_form, trace_sources
from workbench.align.trace import short_name
from workbench.base import RequestError
from workbench.nn.residual import ResidualStream
from workbench.placement import Layout
from workbench.spec import ModelSpec

__all__ = ["given_for_rank", "replaying"]

_OWN = ("topk_idx", "topk_w", "blocks", "logits")  # decided by the model, or the end of it


def given_for_rank(
    traces: Sequence[Mapping[str, Tensor]], spec: ModelSpec, layout: Layout, rank: int
) -> dict[str, np.ndarray]:
    """Source -> what rank `rank` is to go on with, for the sequences `traces` of its replica packed in order.

    Pieces are cut as the placement table says; of a sum over ranks the first one holds all. Values become float32,
    which holds bf16 exactly. Names that some trace lacks are left out: there the model goes on with its own.
    """
    if not traces:
        return {}
    given: dict[str, np.ndarray] = {}
    coords = layout.coords(rank)
    layers = layout.stage_layers(spec.num_layers)[coords.pp]
    for name, source in trace_sources(spec).items():
        if short_name(name) in _OWN or source.startswith(CACHE_SOURCE) or any(name not in x for x in traces):
            continue
        is_final = name in FINAL_NAMES
        if is_final and coords.pp != layout.pp - 1:
            continue
        if not is_final and int(source.split(".")[1].partition(":")[0]) not in layers:
            continue
        packed = torch.cat([trace[name].to("cpu", torch.float32) for trace in traces])
        local = redo_split(name, packed, spec, layout, coords.tp)
        given[source] = np.ascontiguousarray(in_model_form(name, local).numpy())
    return given


@contextmanager
def replaying(model: nn.Module, given: Mapping[str, np.ndarray]) -> Iterator[None]:
    """Within this block `model` goes on with the `given` value of each source in place of its own.

    Enter it after whatever captures: hooks run in the order they were made. Raises RequestError, from the pass, for a
    value whose shape is not that of the model's own.
    """
    modules = dict(model.named_modules())
    handles = []
    try:
        for source, array in given.items():
            path, _, side = source.partition(":")
            if path not in modules:
                raise RequestError(f"the model has no module {path!r}", where=source)
            side, *steps = side.split(".")
            substitute = _substitute(source, torch.from_numpy(array), steps)
            if side == "in":

                def before(_module: nn.Module, args: tuple[Any, ...], substitute=substitute) -> tuple[Any, ...]:  # type: ignore[no-untyped-def]
                    return (substitute(args[0]), *args[1:])

                handles.append(modules[path].register_forward_pre_hook(before))
            else:

                def after(_module: nn.Module, _args: tuple[Any, ...], output: Any, substitute=substitute) -> Any:  # type: ignore[no-untyped-def]
                    return substitute(output)

                handles.append(modules[path].register_forward_hook(after))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _substitute(source: str, value: Tensor, steps: Sequence[str]) -> Callable[[Any], Any]:
    """From a module's value to the same with the given tensor in its place."""

    def in_place_of(own: Tensor) -> Tensor:
        if own.shape != value.shape:
            raise RequestError(f"{source}: the given value does not fit", found=tuple(value.shape), expected=own.shape)
        return value.to(own.device, own.dtype)

    if not steps:
        return in_place_of

    def running(stream: ResidualStream) -> ResidualStream:
        assert stream.running is not None
        return replace(stream, running=in_place_of(stream.running))

    return running
