"""Images under tensor parallelism: the tower is split by heads, or the images are shared out over the ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from workbench.nn.model import Model
from workbench.parallel.functions import gather_rows
from workbench.parallel.mesh import RankContext
from workbench.placement import vision_is_sharded

__all__ = ["encode_images", "share_images", "sum_vision_gradients"]

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
