"""Kimi-Linear-48B.

What is new against Kimi K3 (which shares the inner name `kimi_linear`):
  [KL-1] the output gate of KDA is low-rank (g_a, g_b), and its decay is not bounded: -exp(A_log) softplus(...).
  [KL-2] latent attention without a query latent and without an output gate; experts at the model's own width.
  [KL-3] plain residual stream, SiLU, one group of experts; every layer after the dense prefix has experts.
  [KL-4] `A_log` is stored as (1, 1, heads, 1); routers and experts stand under `block_sparse_moe`.
Source: config and modelling file of moonshotai/Kimi-Linear-48B-A3B-Instruct, transformers' kimi_linear.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from workbench.base import ConfigError
from workbench.spec import naming
from workbench.spec.dialect import MAX_EXPERTS, SILU, decoder, is_named, num_layers, open_config, plain_moe
from workbench.spec.mixers import KDASpec, MLASpec
from workbench.spec.model import DenseFFNSpec, LayerSpec, ModelSpec
from workbench.spec.tensors import TensorSpec

__all__ = ["ARCHITECTURES", "FAMILY", "matches", "parse", "tensors"]

FAMILY = "kimi_linear"
ARCHITECTURES = ("KimiLinearForCausalLM",)
LATENT_NORM_EPS = 1e-6
NAMES = naming.Names(moe="block_sparse_moe", expert=("w1", "w2", "w3"))  # [KL-4]


def matches(config: Mapping[str, object]) -> bool:
    """K3's text part calls itself the same; its residual scheme gives it away."""
    return is_named(config, (FAMILY,), ARCHITECTURES) and "attn_res_block_size" not in config


def parse(config: Mapping[str, object], image_config: Mapping[str, object] | None = None) -> ModelSpec:
    """ModelSpec from a Kimi-Linear config. Raises ConfigError, or UnsupportedModelError for a switch not known."""
    top, text = open_config(config)
    eps, count = text.number("rms_norm_eps"), num_layers(text)
    for key, wanted in (
        ("hidden_act", "silu"),
        ("mla_use_nope", True),
        ("moe_layer_freq", 1),
        ("moe_router_activation_func", "sigmoid"),
        ("num_expert_group", 1),
        ("topk_group", 1),
        ("num_nextn_predict_layers", 0),
    ):
        text.require(key, wanted)
    text.skip("use_grouped_topk", "rope_theta", "rope_scaling", "head_dim", "num_key_value_heads")
    linear = text.child("linear_attn_config")
    kda_layers, full_layers = linear.int_list("kda_layers"), linear.int_list("full_attn_layers")
    if sorted([*kda_layers, *full_layers]) != list(range(1, count + 1)):  # both lists count from 1
        raise ConfigError("kda_layers and full_attn_layers must cover every layer exactly once, counting from 1")
    head_dim = linear.integer("head_dim")
    kda = KDASpec(  # [KL-1]
        num_heads=linear.integer("num_heads"),
        head_dim=head_dim,
        conv_size=linear.integer("short_conv_kernel_size"),
        decay_bound=-math.inf,
        decay_rank=head_dim,
        gate_rank=head_dim,
        norm_eps=eps,
    )
    mla = MLASpec(  # [KL-2]
        num_heads=text.integer("num_attention_heads"),
        q_rank=text.integer("q_lora_rank") if text.has("q_lora_rank") else 0,
        kv_rank=text.integer("kv_lora_rank"),
        nope_dim=text.integer("qk_nope_head_dim"),
        rope_dim=text.integer("qk_rope_head_dim"),
        v_dim=text.integer("v_head_dim"),
        has_rotary=False,
        has_output_gate=False,
        latent_norm_eps=LATENT_NORM_EPS,
    )
    text.skip("q_lora_rank")
    num_shared, width = text.integer("num_shared_experts", minimum=0), text.integer("moe_intermediate_size")
    moe = plain_moe(
        num_experts=text.integer("num_experts", maximum=MAX_EXPERTS),
        top_k=text.integer("num_experts_per_token"),
        width=width,
        hidden_size=text.integer("hidden_size"),
        norm_eps=eps,
        num_shared=num_shared,
        shared_width=num_shared * width,
        renormalize=text.boolean("moe_renormalize"),
        routed_scale=text.number("routed_scaling_factor"),
    )
    dense = DenseFFNSpec(width=text.integer("intermediate_size"), activation=SILU)
    num_dense = text.integer("first_k_dense_replace", minimum=0)  # [KL-3]
    layers = [
        LayerSpec(layer_idx=i, mixer=mla if i + 1 in full_layers else kda, ffn=dense if i < num_dense else moe)
        for i in range(count)
    ]
    return decoder(
        top,
        text,
        family=FAMILY,
        architecture=ARCHITECTURES[0],
        layers=layers,
        norm_eps=eps,
        context_key="model_max_length" if text.has("model_max_length") else "max_position_embeddings",
    )


def tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    return naming.standard_tensors(spec, NAMES)
