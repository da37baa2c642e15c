"""MiniMax-M2, M2.1, M2.5 and M2.7.

What is new about this family:
  [M2-1] half of each head is rotated (`rotary_dim`); q and k are normalised across all heads at once.
  [M2-2] sigmoid router with a correction bias that stands beside the router, not inside it; experts named w1, w2, w3
         under `block_sparse_moe`; nothing shared, no dense layer.
  [M2-3] FP8 tiles; `gate` in the list of plain modules is a suffix and does not reach anything else.
  [M2-4] the config speaks of multi-token-prediction modules that the published files do not hold.
Source: config and modelling file of MiniMaxAI/MiniMax-M2.5, transformers' minimax_m2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from workbench.spec import naming
from workbench.spec.dialect import MAX_EXPERTS, decoder, is_named, num_layers, open_config, plain_moe, read_rope
from workbench.spec.mixers import GQASpec
from workbench.spec.model import LayerSpec, ModelSpec
from workbench.spec.tensors import TensorSpec

__all__ = ["ARCHITECTURES", "FAMILY", "matches", "parse", "tensors"]

FAMILY = "minimax_m2"
ARCHITECTURES = ("MiniMaxM2ForCausalLM",)
NAMES = naming.Names(  # [M2-2]
    moe="block_sparse_moe", correction="e_score_correction_bias", expert=("w1", "w2", "w3")
)


def matches(config: Mapping[str, object]) -> bool:
    return is_named(config, (FAMILY,), ARCHITECTURES)


def parse(config: Mapping[str, object], image_config: Mapping[str, object] | None = None) -> ModelSpec:
    """ModelSpec from a MiniMax-M2 config. Raises ConfigError, or UnsupportedModelError for a switch not known."""
    top, text = open_config(config)
    for key, wanted in (
        ("hidden_act", "silu"),
        ("scoring_func", "sigmoid"),
        ("use_routing_bias", True),
        ("shared_intermediate_size", 0),
        ("qk_norm_type", "per_layer"),
    ):
        text.require(key, wanted, default=wanted)
    text.skip("use_mtp", "num_mtp_modules", "mtp_transformer_layers")  # [M2-4]
    eps, head_dim = text.number("rms_norm_eps"), text.integer("head_dim")
    mixer = GQASpec(  # [M2-1]
        num_heads=text.integer("num_attention_heads"),
        num_kv_heads=text.integer("num_key_value_heads"),
        head_dim=head_dim,
        v_dim=head_dim,
        rope=read_rope(text, head_dim, dim=text.integer("rotary_dim", default=head_dim)),
        qk_norm="full" if text.boolean("use_qk_norm", default=False) else "none",
        qk_norm_eps=eps,
    )
    moe = plain_moe(
        num_experts=text.integer("num_local_experts", maximum=MAX_EXPERTS),
        top_k=text.integer("num_experts_per_tok"),
        width=text.integer("intermediate_size"),
        hidden_size=text.integer("hidden_size"),
        norm_eps=eps,
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
