"""MiniMax-M3 (text): counted, audited and planned, not run.

What is new against MiniMax-M2:
  [M3-1] block-sparse attention after a dense prefix: four index heads score keys, the best 16 blocks of 128 keys and
         the nearest one are read.
  [M3-2] q and k are normalised per head; norm weights are stored as the difference from one.
  [M3-3] clamped SwiGLU as gpt-oss; a dense prefix and one shared expert; routed output is scaled.
  [M3-4] the published wrapper adds a tower (`vision_config`), listed among the unread parts.
Source: config of MiniMaxAI/MiniMax-M3, transformers' minimax_m3_vl.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from workbench.base import ConfigError
from workbench.spec import naming
from workbench.spec.config import ConfigReader
from workbench.spec.dialect import MAX_EXPERTS, decoder, is_named, num_layers, open_config, plain_moe, read_rope
from workbench.spec.mixers import BlockSparseSpec, GQASpec
from workbench.spec.model import Activation, DenseFFNSpec, LayerSpec, ModelSpec
from workbench.spec.tensors import TensorSpec

__all__ = ["ARCHITECTURES", "FAMILY", "matches", "parse", "tensors"]

FAMILY = "minimax_m3"
ARCHITECTURES = ("MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3ForCausalLM")
NAMES = naming.Names(moe="block_sparse_moe", correction="e_score_correction_bias", expert=("w1", "w2", "w3"))
WRAPPED_NAMES = dataclasses.replace(NAMES, root="language_model.model.", head="language_model.lm_head")


def matches(config: Mapping[str, object]) -> bool:
    return is_named(config, (FAMILY, "minimax_m3_vl"), ARCHITECTURES)


def parse(config: Mapping[str, object], image_config: Mapping[str, object] | None = None) -> ModelSpec:
    """ModelSpec of MiniMax-M3's text model. Raises ConfigError, or UnsupportedModelError for a switch not known."""
    top, text = open_config(config)
    for key, wanted in (
        ("hidden_act", "swigluoai"),
        ("scoring_func", "sigmoid"),
        ("use_routing_bias", True),
        ("qk_norm_type", "per_head"),
        ("use_qk_norm", True),
        ("use_gemma_norm", True),
        ("attention_output_gate", False),
    ):
        text.require(key, wanted, default=wanted)
    text.skip("num_mtp_modules", "num_nextn_predict_layers", "intermediate_size")
    eps, head_dim, count = text.number("rms_norm_eps"), text.integer("head_dim"), num_layers(text)
    activation = Activation(  # [M3-3]
        kind="swiglu_oai", alpha=text.number("swiglu_alpha"), limit=text.number("swiglu_limit")
    )
    plain = GQASpec(
        num_heads=text.integer("num_attention_heads"),
        num_kv_heads=text.integer("num_key_value_heads"),
        head_dim=head_dim,
        v_dim=head_dim,
        rope=read_rope(text, head_dim, dim=text.integer("rotary_dim", default=head_dim)),
        qk_norm="head",  # [M3-2]
        qk_norm_eps=eps,
    )
    sparse_config = text.child("sparse_attention_config")
    sparse = dataclasses.replace(plain, sparse=_read_sparse(sparse_config))
    is_sparse = sparse_config.int_list("sparse_attention_freq")
    is_moe = text.int_list("moe_layer_freq")
    if len(is_sparse) != count or len(is_moe) != count:
        raise ConfigError("sparse_attention_freq and moe_layer_freq must have an entry for each layer")
    text.require("first_k_dense_replace", is_moe.index(1) if 1 in is_moe else count, default=None)
    width = text.integer("moe_intermediate_size")
    moe = plain_moe(
        num_experts=text.integer("num_local_experts", maximum=MAX_EXPERTS),
        top_k=text.integer("num_experts_per_tok"),
        width=width,
        hidden_size=text.integer("hidden_size"),
        norm_eps=eps,
        num_shared=text.integer("n_shared_experts", minimum=0),
        shared_width=text.integer("n_shared_experts", minimum=0) * text.integer("shared_intermediate_size"),
        routed_scale=text.number("routed_scaling_factor", default=1.0),
        activation=activation,
    )
    dense = DenseFFNSpec(width=text.integer("dense_intermediate_size"), activation=activation)
    has_tower = text is not top and top.has("vision_config")
    top.skip("vision_config")
    return decoder(
        top,
        text,
        family=FAMILY,
        architecture=ARCHITECTURES[1 if text is top else 0],
        layers=[
            LayerSpec(layer_idx=i, mixer=sparse if is_sparse[i] else plain, ffn=moe if is_moe[i] else dense)
            for i in range(count)
        ],
        norm_eps=eps,
        norm_offset=1.0,
        unread_parts=("vision tower and projector (vision_config)",) if has_tower else (),  # [M3-4]
    )


def _read_sparse(block: ConfigReader) -> BlockSparseSpec:  # [M3-1]
    block.require("use_sparse_attention", True)
    block.require("sparse_score_type", "max")
    block.require("sparse_init_block", 0)
    block.skip("sparse_disable_index_value")
    return BlockSparseSpec(
        num_heads=block.integer("sparse_num_index_heads"),
        head_dim=block.integer("sparse_index_dim"),
        block_size=block.integer("sparse_block_size"),
        top_blocks=block.integer("sparse_topk_blocks"),
        local_blocks=block.integer("sparse_local_block", minimum=0),
    )


def tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    return naming.standard_tensors(spec, NAMES if spec.architecture == ARCHITECTURES[1] else WRAPPED_NAMES)
