"""Qwen3.5-MoE (35B-A3B, 122B-A10B, 397B-A17B).

What is new against Qwen3-VL-MoE:
  [Q35-1] three of four layers are gated delta nets: key heads shared by groups of value heads, one decay per head.
  [Q35-2] the others are grouped-query attention with a sigmoid output gate packed into q_proj, a quarter rotated.
  [Q35-3] a shared expert scaled by a sigmoid gate of its own.
  [Q35-4] norm weights are stored as the difference from one.
  [Q35-5] fused experts are stored (experts, outputs, inputs); the tower has no DeepStack.
  [Q35-6] one multi-token-prediction layer under `mtp.`, sharing embedding and head.
  [Q35-7] the text model may stand alone, its config flat and its names without `language_model`.
Source: configs of Qwen/Qwen3.5-35B-A3B and 397B-A17B, transformers' qwen3_5_moe.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from workbench.base import ConfigError
from workbench.spec import naming
from workbench.spec.dialect import MAX_EXPERTS, decoder, is_named, num_layers, open_config, plain_moe, read_rope
from workbench.spec.mixers import GatedDeltaSpec, GQASpec, MixerSpec
from workbench.spec.model import DraftSpec, LayerSpec, ModelSpec
from workbench.spec.quant import RuleBook
from workbench.spec.tensors import TensorSpec
from workbench.spec.towers import qwen_tower_tensors, read_qwen_tower

__all__ = ["ARCHITECTURES", "FAMILY", "draft_tensors", "matches", "parse", "tensors"]

FAMILY = "qwen3_5_moe"
ARCHITECTURES = ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM")
NAMES = naming.Names(root="model.language_model.", is_fused=True, shared="shared_expert")  # [Q35-5]
BARE_NAMES = dataclasses.replace(NAMES, root="model.")  # [Q35-7]
SECTIONS = (11, 11, 10)  # of a config without them


def matches(config: Mapping[str, object]) -> bool:
    return is_named(config, (FAMILY, f"{FAMILY}_text"), ARCHITECTURES)


def parse(config: Mapping[str, object], image_config: Mapping[str, object] | None = None) -> ModelSpec:
    """ModelSpec from a Qwen3.5-MoE config. Raises ConfigError, or UnsupportedModelError for a switch not known."""
    top, text = open_config(config)
    text.require("hidden_act", "silu")
    text.require("attention_bias", False, default=False)
    text.require("mamba_ssm_dtype", "float32", default="float32")
    text.require("mtp_use_dedicated_embeddings", False, default=False)
    text.require("mlp_only_layers", [], default=[])
    eps, head_dim, hidden_size = text.number("rms_norm_eps"), text.integer("head_dim"), text.integer("hidden_size")
    rope = read_rope(text, head_dim)
    attention = GQASpec(  # [Q35-2]
        num_heads=text.integer("num_attention_heads"),
        num_kv_heads=text.integer("num_key_value_heads"),
        head_dim=head_dim,
        v_dim=head_dim,
        rope=dataclasses.replace(rope, sections=rope.sections or SECTIONS, has_interleaved_sections=True),
        has_output_gate=text.boolean("attn_output_gate", default=True),
        qk_norm="head",
        qk_norm_eps=eps,
        qk_norm_offset=1.0,  # [Q35-4]
    )
    delta = GatedDeltaSpec(  # [Q35-1]
        num_key_heads=text.integer("linear_num_key_heads"),
        num_value_heads=text.integer("linear_num_value_heads"),
        key_dim=text.integer("linear_key_head_dim"),
        value_dim=text.integer("linear_value_head_dim"),
        conv_size=text.integer("linear_conv_kernel_dim"),
        norm_eps=eps,
    )
    moe = plain_moe(
        num_experts=text.integer("num_experts", maximum=MAX_EXPERTS),
        top_k=text.integer("num_experts_per_tok"),
        width=text.integer("moe_intermediate_size"),
        hidden_size=hidden_size,
        norm_eps=eps,
        num_shared=1,
        shared_width=text.integer("shared_expert_intermediate_size"),
        scoring="softmax",
        has_correction_bias=False,
        has_shared_gate=True,  # [Q35-3]
    )
    mixers: dict[str, MixerSpec] = {"linear_attention": delta, "full_attention": attention}
    count, every = num_layers(text), text.integer("full_attention_interval", default=4)
    default = tuple("linear_attention" if (i + 1) % every else "full_attention" for i in range(count))
    kinds = text.str_list("layer_types", default=default)
    if len(kinds) != count or not set(kinds) <= mixers.keys():
        raise ConfigError("layer_types must name a known kind for each layer", found=f"{len(kinds)}: {set(kinds)}")
    num_draft = text.integer("mtp_num_hidden_layers", minimum=0, maximum=1, default=0)  # [Q35-6]
    draft_layer = LayerSpec(layer_idx=count, mixer=attention, ffn=moe)
    is_bare = text is top
    vision, projector = (None, None) if is_bare else read_qwen_tower(top.child("vision_config"))
    top.skip("video_token_id", "vision_start_token_id", "vision_end_token_id")
    return decoder(
        top,
        text,
        family=FAMILY,
        architecture=ARCHITECTURES[is_bare],
        layers=[LayerSpec(layer_idx=i, mixer=mixers[kind], ffn=moe) for i, kind in enumerate(kinds)],
        norm_eps=eps,
        norm_offset=1.0,  # [Q35-4]
        media_key=None if is_bare else "image_token_id",
        vision=vision,
        projector=projector,
        draft=DraftSpec(num_layers=1, layer=draft_layer, has_own_embedding=False) if num_draft else None,
    )


def tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    yield from naming.standard_tensors(spec, NAMES if spec.vision is not None else BARE_NAMES)
    yield from qwen_tower_tensors(spec)


def draft_tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    if spec.draft is None:
        return
    d, book = spec.hidden_size, RuleBook(spec.quant)
    edge = naming.Writer(spec, book, "mtp.", "draft.0.", role="draft")
    for published, ours in (("pre_fc_norm_embedding", "embed_norm"), ("pre_fc_norm_hidden", "hidden_norm")):
        yield edge.plain(f"{published}.weight", f"{ours}.weight", (d,), "draft")
    yield edge.plain("fc.weight", "join.weight", (d, 2 * d), "draft")
    yield edge.plain("norm.weight", "final_norm.weight", (d,), "draft")
    writer = naming.Writer(spec, book, "mtp.layers.0.", "draft.0.", spec.num_layers, role="draft")
    yield from naming.layer_tensors(writer, spec.draft.layer, NAMES)
