"""Vision tower: packed patches of several images of any size -> merged patch vectors, image by image.

Patches of all images lie one behind another, each image row-major over its grid of (frames, rows, columns); every step
but attention works on all of them at once. Positions come twice: a learned grid, resized to each image, is added to the
patch vectors, and rotary angles turn queries and keys by column and row. What towers differ in, `VisionSpec` says.

    N patches of all images, H heads, P pairs per head (half the head width), C width, m merge size,
    n states of DeepStack

Sources: the published K3 modelling file (MoonViT), transformers' kimi_k25 and qwen3_vl. The grid is resized without
antialiasing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.base import ImageError
from workbench.nn.linear import Linear
from workbench.nn.norm import norm_of
from workbench.nn.precision import as_float
from workbench.nn.tensor_parallel import LOCAL, TensorParallel
from workbench.spec import VisionSpec

__all__ = [
    "Grid",
    "VisionBlock",
    "VisionTower",
    "frame_table",
    "merge_patches",
    "rotary_angles",
    "rotate_halves",
    "rotate_pairs",
]

Grid = tuple[int, int, int]  # frames, rows, columns of patches


class PatchEmbed(nn.Module):
    """Convolution whose stride equals its size, which is one matrix product per patch: (N, 3, p, p) -> (N, C).

    Patches of t > 1 frames are (N, 3, t, p, p).
    """

    def __init__(self, spec: VisionSpec, dtype: torch.dtype):
        super().__init__()
        p, frames = spec.patch_size, () if spec.temporal_patch == 1 else (spec.temporal_patch,)
        self.weight = nn.Parameter(torch.empty(spec.hidden_size, 3, *frames, p, p, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(spec.hidden_size, dtype=dtype)) if spec.has_bias else None

    def forward(self, patches: Tensor) -> Tensor:
        return F.linear(patches.to(self.weight.dtype).flatten(1), self.weight.flatten(1), self.bias)


class PositionGrid(nn.Module):
    """Learned vectors on a grid of rows and columns, resized to the image; frames add a fixed table."""

    def __init__(self, spec: VisionSpec, dtype: torch.dtype):
        super().__init__()
        self.spec = spec
        grid = (spec.grid_height, spec.grid_width)
        shape = (math.prod(grid),) if spec.has_flat_grid else grid
        self.weight = nn.Parameter(torch.empty(*shape, spec.hidden_size, dtype=dtype))

    def forward(self, grid: Grid) -> Tensor:
        """(frames * rows * columns, C) in the dtype of the weight."""
        frames, rows, columns = grid
        table: Tensor = self.weight.view(self.spec.grid_height, self.spec.grid_width, -1)
        if table.shape[:2] != (rows, columns):
            planes = as_float(table).permute(2, 0, 1).unsqueeze(0)
            resized = F.interpolate(
                planes, size=(rows, columns), mode=self.spec.resize, align_corners=self.spec.aligns_corners
            )
            table = resized.squeeze(0).permute(1, 2, 0).to(table.dtype)
        table = table.flatten(0, 1)
        if frames == 1:
            return table
        times = frame_table(self.spec.num_frames, table.shape[1], device=table.device)[:frames].to(table.dtype)
        return (times[:, None] + table).flatten(0, 1)


class VisionBlock(nn.Module):
    """Pre-norm attention within each image, then a tanh-GELU feed-forward layer: (N, C) -> (N, C).

    `wqkv` packs all query rows, then all key rows, then all value rows. Under tensor parallelism each of the three is
    split by heads and the feed-forward width by rows; the number of heads held here follows from the weight.
    """

    def __init__(self, spec: VisionSpec, dtype: torch.dtype):
        super().__init__()
        self.head_dim, bias = spec.head_dim, spec.has_bias
        self.rotates_halves = spec.rotates_halves
        self.norm0 = norm_of(spec.norm, spec.hidden_size, spec.norm_eps, dtype)
        self.wqkv = Linear(3 * spec.qkv_width, spec.hidden_size, dtype=dtype, has_bias=bias)
        self.wo = Linear(spec.hidden_size, spec.qkv_width, dtype=dtype, has_bias=bias)
        self.norm1 = norm_of(spec.norm, spec.hidden_size, spec.norm_eps, dtype)
        self.fc0 = Linear(spec.ffn_width, spec.hidden_size, dtype=dtype, has_bias=bias)
        self.fc1 = Linear(spec.hidden_size, spec.ffn_width, dtype=dtype, has_bias=bias)
        self.tp: TensorParallel = LOCAL

    def forward(self, x: Tensor, angles: Tensor, lengths: Sequence[int]) -> Tensor:
        """`angles` (N, P) of rotary positions; `lengths` patches of each image, in order."""
        return self._fed(x + self._attention(x, angles, lengths))

    def packed(self, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        """(N, C) -> what each patch asks and is asked by (N, 2, H, head_dim), and what it tells (N, 1, H, head_dim)."""
        qkv = self.wqkv(self.tp.enter(self.norm0(x))).unflatten(-1, (3, -1, self.head_dim))
        qk, v = qkv.split([2, 1], 1)
        turn = rotate_halves if self.rotates_halves else rotate_pairs
        return turn(qk.flatten(1, 2), angles).view(qk.shape), v

    def of_rows(self, x: Tensor, qk: Tensor, v: Tensor, rows: slice) -> Tensor:
        """Some rows of `forward` of one image, `x` (N, C) and `packed` of all its rows given: -> (rows, C)."""
        query, key, value = (y.transpose(0, 1)[None] for y in (qk[rows, 0], qk[:, 1], v[:, 0]))
        attended = F.scaled_dot_product_attention(query, key, value)[0]  # (H, rows, head_dim)
        return self._fed(x[rows] + self._reduced(self.wo, attended.transpose(0, 1).flatten(1)))

    def _fed(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.fc0(self.tp.enter(self.norm1(x))), approximate="tanh")
        return x + self._reduced(self.fc1, hidden)

    def _attention(self, x: Tensor, angles: Tensor, lengths: Sequence[int]) -> Tensor:
        turned, v = self.packed(x, angles)
        # Neighbours of equal size share a call: no mask, no padding, and each image is computed for itself.
        runs = [(length, len(list(run))) for length, run in groupby(lengths)]
        sizes = [length * num_images for length, num_images in runs]
        mixed = []
        for (length, num_images), own_qk, own_v in zip(runs, turned.split(sizes), v.split(sizes), strict=True):
            packed = (*own_qk.unbind(1), own_v.squeeze(1))
            query, key, value = (x.unflatten(0, (num_images, length)).transpose(1, 2) for x in packed)
            attended = F.scaled_dot_product_attention(query, key, value)  # (images, H, length, head_dim)
            mixed.append(attended.transpose(1, 2).flatten(0, 1).flatten(1))
        return self._reduced(self.wo, torch.cat(mixed))

    def _reduced(self, linear: Linear, x: Tensor) -> Tensor:
        """The sum over ranks, with the bias added once."""
        y = self.tp.reduce(linear.product(x))
        return y if linear.bias is None else y + linear.bias.to(y.dtype)


class VisionTower(nn.Module):
    """Patches of several images -> vectors of merged patches, in the order of the images."""

    def __init__(self, spec: VisionSpec, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.spec = spec
        self.patch_embed = PatchEmbed(spec, dtype)
        self.pos_embed = PositionGrid(spec, dtype)
        self.blocks = nn.ModuleList(VisionBlock(spec, dtype) for _ in range(spec.num_layers))
        self.final_norm: nn.Module = nn.Identity()
        if spec.has_final_norm:
            self.final_norm = norm_of(spec.norm, spec.hidden_size, spec.norm_eps, dtype)

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """(N, 3, p, p) normalised patches -> (tokens, m * m, C) in the dtype of the weights; frames are averaged.

        With DeepStack the states after its layers come as further groups: (tokens, (1 + n) * m * m, C).

        Raises ImageError where a grid does not merge evenly, has too many frames, or all grids together are not N.
        """
        check_grids(self.spec, grids, num_patches=patches.shape[0])
        x = self.patch_embed(patches)
        if not grids:
            groups = 1 + len(self.spec.deepstack)
            return x.new_zeros(0, groups * self.spec.merge_size**2, self.spec.hidden_size)
        x = x + torch.cat([self.pos_embed(grid) for grid in grids])
        dtype = torch.promote_types(x.dtype, torch.float32)
        angles = torch.cat([rotary_angles(self.spec, grid, device=x.device, dtype=dtype) for grid in grids])
        lengths = [math.prod(grid) for grid in grids]
        states = []
        for layer_idx, block in enumerate(self.blocks):
            x = block(x, angles, lengths)
            if layer_idx in self.spec.deepstack:
                states.append(self.merged(x, grids, lengths))
        return torch.cat([self.merged(self.final_norm(x), grids, lengths), *states], 1)

    def merged(self, x: Tensor, grids: Sequence[Grid], lengths: Sequence[int]) -> Tensor:
        """(N, C) -> (tokens, m * m, C)."""
        parts = zip(x.split(lengths), grids, strict=True)
        return torch.cat([merge_patches(part, grid, self.spec.merge_size) for part, grid in parts])


def check_grids(spec: VisionSpec, grids: Sequence[Grid], *, num_patches: int) -> None:
    """Raises ImageError unless every grid can be merged and together they hold `num_patches`."""
    m = spec.merge_size
    for frames, rows, columns in grids:
        if not (1 <= frames <= spec.num_frames and rows > 0 and columns > 0 and rows % m == 0 and columns % m == 0):
            raise ImageError(
                "patch grid does not fit the vision tower",
                found=f"{frames} x {rows} x {columns}",
                expected=f"1 to {spec.num_frames} frames of rows and columns that {m} divides",
            )
    total = sum(math.prod(grid) for grid in grids)
    if total != num_patches:
        raise ImageError("grids and patches differ in number", found=num_patches, expected=total)


def frame_table(num_frames: int, dim: int, *, device: torch.device | None = None) -> Tensor:
    """Fixed sine and cosine vectors of frame times: (num_frames, dim) float32, all sines before all cosines."""
    rates = 10000.0 ** -(torch.arange(dim // 2, device=device, dtype=torch.float32) / (dim // 2))
    phases = torch.arange(num_frames, device=device, dtype=torch.float32)[:, None] * rates
    return torch.cat([phases.sin(), phases.cos()], dim=1)


def rotary_angles(
    spec: VisionSpec, grid: Grid, *, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Angle of each pair of each patch, (frames * rows * columns, P).

    Even pairs turn by column and odd ones by row; where halves are rotated, the first half by row and the second by
    column.
    """
    frames, rows, columns = grid
    steps = torch.arange(0, spec.head_dim, 4, device=device, dtype=dtype)
    rates = 1.0 / spec.rope_theta ** (steps / spec.head_dim)
    by_row = torch.arange(rows, device=device, dtype=dtype)[:, None, None] * rates
    by_column = torch.arange(columns, device=device, dtype=dtype)[None, :, None] * rates
    by_column, by_row = torch.broadcast_tensors(by_column, by_row)
    both = torch.cat([by_row, by_column], -1)
    if not spec.rotates_halves:
        both = torch.stack([by_column, by_row], -1).flatten(2)  # (rows, columns, P / 2, 2), then (rows, columns, P)
    return both.flatten(0, 1).repeat(frames, 1)


def rotate_pairs(x: Tensor, angles: Tensor) -> Tensor:
    """Turn neighbouring pairs (x0, x1), (x2, x3), ... of every head: (N, H, 2P), (N, P) -> (N, H, 2P), in float32.

    A pair is a complex number, and turning it a product.
    """
    turns = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    pairs = torch.view_as_complex(as_float(x).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


def rotate_halves(x: Tensor, angles: Tensor) -> Tensor:
    """The same of pairs (x0, xP), (x1, xP+1), ...: (N, H, 2P), (N, P) -> (N, H, 2P), in float32."""
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    a, b = as_float(x).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def merge_patches(x: Tensor, grid: Grid, m: int) -> Tensor:
    """Average over frames, then gather each m x m square row by row: (N, C) -> (N / frames / m^2, m^2, C)."""
    frames, rows, columns = grid
    squares = x.view(frames, rows // m, m, columns // m, m, -1).mean(0).transpose(1, 2)
    return squares.flatten(2, 3).flatten(0, 1)
