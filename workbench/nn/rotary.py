"""Rotary positions: columns of a head turned in pairs, by an angle that grows with the token's position.

T tokens, H heads, W columns of a head, of which the first P = `rope.dim` turn.

    halves:       column i pairs with i + P / 2            neighbours:   column 2i pairs with 2i + 1
    (a, b) -> (a cos - b sin, b cos + a sin),  angle = position * frequency of the pair

With M-RoPE a position has three axes, time, height and width, and each pair follows the one that `RopeSpec.axes` says;
tokens of text stand at the same place on all three. Frequencies and the factor on cos and sin come from `RopeSpec`, in
double precision. Sources: arXiv 2104.09864, 2409.12191.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from workbench.base import RequestError
from workbench.nn import native
from workbench.nn.batch import Segments
from workbench.nn.precision import as_float
from workbench.spec import RopeSpec

__all__ = ["RotaryTable", "image_positions", "rotary_table", "rotate", "rotate_reference"]

RotaryTable = tuple[Tensor, Tensor]  # cos and sin, (T, P / 2) float32


def rotary_table(rope: RopeSpec, segments: Segments) -> RotaryTable:
    """Cos and sin of every token of a batch, made once per forward pass."""
    table: RotaryTable = segments.once(rope, lambda: _table(rope, segments))
    return table


def image_positions(is_image: Sequence[bool], grids: Sequence[tuple[int, int]]) -> Tensor:
    """Places of one sequence's tokens on three axes, (3, T) int64; `grids` are rows and columns of merged patches.

    Text goes on by one on all axes. An image's tokens share one time; its rows and columns count from there, and what
    follows stands beyond the larger of the two. Raises RequestError where image tokens and grids do not match.
    """
    pieces: list[Tensor] = []
    place, i, remaining = 0, 0, list(grids)
    while i < len(is_image):
        if not is_image[i]:
            pieces.append(torch.full((3, 1), place))
            place, i = place + 1, i + 1
            continue
        rows, columns = remaining.pop(0) if remaining else (0, 0)
        count = rows * columns
        if not count or not all(is_image[i : i + count]) or i + count > len(is_image):
            raise RequestError("image tokens and images differ in number", where=f"token {i}", expected=f"{count}")
        row, column = torch.arange(rows)[:, None], torch.arange(columns)
        axes = torch.broadcast_tensors(torch.zeros(1, 1, dtype=torch.int64), row, column)
        pieces.append(place + torch.stack(axes).flatten(1))
        place, i = place + max(rows, columns), i + count
    if remaining:
        raise RequestError("image tokens and images differ in number", found=f"{len(remaining)} images too many")
    return torch.cat(pieces, 1) if pieces else torch.zeros(3, 0, dtype=torch.int64)


_frequencies = cache(RopeSpec.frequencies)


def _table(rope: RopeSpec, segments: Segments) -> RotaryTable:
    frequencies = torch.tensor(_frequencies(rope), dtype=torch.float32, device=segments.device)
    positions = segments.positions[:, None]
    if rope.sections and segments.rope_positions is not None:
        positions = segments.rope_positions[list(rope.axes)].mT  # (T, P / 2)
    angles = (positions.float() * frequencies).contiguous()
    return angles.cos() * rope.cos_scale, angles.sin() * rope.cos_scale


def rotate(x: Tensor, table: RotaryTable, *, is_interleaved: bool) -> Tensor:
    """(T, H, W) -> (T, H, W): the first P columns turned, in float32 and rounded once; the others as they are."""
    if (found := native.turn_heads((x,), (None,), table, is_interleaved=is_interleaved)) is not None:
        return found[0]
    cos, sin = (part[:, None] for part in table)
    dim = 2 * cos.shape[-1]
    turning, rest = x[..., :dim], x[..., dim:]
    wide = as_float(turning)
    if is_interleaved:
        a, b = wide.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        a, b = wide.chunk(2, -1)
    first, second = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack([first, second], -1).flatten(-2) if is_interleaved else torch.cat([first, second], -1)
    turned = turned.to(x.dtype)
    return turned if dim == x.shape[-1] else torch.cat([turned, rest], -1)


def rotate_reference(x: Tensor, positions: Tensor, rope: RopeSpec) -> Tensor:
    """`rotate` of (T, W) in float64, one pair at a time."""
    out, half = x.double().clone(), rope.dim // 2
    for row, position in enumerate(positions.tolist()):
        for pair, frequency in enumerate(rope.frequencies()):
            i, j = (2 * pair, 2 * pair + 1) if rope.is_interleaved else (pair, pair + half)
            turn = torch.tensor(position * frequency, dtype=torch.float64)
            cos, sin = turn.cos() * rope.cos_scale, turn.sin() * rope.cos_scale
            a, b = out[row, i].clone(), out[row, j].clone()
            out[row, i], out[row, j] = a * cos - b * sin, b * cos + a * sin
    return out
