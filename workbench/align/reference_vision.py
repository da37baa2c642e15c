"""Kimi K3's picture path from its equations: preprocessing, vision tower, projector. Part of the second opinion.

N patches of one picture (row-major over its grid), C tower width, h x w grid in patches, p patch side.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from workbench.align.reference_weights import PublishedWeights
from workbench.align.rounding import round_all
from workbench.base import ConfigError

__all__ = ["ReferenceImage", "reference_patches", "reference_vision"]

TOWER_NORM_EPS = 2.0**-23  # nn.RMSNorm without an eps: machine epsilon of its fp32 computation
ROPE_THETA = 10000.0


@dataclass(frozen=True, kw_only=True)
class ReferenceImage:
    """One picture cut into patches: (N, 3, p, p) uint8, or float already normalised to [-1, 1]; `grid` is (h, w)."""

    patches: np.ndarray
    grid: tuple[int, int]


def reference_patches(root: Path | str, picture: Path | Image.Image) -> ReferenceImage:
    """Resize, composite, pad and cut one picture by the settings in `root/preprocessor_config.json`.

    Never enlarges; sizes are truncated; padding goes right and bottom with byte 0. Raises ConfigError without settings.
    """
    path = Path(root) / "preprocessor_config.json"
    try:
        settings = json.loads(path.read_text())["media_proc_cfg"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"no readable image settings: {error}", where=path) from None
    image = picture if isinstance(picture, Image.Image) else Image.open(picture)
    p, side = settings["patch_size"], settings["patch_limit_on_one_side"]
    (w, h), unit = image.size, settings["patch_size"] * settings["merge_kernel_size"]
    area = max(1, w // p) * max(1, h // p)
    scale = min(1.0, math.sqrt(settings["in_patch_limit"] / area), side * p / w, side * p / h)
    size = min(max(1, int(w * scale)), side * p), min(max(1, int(h * scale)), side * p)
    resized = image.resize(size, Image.Resampling.BICUBIC)  # in the picture's own mode
    pixels = _opaque(resized, settings["transparent_bg_config"])
    pixels = np.pad(pixels, ((0, -size[1] % unit), (0, -size[0] % unit), (0, 0)))
    rows, cols = pixels.shape[0] // p, pixels.shape[1] // p
    patches = pixels.reshape(rows, p, cols, p, 3).transpose(0, 2, 4, 1, 3).reshape(rows * cols, 3, p, p)
    return ReferenceImage(patches=np.ascontiguousarray(patches), grid=(rows, cols))


def _opaque(image: Image.Image, background: dict[str, Any]) -> np.ndarray:
    """(height, width, 3) uint8; a transparent picture is laid over a chessboard in float32 and truncated to bytes."""
    if "A" not in image.getbands() and "transparency" not in image.info:
        return np.asarray(image.convert("RGB"))
    rgba = np.asarray(image.convert("RGBA")).astype(np.float32)
    row, col = np.indices(rgba.shape[:2]) // background["chessboard_square_size"]
    first, second = background["chessboard_white_value"], background["chessboard_gray_value"]
    if not background["chessboard_square_on_top_left"]:
        first, second = second, first
    board = np.where((row + col) % 2 == 0, first, second).astype(np.float32)[..., None]
    alpha = rgba[..., 3:] / np.float32(255.0)
    return (rgba[..., :3] * alpha + board * (1 - alpha)).astype(np.uint8)


def reference_vision(
    weights: PublishedWeights,
    config: dict[str, Any],
    vision: dict[str, Any],
    image: ReferenceImage,
    *,
    bf16_grid: float | None = None,
) -> dict[str, Tensor]:
    """Tower and projector over one picture: `patch_embed`, `block{b}`, `encoder_out` (N, C), `tower` (tokens, 4, C),
    `projector` (tokens, D). With `bf16_grid` results are rounded to bf16 where the published tower rounds them."""

    def r(x: Tensor) -> Tensor:
        return round_all(x, bf16_grid)

    def norm(x: Tensor, weight: str, eps: float) -> Tensor:  # unlike the text model's, rounded after the weight alone
        return r(weights(weight) * x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps))

    height, width = image.grid
    heads, head_dim = vision["vt_num_attention_heads"], vision["qkv_hidden_size"] // vision["vt_num_attention_heads"]
    pixels = torch.from_numpy(np.ascontiguousarray(image.patches)).to(weights.dtype)
    if image.patches.dtype == np.uint8:
        pixels = (pixels / 255.0 - 0.5) / 0.5
    kernel = weights("vision_tower.patch_embed.proj.weight")
    grid = r(_resized_grid(weights("vision_tower.patch_embed.pos_emb.weight"), height, width))
    x = r(r(r(pixels).flatten(1) @ kernel.flatten(1).T) + grid.flatten(0, 1))
    trace = {"patch_embed": x}
    angle = _rotary_angles(height, width, head_dim, weights.dtype)
    for b in range(vision["vt_num_hidden_layers"]):
        block = f"vision_tower.encoder.blocks.{b}."
        qkv = r(norm(x, f"{block}norm0.weight", TOWER_NORM_EPS) @ weights(f"{block}wqkv.weight").T)
        q, k, v = qkv.view(len(x), 3, heads, head_dim).unbind(1)
        q, k = r(_rotate(q, angle)), r(_rotate(k, angle))
        attention = r(torch.softmax(r(r(torch.einsum("qhd,khd->hqk", q, k)) * head_dim**-0.5), dim=-1))
        mixed = r(torch.einsum("hqk,khd->qhd", attention, v).flatten(1))
        x = r(x + r(mixed @ weights(f"{block}wo.weight").T))
        inner = r(norm(x, f"{block}norm1.weight", TOWER_NORM_EPS) @ weights(f"{block}mlp.fc0.weight").T)
        inner = r(0.5 * inner * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3))))
        x = r(x + r(inner @ weights(f"{block}mlp.fc1.weight").T))
        trace[f"block{b}"] = x
    x = norm(x, "vision_tower.encoder.final_layernorm.weight", TOWER_NORM_EPS)
    trace["encoder_out"] = x
    m, n = vision["merge_kernel_size"]  # neighbours in the order (row, col) = (0,0), (0,1), (1,0), (1,1)
    merged = x.view(height // m, m, width // n, n, -1).permute(0, 2, 1, 3, 4).reshape(-1, m * n, x.shape[-1])
    trace["tower"] = merged
    hidden = r(merged.flatten(1) @ weights("mm_projector.proj.0.weight").T)
    hidden = r(0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2))))
    projected = r(hidden @ weights("mm_projector.proj.2.weight").T)
    trace["projector"] = norm(projected, "mm_projector.post_norm.weight", vision["projector_ln_eps"])
    return trace


def _resized_grid(grid: Tensor, height: int, width: int) -> Tensor:
    """Bilinear resize of (rows, columns, C) with half-pixel centres and no antialiasing."""

    def weights_1d(size_in: int, size_out: int) -> Tensor:
        matrix = grid.new_zeros(size_out, size_in)
        for i in range(size_out):
            source = max((i + 0.5) * size_in / size_out - 0.5, 0.0)
            low = min(int(source), size_in - 1)
            high = min(low + 1, size_in - 1)
            matrix[i, low] += 1 - (source - low)
            matrix[i, high] += source - low
        return matrix

    return torch.einsum("yr,rcd,xc->yxd", weights_1d(grid.shape[0], height), grid, weights_1d(grid.shape[1], width))


def _rotary_angles(height: int, width: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """(N, head_dim / 2): pair 2j turns by column * theta^(-4j / head_dim), pair 2j + 1 by row * the same."""
    row, col = (x.flatten().to(dtype) for x in torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"))
    frequency = ROPE_THETA ** (-4 * torch.arange(head_dim // 4, dtype=dtype) / head_dim)
    return torch.stack((col.outer(frequency), row.outer(frequency)), dim=-1).flatten(1)


def _rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Turn adjacent pairs (x0, x1), (x2, x3), ... of (N, H, head_dim) by `angle` (N, head_dim / 2)."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = torch.cos(angle).unsqueeze(1), torch.sin(angle).unsqueeze(1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
