"""MiMo-V2-Flash.

What is new about this family:
  [MM-1] five of six layers see a window of 128 tokens with twice the key-value heads, their own rotary base and one
         learned sink logit per head; the others see everything.
  [MM-2] values are narrower than keys (128 against 192) and scaled by 0.707; a third of each head is rotated.
  [MM-3] routing as DeepSeek-V3 in one group, nothing shared, first layer dense; the layer kinds are 0/1 lists.
Source: config of XiaomiMiMo/MiMo-V2-Flash, transformers' mimo_v2_flash.
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

FAMILY = "mimo_v2_flash"
ARCHITECTURES = ("MiMoV2FlashForCausalLM",)
NAMES = naming.Names(sinks="attention_sink_bias")


def matches(config: Mapping[str, object]) -> bool:
    return is_named(config, (FAMILY,), ARCHITECTURES)


def parse(config: Mapping[str, object], image_config: Mapping[str, object] | None = None) -> ModelSpec:
    """ModelSpec from a MiMo-V2-Flash config. Raises ConfigError, or UnsupportedModelError for a switch not known."""
    top, text = open_config(config)
    for key, wanted in (
        ("hidden_act", "silu"),
        ("scoring_func", "sigmoid"),
        ("topk_method", "noaux_tc"),
        ("n_group", 1),
        ("topk_group", 1),
        ("attention_bias", False),
    ):
        text.require(key, wanted, default=wanted)
    text.skip("n_shared_experts", "attention_chunk_size", "sliding_window_size")
    eps, count, head_dim = text.number("layernorm_epsilon"), num_layers(text), text.integer("head_dim")
    full = GQASpec(
        num_heads=text.integer("num_attention_heads"),
        num_kv_heads=text.integer("num_key_value_heads"),
        head_dim=head_dim,
        v_dim=text.integer("v_head_dim"),
        rope=read_rope(text, head_dim),  # [MM-2]
        value_scale=text.number("attention_value_scale", default=1.0),
        has_sinks=text.boolean("add_full_attention_sink_bias", default=False),
    )
    assert full.rope is not None
    window = dataclasses.replace(  # [MM-1]
        full,
        num_heads=text.integer("swa_num_attention_heads"),
        num_kv_heads=text.integer("swa_num_key_value_heads"),
        head_dim=text.integer("swa_head_dim"),
        v_dim=text.integer("swa_v_head_dim"),
        rope=dataclasses.replace(full.rope, theta=text.number("swa_rope_theta")),
        window=text.integer("sliding_window"),
        has_sinks=text.boolean("add_swa_attention_sink_bias"),
    )
    is_window, is_moe = text.int_list("hybrid_layer_pattern"), text.int_list("moe_layer_freq")
    if len(is_window) != count or len(is_moe) != count:
        raise ConfigError("hybrid_layer_pattern and moe_layer_freq must have an entry for each layer")
    moe = plain_moe(  # [MM-3]
        num_experts=text.integer("n_routed_experts", maximum=MAX_EXPERTS),
        top_k=text.integer("num_experts_per_tok"),
        width=text.integer("moe_intermediate_size"),
        hidden_size=text.integer("hidden_size"),
        norm_eps=eps,
        renormalize=text.boolean("norm_topk_prob"),
        routed_scale=text.number("routed_scaling_factor") if text.has("routed_scaling_factor") else 1.0,
    )
    text.skip("routed_scaling_factor")
    dense = DenseFFNSpec(width=text.integer("intermediate_size"), activation=SILU)
    return decoder(
        top,
        text,
        family=FAMILY,
        architecture=ARCHITECTURES[0],
        layers=[
            LayerSpec(layer_idx=i, mixer=window if is_window[i] else full, ffn=moe if is_moe[i] else dense)
            for i in range(count)
        ],
        norm_eps=eps,
    )


def tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    return naming.standard_tensors(spec, NAMES)
