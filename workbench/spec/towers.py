"""Vision towers that several families share: their config keys, and their tensors as published.

MoonViT (Kimi-K2.5) and the Qwen3-VL tower (also in Qwen3.5) are both vision transformers with layer norms and biases;
they differ in the patch, the position table, the rotation and in where the merged vectors are normed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from workbench.base import ConfigError
from workbench.spec.config import ConfigReader
from workbench.spec.dialect import MAX_LAYERS
from workbench.spec.model import ModelSpec, ProjectorSpec, VisionSpec
from workbench.spec.tensors import Role, TensorSpec

__all__ = ["moonvit_tensors", "qwen_tower_tensors", "read_moonvit", "read_qwen_tower"]

ROPE_THETA = 10000.0
MOONVIT_EPS, QWEN_EPS = 1e-5, 1e-6  # of every layer norm inside the tower, fixed by the modelling files


def read_moonvit(vision: ConfigReader) -> tuple[VisionSpec, ProjectorSpec]:
    vision.skip("model_type", "mm_projector_type", "text_hidden_size", "video_attn_type")
    for key, wanted in (
        ("merge_type", "sd2_tpool"),
        ("pos_emb_type", "divided_fixed"),
        ("projector_hidden_act", "gelu"),
        ("mm_projector_type", "patchmerger"),
    ):
        vision.require(key, wanted)
    merge = vision.int_list("merge_kernel_size")
    if len(merge) != 2 or merge[0] != merge[1] or merge[0] < 1:
        vision.refuse("merge_kernel_size", "a square merge is expected")
    width = vision.integer("vt_hidden_size")
    vision.require("mm_hidden_size", width)
    spec = VisionSpec(
        kind="moonvit",
        num_layers=vision.integer("vt_num_hidden_layers", maximum=MAX_LAYERS),
        hidden_size=width,
        num_heads=vision.integer("vt_num_attention_heads"),
        qkv_width=width,
        ffn_width=vision.integer("vt_intermediate_size"),
        patch_size=vision.integer("patch_size"),
        merge_size=merge[0],
        grid_height=vision.integer("init_pos_emb_height"),
        grid_width=vision.integer("init_pos_emb_width"),
        num_frames=vision.integer("init_pos_emb_time"),
        rope_theta=ROPE_THETA,
        norm_eps=MOONVIT_EPS,
        norm="layer",
        has_bias=True,
        resize="bicubic",
    )
    merged = merge[0] ** 2 * width
    projector = ProjectorSpec(
        input_width=merged,
        hidden_width=merged,
        output_width=vision.integer("text_hidden_size"),
        norm_eps=vision.number("projector_ln_eps"),
        norm="layer",
        norm_at="patch",
        has_bias=True,
        num_merged=spec.merge_size**2,
    )
    return spec, projector


def moonvit_tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    vision, projector = spec.vision, spec.projector
    if vision is None or projector is None:
        return
    c, f, p = vision.hidden_size, vision.ffn_width, vision.patch_size
    inner, outer = projector.hidden_width, projector.output_width
    at = "mm_projector."
    yield from _pair(spec, f"{at}pre_norm", "projector.norm", (c,), "projector")
    yield from _pair(spec, f"{at}proj.0", "projector.fc0", (inner, projector.input_width), "projector")
    yield from _pair(spec, f"{at}proj.2", "projector.fc1", (outer, inner), "projector")
    at = "vision_tower."
    yield from _pair(spec, f"{at}patch_embed.proj", "vision.patch_embed", (c, 3, p, p))
    grid = (vision.grid_height, vision.grid_width, c)
    yield _tensor(spec, f"{at}patch_embed.pos_emb.weight", "vision.pos_embed.weight", grid)
    for b in range(vision.num_layers):
        for published, ours, shape in (
            ("norm0", "norm0", (c,)),
            ("norm1", "norm1", (c,)),
            ("wqkv", "wqkv", (3 * c, c)),
            ("wo", "wo", (c, c)),
            ("mlp.fc0", "fc0", (f, c)),
            ("mlp.fc1", "fc1", (c, f)),
        ):
            yield from _pair(spec, f"{at}encoder.blocks.{b}.{published}", f"vision.blocks.{b}.{ours}", shape)
    yield from _pair(spec, f"{at}encoder.final_layernorm", "vision.final_norm", (c,))


def read_qwen_tower(vision: ConfigReader) -> tuple[VisionSpec, ProjectorSpec]:
    vision.skip("model_type", "initializer_range", "dtype", "rope_parameters")
    vision.require("hidden_act", "gelu_pytorch_tanh")
    vision.require("in_channels", 3, default=3)
    positions = vision.integer("num_position_embeddings")
    side = math.isqrt(positions)
    if side * side != positions:
        vision.refuse("num_position_embeddings", "a square table is expected")
    width, merge = vision.integer("hidden_size"), vision.integer("spatial_merge_size")
    depth = vision.integer("depth", maximum=MAX_LAYERS)
    deepstack = vision.int_list("deepstack_visual_indexes", default=())
    if any(not 0 <= layer < depth for layer in deepstack):
        raise ConfigError("deepstack_visual_indexes names layers the tower does not have", found=deepstack)
    spec = VisionSpec(
        kind="qwen3_vl",
        num_layers=depth,
        hidden_size=width,
        num_heads=vision.integer("num_heads"),
        qkv_width=width,
        ffn_width=vision.integer("intermediate_size"),
        patch_size=vision.integer("patch_size"),
        merge_size=merge,
        grid_height=side,
        grid_width=side,
        num_frames=1,
        rope_theta=ROPE_THETA,
        norm_eps=QWEN_EPS,
        norm="layer",
        has_bias=True,
        has_final_norm=False,
        aligns_corners=True,
        has_flat_grid=True,
        rotates_halves=True,
        temporal_patch=vision.integer("temporal_patch_size", minimum=2),
        deepstack=deepstack,
    )
    merged = merge**2 * width
    projector = ProjectorSpec(
        input_width=merged,
        hidden_width=merged,
        output_width=vision.integer("out_hidden_size"),
        norm_eps=QWEN_EPS,
        norm="layer",
        norm_at="patch",
        has_bias=True,
        num_merged=spec.merge_size**2,
        num_deepstack=len(deepstack),
    )
    return spec, projector


def qwen_tower_tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    vision, projector = spec.vision, spec.projector
    if vision is None or projector is None:
        return
    c, f, p, at = vision.hidden_size, vision.ffn_width, vision.patch_size, "model.visual."
    patch = (c, 3, vision.temporal_patch, p, p)
    yield from _pair(spec, f"{at}patch_embed.proj", "vision.patch_embed", patch)
    positions = (vision.grid_height * vision.grid_width, c)
    yield _tensor(spec, f"{at}pos_embed.weight", "vision.pos_embed.weight", positions)
    for b in range(vision.num_layers):
        for published, ours, shape in (
            ("norm1", "norm0", (c,)),
            ("norm2", "norm1", (c,)),
            ("attn.qkv", "wqkv", (3 * c, c)),
            ("attn.proj", "wo", (c, c)),
            ("mlp.linear_fc1", "fc0", (f, c)),
            ("mlp.linear_fc2", "fc1", (c, f)),
        ):
            yield from _pair(spec, f"{at}blocks.{b}.{published}", f"vision.blocks.{b}.{ours}", shape)
    # The final merger normalises before it merges, those of the deepstack after.
    mergers = [(f"{at}merger", "projector", c)]
    mergers += [
        (f"{at}deepstack_merger_list.{k}", f"projector.deepstack.{k}", projector.input_width)
        for k in range(len(vision.deepstack))
    ]
    for module, ours, norm_width in mergers:
        yield from _pair(spec, f"{module}.norm", f"{ours}.norm", (norm_width,), "projector")
        first = (projector.hidden_width, projector.input_width)
        yield from _pair(spec, f"{module}.linear_fc1", f"{ours}.fc0", first, "projector")
        second = (projector.output_width, projector.hidden_width)
        yield from _pair(spec, f"{module}.linear_fc2", f"{ours}.fc1", second, "projector")


def _pair(
    spec: ModelSpec, module: str, ours: str, shape: tuple[int, ...], role: Role = "vision"
) -> Iterator[TensorSpec]:
    """A weight and the bias along its first dimension."""
    yield _tensor(spec, f"{module}.weight", f"{ours}.weight", shape, role)
    yield _tensor(spec, f"{module}.bias", f"{ours}.bias", shape[:1], role)


def _tensor(spec: ModelSpec, name: str, param: str, shape: tuple[int, ...], role: Role = "vision") -> TensorSpec:
    part = "bias" if name.endswith(".bias") else "weight"
    return TensorSpec(name=name, shape=shape, dtype=spec.dtype, role=role, param=param, part=part)  # type: ignore[arg-type]
