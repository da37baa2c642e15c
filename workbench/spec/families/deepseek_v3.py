"""DeepSeek-V3 and R1; the trunk that Kimi-K2, DeepSeek-V3.2 and GLM-5 grow from.

What is new about this family:
  [V3-1] latent attention with RoPE on an extra shared key, neighbouring columns as pairs, YaRN with both mscales.
  [V3-2] sigmoid router with a correction bias that joins the choice only; groups of experts compete first.
  [V3-3] FP8 in 128 x 128 tiles for every linear layer but the head; routers are bare parameters and stay plain.
  [V3-4] multi-token-prediction layers are numbered on after the last layer, with their own embedding and head.
  [V3-5] the first layers are dense; the two latent norms use the default eps of 1e-6 of their class.
Source: configs, README_WEIGHTS and inference code of deepseek-ai/DeepSeek-V3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from workbench.base import ConfigError
from workbench.spec import naming
from workbench.spec.config import ConfigReader
from workbench.spec.dialect import MAX_EXPERTS, SILU, decoder, is_named, num_layers, open_config, plain_moe, read_rope
from workbench.spec.mixers import IndexerSpec, MixerSpec, MLASpec
from workbench.spec.model import DenseFFNSpec, DraftSpec, FFNSpec, LayerSpec, ModelSpec
from workbench.spec.tensors import TensorSpec

__all__ = ["ARCHITECTURES", "FAMILY", "draft_tensors", "matches", "parse", "read_layers", "read_mla", "tensors"]

FAMILY = "deepseek_v3"
ARCHITECTURES = ("DeepseekV3ForCausalLM",)
NAMES = naming.Names()
LATENT_NORM_EPS = 1e-6  # [V3-5]


def matches(config: Mapping[str, object]) -> bool:
    """Kimi-K2 names the same architecture; its model type tells them apart."""
    return is_named(config, (FAMILY,), ARCHITECTURES) and config.get("model_type") == FAMILY


def parse(config: Mapping[str, object], image_config: Mapping[str, object] | None = None) -> ModelSpec:
    """ModelSpec from a DeepSeek-V3 config. Raises ConfigError, or UnsupportedModelError for a switch not known."""
    top, text = open_config(config)
    mixer = read_mla(text)
    layers, draft = read_layers(text, [mixer] * num_layers(text), mixer)
    return decoder(
        top,
        text,
        family=FAMILY,
        architecture=ARCHITECTURES[0],
        layers=layers,
        norm_eps=text.number("rms_norm_eps"),
        draft=draft,
    )


def read_mla(text: ConfigReader, indexer: IndexerSpec | None = None) -> MLASpec:
    text.require("attention_bias", False, default=False)
    text.skip("num_key_value_heads", "head_dim", "qk_head_dim")
    rope_dim = text.integer("qk_rope_head_dim")
    return MLASpec(
        num_heads=text.integer("num_attention_heads"),
        q_rank=text.integer("q_lora_rank") if text.has("q_lora_rank") else 0,
        kv_rank=text.integer("kv_lora_rank"),
        nope_dim=text.integer("qk_nope_head_dim"),
        rope_dim=rope_dim,
        v_dim=text.integer("v_head_dim"),
        has_rotary=True,
        has_output_gate=False,
        latent_norm_eps=LATENT_NORM_EPS,
        rope=read_rope(  # [V3-1]
            text, rope_dim, dim=rope_dim, is_interleaved=text.boolean("rope_interleave", default=True)
        ),
        indexer=indexer,
    )


def read_layers(
    text: ConfigReader, mixers: Sequence[MixerSpec], draft_mixer: MixerSpec
) -> tuple[list[LayerSpec], DraftSpec | None]:
    """Layers and draft layers around the given mixers."""
    text.require("hidden_act", "silu")
    text.require("moe_layer_freq", 1, default=1)
    text.require("topk_method", "noaux_tc", default="noaux_tc")
    width, num_shared = text.integer("moe_intermediate_size"), text.integer("n_shared_experts", minimum=0)
    moe = plain_moe(
        num_experts=text.integer("n_routed_experts", maximum=MAX_EXPERTS),
        top_k=text.integer("num_experts_per_tok"),
        width=width,
        hidden_size=text.integer("hidden_size"),
        norm_eps=text.number("rms_norm_eps"),
        num_shared=num_shared,
        shared_width=num_shared * width,
        renormalize=text.boolean("norm_topk_prob"),
        routed_scale=text.number("routed_scaling_factor"),
        scoring=text.one_of("scoring_func", ("sigmoid",), default="sigmoid"),  # [V3-2]
        num_groups=text.integer("n_group"),
        top_groups=text.integer("topk_group"),
    )
    if moe.num_experts % moe.num_groups or moe.top_groups > moe.num_groups:
        raise ConfigError(f"{moe.num_experts} experts in {moe.num_groups} groups of which {moe.top_groups} stay")
    dense = DenseFFNSpec(width=text.integer("intermediate_size"), activation=SILU)
    num_dense = text.integer("first_k_dense_replace", minimum=0)  # [V3-5]
    ffns: list[FFNSpec] = [dense if i < num_dense else moe for i in range(len(mixers))]
    layers = [LayerSpec(layer_idx=i, mixer=m, ffn=f) for i, (m, f) in enumerate(zip(mixers, ffns, strict=True))]
    num_draft = text.integer("num_nextn_predict_layers", minimum=0, maximum=64, default=0)
    if not num_draft:
        return layers, None
    draft_layer = LayerSpec(layer_idx=len(mixers), mixer=draft_mixer, ffn=moe)
    return layers, DraftSpec(num_layers=num_draft, layer=draft_layer, has_own_embedding=True)  # [V3-4]


def tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    return naming.standard_tensors(spec, NAMES)


def draft_tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    return naming.draft_tensors(spec, NAMES)
