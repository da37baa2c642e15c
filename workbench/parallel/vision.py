"""Images under tensor parallelism: the tower is split by heads, or the images are shared out over the ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from workbench.nn.model import Model
from workbench.nn.vision_rows import ImageRows
from workbench.parallel.functions import gather_rows
from workbench.parallel.mesh import RankContext
from workbench.placement import vision_is_sharded

__all__ = ["advance_image", "begin_image", "encode_images", "share_images", "sum_vision_gradients"]

Grid = tuple[int, int, int]  # frames, rows, columns, in patches


def encode_images(model: Model, ctx: RankContext, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
    """Features of all images on every tp rank: patches (N, 3, p, p), one grid per image -> (tokens, D), image order.

    With DeepStack they are wider, see `Model.encode_images`.

    For a model whose first stage this is; every rank of the tp group calls it with the same images. Where the tower is
    not split, each rank encodes some of the images and the features are gathered; the tower's gradients then cover
    this rank's images only, see `sum_vision_gradients`. A rank whose own images fail raises after the gather, where the
    others wait for it; what they get of these images is not a number.
    """
    if ctx.tp.size == 1 or not grids or vision_is_sharded(model.spec, ctx.layout):
        return model.encode_images(patches, grids)
    assert model.spec.vision is not None
    sizes = [math.prod(grid) for grid in grids]
    ends = list(accumulate(sizes))
    tokens = [rows * columns // model.spec.vision.merge_size**2 for _, rows, columns in grids]
    shares = share_images(sizes, ctx.tp.size)
    mine = shares[ctx.tp.rank]
    counts = [sum(tokens[i] for i in share) for share in shares]
    failure: Exception | None = None
    if mine:
        try:
            own = torch.cat([patches[ends[i] - sizes[i] : ends[i]] for i in mine])
            features = model.encode_images(own, [grids[i] for i in mine])
        except Exception as error:
            failure = error
            shape = (counts[ctx.tp.rank], model.spec.image_width)
            features = patches.new_full(shape, float("nan"), dtype=model.dtype)
    else:
        features = patches.new_zeros((0, model.spec.image_width), dtype=model.dtype)
        features.requires_grad_(torch.is_grad_enabled())  # this rank takes part in the backward of the gather
    arrived = [i for share in shares for i in share]
    gathered = gather_rows(features, counts, ctx.tp).split([tokens[i] for i in arrived])
    if failure is not None:
        raise failure
    pieces = dict(zip(arrived, gathered, strict=True))
    return torch.cat([pieces[i] for i in range(len(grids))])


def begin_image(model: Model, ctx: RankContext, patches: Tensor, grid: Grid) -> ImageRows | None:
    """One image to be encoded with pauses, by `advance_image`; None on a rank that leaves it to the first one."""
    is_mine = ctx.tp.rank == 0 or vision_is_sharded(model.spec, ctx.layout)
    return model.begin_image(patches, grid) if is_mine else None


def advance_image(model: Model, ctx: RankContext, rows: ImageRows | None, grid: Grid, stop: int) -> Tensor | None:
    """On every tp rank: up to row `stop` of an image, and its features (tokens, D) once that is the last, else None.

    Where the first rank fails with the last rows it raises after the gather, where the others wait for it.
    """
    assert model.spec.vision is not None
    is_last = stop >= model.spec.vision.num_layers * math.prod(grid)
    if rows is not None and (not is_last or ctx.tp.size == 1 or vision_is_sharded(model.spec, ctx.layout)):
        rows.advance(stop)
        return model.finish_image(rows) if is_last else None
    if not is_last:
        return None
    num_tokens = grid[1] * grid[2] // model.spec.vision.merge_size**2
    failure: Exception | None = None
    shape = (0 if rows is None else num_tokens, model.spec.image_width)
    features = torch.full(shape, float("nan"), dtype=model.dtype, device=ctx.device)
    try:
        if rows is not None:
            rows.advance(stop)
            features = model.finish_image(rows)
    except Exception as error:
        failure = error
    gathered = gather_rows(features, [num_tokens, *[0] * (ctx.tp.size - 1)], ctx.tp)
    if failure is not None:
        raise failure
    return gathered


def share_images(sizes: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Image positions of each rank, ascending: the largest image first, always to the rank with the fewest patches."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        rank = loads.index(min(loads))
        shares[rank].append(i)
        loads[rank] += sizes[i]
    return [sorted(share) for share in shares]


@torch.no_grad()
def sum_vision_gradients(model: Model, ctx: RankContext) -> None:
    """After backward, on every rank of a tp group: make the gradients of tower and projector whole.

    Needed only where images were shared out, and does nothing elsewhere. A rank that had no image counts as zero.
    """
    if ctx.tp.size == 1 or not ctx.is_first_stage or vision_is_sharded(model.spec, ctx.layout):
        return
    for name, parameter in model.named_parameters():
        if name.startswith(("vision.", "projector.")):
            grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            parameter.grad = ctx.tp.all_reduce(grad)
