"""OLMoE 1B-7B.

What is new against Mixtral:
  [OM-1] q and k are normalised across all heads at once, before they are cut into heads; q, k, v may be clipped.
  [OM-2] the top-k weights of the softmax are used as they are unless `norm_topk_prob` says otherwise.
  [OM-3] experts stand under `mlp` by their long names.
Source: config of allenai/OLMoE-1B-7B-0125-Instruct, transformers' olmoe.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from workbench.spec import naming
from workbench.spec.dialect import MAX_EXPERTS, decoder, is_named, num_layers, open_config, plain_moe
from workbench.spec.families.llama import read_attention
from workbench.spec.model import LayerSpec, ModelSpec
from workbench.spec.tensors import TensorSpec

__all__ = ["ARCHITECTURES", "FAMILY", "matches", "parse", "tensors"]

FAMILY = "olmoe"
ARCHITECTURES = ("OlmoeForCausalLM",)
NAMES = naming.Names()  # [OM-3]


def matches(config: Mapping[str, object]) -> bool:
    return is_named(config, (FAMILY,), ARCHITECTURES)


def parse(config: Mapping[str, object], image_config: Mapping[str, object] | None = None) -> ModelSpec:
    """ModelSpec from an OLMoE config. Raises ConfigError, or UnsupportedModelError for a switch not known."""
    top, text = open_config(config)
    text.require("hidden_act", "silu")
    eps = text.number("rms_norm_eps")
    limit = text.number("clip_qkv") if text.has("clip_qkv") else None
    text.skip("clip_qkv")
    mixer = dataclasses.replace(read_attention(text), qk_norm="full", qk_norm_eps=eps, qkv_limit=limit)  # [OM-1]
    moe = plain_moe(
        num_experts=text.integer("num_experts", maximum=MAX_EXPERTS),
        top_k=text.integer("num_experts_per_tok"),
        width=text.integer("intermediate_size"),
        hidden_size=text.integer("hidden_size"),
        norm_eps=eps,
        renormalize=text.boolean("norm_topk_prob"),  # [OM-2]
        scoring="softmax",
        has_correction_bias=False,
    )
    return decoder(
        top,
        text,
        family=FAMILY,
        architecture=ARCHITECTURES[0],
        layers=[LayerSpec(layer_idx=i, mixer=mixer, ffn=moe) for i in range(num_layers(text))],
        norm_eps=eps,
    )


def tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    return naming.standard_tensors(spec, NAMES)
