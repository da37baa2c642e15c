"""Which part of a whole parameter one rank trains: the placement table, applied to parameters by name.

The loader cuts published tensors; training draws and joins whole parameters. Both read the same table.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from workbench.nn.model import Model
from workbench.placement import Layout, RankCoords, rule_for
from workbench.spec import ModelSpec

__all__ = ["Ranges", "is_expert", "is_split_over_tp", "join_parameters", "own_ranges", "take", "whole_shapes"]

Ranges = tuple[tuple[tuple[int, int], ...], ...]  # of each dimension, the (start, stop) pieces


def whole_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all parameters of the whole model, in the model's order."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in Model(spec, precision="fp32").named_parameters()}


def is_expert(name: str) -> bool:
    return ".experts." in name


def is_split_over_tp(spec: ModelSpec, layout: Layout, name: str) -> bool:
    """Whether the ranks of a tensor-parallel group hold different parts of a parameter that is no expert's."""
    return layout.tp > 1 and not is_expert(name) and rule_for(spec, layout, name).dim is not None


def own_ranges(spec: ModelSpec, layout: Layout, coords: RankCoords, name: str, shape: Sequence[int]) -> Ranges:
    """What the rank at `coords` holds of a parameter of whole `shape`; stacked experts are (E, rows, columns)."""
    ranges: list[tuple[tuple[int, int], ...]] = [((0, size),) for size in shape]
    first = 0
    if is_expert(name):
        per_rank = shape[0] // layout.ep
        ranges[0] = ((coords.ep * per_rank, (coords.ep + 1) * per_rank),)
        first = 1
    rule = rule_for(spec, layout, name)
    if rule.dim is not None:
        degree, index = (layout.tp, coords.tp) if rule.axis == "tp" else (layout.expert_tp, coords.expert_tp)
        block = shape[first + rule.dim] // rule.parts
        step = block // degree
        starts = [part * block + index * step for part in range(rule.parts)]
        ranges[first + rule.dim] = tuple((start, start + step) for start in starts)
    return tuple(ranges)


def take(whole: Tensor, ranges: Ranges) -> Tensor:
    """The piece that the ranges name, pieces of a dimension joined."""
    for dim, pieces in enumerate(ranges):
        whole = torch.cat([whole.narrow(dim, start, stop - start) for start, stop in pieces], dim)
    return whole


def join_parameters(spec: ModelSpec, layout: Layout, pieces: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Whole parameters from those of every rank, `pieces[r]` being rank r's by name."""
    shapes = whole_shapes(spec)
    whole: dict[str, Tensor] = {}
    for rank, own in enumerate(pieces):
        for name, piece in own.items():
            target = whole.setdefault(name, torch.empty(shapes[name], dtype=piece.dtype))
            _put(target, own_ranges(spec, layout, layout.coords(rank), name, shapes[name]), piece)
    assert whole.keys() == shapes.keys(), sorted(shapes.keys() - whole.keys())
    return whole


def _put(whole: Tensor, ranges: Ranges, piece: Tensor) -> None:
    sizes = [[stop - start for start, stop in pieces] for pieces in ranges]
    for choice in itertools.product(*(range(len(pieces)) for pieces in ranges)):
        target, source = whole, piece
        for dim, idx in enumerate(choice):
            start, stop = ranges[dim][idx]
            target = target.narrow(dim, start, stop - start)
            source = source.narrow(dim, sum(sizes[dim][:idx]), stop - start)
        target.copy_(source)
