"""Dense decoders: Llama 2 and 3, SmolLM, Mistral, Qwen2 and Qwen3; the degenerate case of every other family.

What differs among them:
  [LL-1] Qwen3 normalises q and k per head; Qwen2 has biases on q, k and v without saying so in its config.
  [LL-2] small models tie the head to the embedding; Llama 3.1 stretches its rotary frequencies its own way.
  [LL-3] Mistral may see a window in every layer; SmolLM3 leaves the rotation out of listed layers.
Source: transformers' llama, mistral, qwen2, qwen3 and smollm3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from workbench.base import ConfigError
from workbench.spec import naming
from workbench.spec.config import ConfigReader
from workbench.spec.dialect import SILU, decoder, is_named, num_layers, open_config, read_rope
from workbench.spec.mixers import GQASpec
from workbench.spec.model import DenseFFNSpec, LayerSpec, ModelSpec
from workbench.spec.tensors import TensorSpec

__all__ = ["ARCHITECTURES", "FAMILY", "matches", "parse", "read_attention", "tensors"]

FAMILY = "llama"
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "SmolLM3ForCausalLM",
)
NAMES = naming.Names()


def matches(config: Mapping[str, object]) -> bool:
    return is_named(config, MODEL_TYPES, ARCHITECTURES)


def parse(config: Mapping[str, object], image_config: Mapping[str, object] | None = None) -> ModelSpec:
    """ModelSpec of a dense decoder. Raises ConfigError, or UnsupportedModelError for a switch not known."""
    top, text = open_config(config)
    kind = text.one_of("model_type", MODEL_TYPES)
    text.require("hidden_act", "silu")
    text.require("mlp_bias", False, default=False)
    eps, count = text.number("rms_norm_eps"), num_layers(text)
    mixer = read_attention(text)
    if kind == "qwen3":
        mixer = dataclasses.replace(mixer, qk_norm="head", qk_norm_eps=eps)
    if kind == "qwen2":
        mixer = dataclasses.replace(mixer, has_bias=True)  # [LL-1]
    rotates = text.int_list("no_rope_layers", default=(1,) * count)  # [LL-3] a 1 keeps the rotation
    if len(rotates) != count:
        raise ConfigError("no_rope_layers must have an entry for each layer", found=len(rotates), expected=count)
    text.skip("no_rope_layer_interval", "layer_types")
    ffn = DenseFFNSpec(width=text.integer("intermediate_size"), activation=SILU)
    bare = dataclasses.replace(mixer, rope=None)
    return decoder(
        top,
        text,
        family=FAMILY,
        architecture=ARCHITECTURES[MODEL_TYPES.index(kind)],
        layers=[LayerSpec(layer_idx=i, mixer=mixer if rotates[i] else bare, ffn=ffn) for i in range(count)],
        norm_eps=eps,
    )


def read_attention(text: ConfigReader) -> GQASpec:
    """Grouped-query attention by its usual keys; `head_dim` defaults to an even share of the width."""
    heads = text.integer("num_attention_heads")
    if text.has("head_dim"):
        head_dim = text.integer("head_dim")
    else:
        text.skip("head_dim")
        if text.integer("hidden_size") % heads:
            text.refuse("num_attention_heads", "does not divide hidden_size, and there is no head_dim")
        head_dim = text.integer("hidden_size") // heads
    kv_heads = text.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        text.refuse("num_key_value_heads", f"must divide the {heads} query heads")
    text.skip("sliding_window")
    is_windowed = text.boolean("use_sliding_window", default=True) and text.has("sliding_window")
    has_bias = text.boolean("attention_bias", default=False)
    return GQASpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_dim=head_dim,
        rope=read_rope(text, head_dim),
        has_bias=has_bias,
        has_output_bias=has_bias,
        window=text.integer("sliding_window") if is_windowed else None,
    )


def tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    return naming.standard_tensors(spec, NAMES)
