"""Mixtral 8x7B and 8x22B.

What is new against a dense Llama:
  [MX-1] experts in every layer under `block_sparse_moe`, named w1 (gate), w2 (down), w3 (up); softmax router, top 2
         renormalised; nothing shared.
Source: config of mistralai/Mixtral-8x7B-v0.1, transformers' mixtral.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from workbench.spec import naming
from workbench.spec.dialect import MAX_EXPERTS, decoder, is_named, num_layers, open_config, plain_moe
from workbench.spec.families.llama import read_attention
from workbench.spec.model import LayerSpec, ModelSpec
from workbench.spec.tensors import TensorSpec

__all__ = ["ARCHITECTURES", "FAMILY", "matches", "parse", "tensors"]

FAMILY = "mixtral"
ARCHITECTURES = ("MixtralForCausalLM",)
NAMES = naming.Names(moe="block_sparse_moe", expert=("w1", "w2", "w3"))  # [MX-1]


def matches(config: Mapping[str, object]) -> bool:
    return is_named(config, (FAMILY,), ARCHITECTURES)


def parse(config: Mapping[str, object], image_config: Mapping[str, object] | None = None) -> ModelSpec:
    """ModelSpec from a Mixtral config. Raises ConfigError, or UnsupportedModelError for a switch not known."""
    top, text = open_config(config)
    text.require("hidden_act", "silu")
    moe = plain_moe(
        num_experts=text.integer("num_local_experts", maximum=MAX_EXPERTS),
        top_k=text.integer("num_experts_per_tok"),
        width=text.integer("intermediate_size"),
        hidden_size=text.integer("hidden_size"),
        norm_eps=text.number("rms_norm_eps"),
        scoring="softmax",
        has_correction_bias=False,
    )
    mixer = read_attention(text)
    return decoder(
        top,
        text,
        family=FAMILY,
        architecture=ARCHITECTURES[0],
        layers=[LayerSpec(layer_idx=i, mixer=mixer, ffn=moe) for i in range(num_layers(text))],
        norm_eps=text.number("rms_norm_eps"),
    )


def tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    return naming.standard_tensors(spec, NAMES)
