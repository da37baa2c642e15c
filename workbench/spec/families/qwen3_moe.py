"""Qwen3-MoE (30B-A3B, 235B-A22B, Coder-480B), bf16 and FP8.

What is new against the dense Qwen3 (see llama.py):
  [Q3M-1] experts in every layer but those of `mlp_only_layers` and of the sparse step; no shared expert.
  [Q3M-2] softmax router over all experts, top k renormalised, no correction bias.
  [Q3M-3] the FP8 edition lists every norm and router among the modules that are not converted.
Source: configs of Qwen/Qwen3-30B-A3B and its FP8 edition, transformers' qwen3_moe.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from workbench.spec import naming
from workbench.spec.config import ConfigReader
from workbench.spec.dialect import MAX_EXPERTS, SILU, decoder, is_named, num_layers, open_config, plain_moe, read_rope
from workbench.spec.mixers import GQASpec
from workbench.spec.model import DenseFFNSpec, LayerSpec, ModelSpec
from workbench.spec.tensors import TensorSpec

__all__ = ["ARCHITECTURES", "FAMILY", "matches", "parse", "read_layers", "tensors"]

FAMILY = "qwen3_moe"
ARCHITECTURES = ("Qwen3MoeForCausalLM",)
NAMES = naming.Names()


def matches(config: Mapping[str, object]) -> bool:
    return is_named(config, (FAMILY,), ARCHITECTURES)


def parse(config: Mapping[str, object], image_config: Mapping[str, object] | None = None) -> ModelSpec:
    """ModelSpec from a Qwen3-MoE config. Raises ConfigError, or UnsupportedModelError for a switch not known."""
    top, text = open_config(config)
    return decoder(
        top,
        text,
        family=FAMILY,
        architecture=ARCHITECTURES[0],
        layers=read_layers(text),
        norm_eps=text.number("rms_norm_eps"),
    )


def read_layers(text: ConfigReader) -> list[LayerSpec]:
    text.require("hidden_act", "silu")
    text.require("use_sliding_window", False, default=False)
    text.skip("sliding_window")
    eps, head_dim = text.number("rms_norm_eps"), text.integer("head_dim")
    mixer = GQASpec(
        num_heads=text.integer("num_attention_heads"),
        num_kv_heads=text.integer("num_key_value_heads"),
        head_dim=head_dim,
        v_dim=head_dim,
        rope=read_rope(text, head_dim),
        has_bias=text.boolean("attention_bias", default=False),
        has_output_bias=text.boolean("attention_bias", default=False),
        qk_norm="head",
        qk_norm_eps=eps,
    )
    moe = plain_moe(
        num_experts=text.integer("num_experts", maximum=MAX_EXPERTS),
        top_k=text.integer("num_experts_per_tok"),
        width=text.integer("moe_intermediate_size"),
        hidden_size=text.integer("hidden_size"),
        norm_eps=eps,
        renormalize=text.boolean("norm_topk_prob"),
        scoring="softmax",  # [Q3M-2]
        has_correction_bias=False,
    )
    dense = DenseFFNSpec(width=text.integer("intermediate_size"), activation=SILU)
    step, only_dense = text.integer("decoder_sparse_step", default=1), text.int_list("mlp_only_layers", default=())
    return [
        LayerSpec(layer_idx=i, mixer=mixer, ffn=dense if i in only_dense or (i + 1) % step else moe)  # [Q3M-1]
        for i in range(num_layers(text))
    ]


def tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    return naming.standard_tensors(spec, NAMES)
