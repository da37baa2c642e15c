"""Rotary positions: columns of a head turned in pairs, by an angle that grows with the token's position.

T tokens, H heads, W columns of a head, of which the first P = `rope.dim` turn.

    halves:       column i pairs with i + P / 2            neighbours:   column 2i pairs with 2i + 1
    (a, b) -> (a cos - b sin, b cos + a sin),  angle = position * frequency of the pair

Frequencies and the factor on cos and sin come from `RopeSpec`, in double precision. Source: arXiv 2104.09864.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.base import UnsupportedModelError
from workbench.nn.batch import Segments
from workbench.nn.precision import as_float
from workbench.spec import RopeSpec

__all__ = ["RotaryTable", "rotary_table", "rotate", "rotate_reference"]

RotaryTable = tuple[Tensor, Tensor]  # cos and sin, (T, P / 2) float32


def rotary_table(rope: RopeSpec, segments: Segments) -> RotaryTable:
    """Cos and sin of every token of a batch, made once per forward pass. Raises UnsupportedModelError for M-RoPE."""
    if rope.sections:
        raise UnsupportedModelError("rotary positions of several axes (M-RoPE) are not computed here")
    table: RotaryTable = segments.once(rope, lambda: _table(rope, segments))
    return table


def _table(rope: RopeSpec, segments: Segments) -> RotaryTable:
    frequencies = torch.tensor(rope.frequencies(), dtype=torch.float32, device=segments.device)
    angles = segments.positions[:, None].float() * frequencies
    return angles.cos() * rope.cos_scale, angles.sin() * rope.cos_scale


def rotate(x: Tensor, table: RotaryTable, *, is_interleaved: bool) -> Tensor:
    """(T, H, W) -> (T, H, W): the first P columns turned, in float32 and rounded once; the others as they are."""
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
