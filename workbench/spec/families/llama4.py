"""Llama-4 Scout and Maverick (text).

What is new about this family:
  [L4-1] three of four layers see aligned chunks of 8192 positions and rotate (neighbours as pairs); the fourth sees
         everything without a position signal and scales its queries by the logarithm of their position.
  [L4-2] q and k are divided by their root mean square after the rotation where `use_qk_norm` says so.
  [L4-3] experts in every layer (Scout) or in every second one (Maverick, whose other layers are dense at twice the
         width); one expert per token, whose sigmoid weight scales its input; one shared expert.
  [L4-4] experts fused and stored (experts, inputs, outputs), gate before up; everything under `feed_forward`.
The tower is not described here: it is listed among the unread parts, and only text is counted.
Source: config of meta-llama/Llama-4-Maverick, transformers' llama4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from workbench.base import ConfigError
from workbench.spec import naming
from workbench.spec.dialect import MAX_EXPERTS, SILU, decoder, is_named, num_layers, open_config, plain_moe, read_rope
from workbench.spec.mixers import GQASpec
from workbench.spec.model import DenseFFNSpec, LayerSpec, ModelSpec
from workbench.spec.tensors import TensorSpec

__all__ = ["ARCHITECTURES", "FAMILY", "matches", "parse", "tensors"]

FAMILY = "llama4"
ARCHITECTURES = ("Llama4ForConditionalGeneration", "Llama4ForCausalLM")
NAMES = naming.Names(  # [L4-4]
    root="language_model.model.",
    head="language_model.lm_head",
    dense="feed_forward",
    moe="feed_forward",
    router="router",
    is_fused=True,
    is_transposed=True,
    shared="shared_expert",
)
BARE_NAMES = dataclasses.replace(NAMES, root="model.", head="lm_head")


def matches(config: Mapping[str, object]) -> bool:
    return is_named(config, (FAMILY, "llama4_text"), ARCHITECTURES)


def parse(config: Mapping[str, object], image_config: Mapping[str, object] | None = None) -> ModelSpec:
    """ModelSpec of Llama-4's text model. Raises ConfigError, or UnsupportedModelError for a switch not known."""
    top, text = open_config(config)
    text.require("hidden_act", "silu")
    head_dim, count, eps = text.integer("head_dim"), num_layers(text), text.number("rms_norm_eps")
    has_bias = text.boolean("attention_bias", default=False)
    local = GQASpec(
        num_heads=text.integer("num_attention_heads"),
        num_kv_heads=text.integer("num_key_value_heads"),
        head_dim=head_dim,
        v_dim=head_dim,
        rope=read_rope(text, head_dim, is_interleaved=True),
        has_bias=has_bias,
        has_output_bias=has_bias,
        qk_norm="l2" if text.boolean("use_qk_norm", default=True) else "none",  # [L4-2]
        qk_norm_eps=eps,
        chunk=text.integer("attention_chunk_size") if text.has("attention_chunk_size") else None,
    )
    tuning = (text.number("floor_scale", default=8192), text.number("attn_scale", default=0.1))
    wants_tuning = text.flag("attn_temperature_tuning", default=True)
    overall = dataclasses.replace(
        local, rope=None, chunk=None, qk_norm="none", temperature=tuning if wants_tuning else None
    )
    every = text.integer("no_rope_layer_interval", default=4)
    rotates = text.int_list("no_rope_layers", default=()) or tuple(int((i + 1) % every != 0) for i in range(count))
    if len(rotates) != count:
        raise ConfigError("no_rope_layers must have an entry for each layer", found=len(rotates), expected=count)
    moe = plain_moe(
        num_experts=text.integer("num_local_experts", maximum=MAX_EXPERTS),
        top_k=text.integer("num_experts_per_tok"),
        width=text.integer("intermediate_size"),
        hidden_size=text.integer("hidden_size"),
        norm_eps=eps,
        num_shared=1,
        shared_width=text.integer("intermediate_size"),
        renormalize=False,
        scoring="sigmoid",
        has_correction_bias=False,
        scales_input=True,  # [L4-3]
    )
    dense = DenseFFNSpec(width=text.integer("intermediate_size_mlp"), activation=SILU)
    step = text.integer("interleave_moe_layer_step", default=1)
    sparse = text.int_list("moe_layers", default=()) or tuple(range(step - 1, count, step))
    text.skip("layer_types", "for_llm_compressor", "attention_bias")
    has_tower = text is not top and top.has("vision_config")
    top.skip("vision_config", "boi_token_index", "eoi_token_index", "image_token_index")
    return decoder(
        top,
        text,
        family=FAMILY,
        architecture=ARCHITECTURES[1 if text is top else 0],
        layers=[
            LayerSpec(layer_idx=i, mixer=local if rotates[i] else overall, ffn=moe if i in sparse else dense)
            for i in range(count)
        ],
        norm_eps=eps,
        unread_parts=("vision tower and projector (vision_config)",) if has_tower else (),
    )


def tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    return naming.standard_tensors(spec, BARE_NAMES if spec.architecture == ARCHITECTURES[1] else NAMES)
