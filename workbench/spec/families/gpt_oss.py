"""gpt-oss 20b and 120b.

What is new about this family:
  [OSS-1] every second layer sees a window of 128 tokens; one learned sink logit per head joins each softmax.
  [OSS-2] biases everywhere: q, k, v, o, router, experts.
  [OSS-3] the router's softmax runs over the chosen experts only.
  [OSS-4] clamped SwiGLU: gate * sigmoid(1.702 gate) * (up + 1); gate and up rows take turns.
  [OSS-5] experts in MXFP4 as blocks of 16 bytes, (experts, outputs, blocks, 16); in bf16 files (experts, inputs,
          outputs) instead.
  [OSS-6] YaRN whose ramp is not cut to whole columns.
Source: configs and reference code of openai/gpt-oss, transformers' gpt_oss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from workbench.base import ConfigError
from workbench.spec import naming
from workbench.spec.dialect import MAX_EXPERTS, decoder, is_named, num_layers, open_config, plain_moe, read_rope
from workbench.spec.mixers import GQASpec
from workbench.spec.model import Activation, LayerSpec, ModelSpec
from workbench.spec.tensors import TensorSpec

__all__ = ["ARCHITECTURES", "FAMILY", "matches", "parse", "tensors"]

FAMILY = "gpt_oss"
ARCHITECTURES = ("GptOssForCausalLM",)
NAMES = naming.Names(router="router", is_fused=True, is_transposed=True, is_interleaved=True)


def matches(config: Mapping[str, object]) -> bool:
    return is_named(config, (FAMILY,), ARCHITECTURES)


def parse(config: Mapping[str, object], image_config: Mapping[str, object] | None = None) -> ModelSpec:
    """ModelSpec from a gpt-oss config. Raises ConfigError, or UnsupportedModelError for a switch not known."""
    top, text = open_config(config)
    text.require("hidden_act", "silu")
    text.skip("initial_context_length")
    top_k = text.integer("num_experts_per_tok")
    text.require("experts_per_token", top_k, default=top_k)
    head_dim, count = text.integer("head_dim"), num_layers(text)
    full = GQASpec(
        num_heads=text.integer("num_attention_heads"),
        num_kv_heads=text.integer("num_key_value_heads"),
        head_dim=head_dim,
        v_dim=head_dim,
        rope=read_rope(text, head_dim),  # [OSS-6]
        has_bias=text.boolean("attention_bias"),  # [OSS-2]
        has_output_bias=text.boolean("attention_bias"),
        has_sinks=True,
    )
    window = dataclasses.replace(full, window=text.integer("sliding_window"))
    mixers = {"full_attention": full, "sliding_attention": window}
    kinds = text.str_list("layer_types")  # [OSS-1]
    if len(kinds) != count or not set(kinds) <= mixers.keys():
        raise ConfigError("layer_types must name a known kind for each layer", found=f"{len(kinds)}: {set(kinds)}")
    moe = plain_moe(
        num_experts=text.integer("num_local_experts", maximum=MAX_EXPERTS),
        top_k=top_k,
        width=text.integer("intermediate_size"),
        hidden_size=text.integer("hidden_size"),
        norm_eps=text.number("rms_norm_eps"),
        activation=Activation(
            kind="swiglu_oai", alpha=1.702, limit=text.number("swiglu_limit", default=7.0)
        ),  # [OSS-4]
        scoring="softmax_topk",  # [OSS-3]
        has_correction_bias=False,
        has_router_bias=True,
        has_expert_bias=True,
    )
    return decoder(
        top,
        text,
        family=FAMILY,
        architecture=ARCHITECTURES[0],
        has_transposed_experts=True,
        layers=[LayerSpec(layer_idx=i, mixer=mixers[kind], ffn=moe) for i, kind in enumerate(kinds)],
        norm_eps=text.number("rms_norm_eps"),
    )


def tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    return naming.standard_tensors(spec, NAMES)  # [OSS-5]
