"""Config files of K3's form for models of any size: the published sizes, and three small sets for tests and
demonstrations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from workbench.spec import SpecialTokens

__all__ = ["F0", "F1", "F2", "K3", "Sizes", "k3_config", "preprocessor_config"]


class Sizes(TypedDict, total=False):
    """Sizes of a K3-shaped model; what is left out is taken from `F0`."""

    num_layers: int
    full_attn_layers: tuple[int, ...]  # counted from 1, as in the published config
    num_dense_layers: int
    residual_block: int
    hidden_size: int
    vocab_size: int
    max_context: int
    dense_width: int
    kda_heads: int
    kda_head_dim: int
    conv_size: int
    mla_heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    num_experts: int
    top_k: int
    expert_width: int
    latent_dim: int
    num_shared: int
    vision_layers: int
    vision_heads: int
    vision_width: int
    vision_qkv_width: int
    vision_ffn_width: int
    grid_height: int
    grid_width: int


# Like K3 in miniature: the last two layers are both full attention, the first is dense. Splits over 2 and 4 ranks.
F0 = Sizes(
    num_layers=8,
    full_attn_layers=(4, 7, 8),
    num_dense_layers=1,
    residual_block=3,
    hidden_size=128,
    vocab_size=512,
    max_context=4096,
    dense_width=256,
    kda_heads=4,
    kda_head_dim=16,
    conv_size=4,
    mla_heads=4,
    q_rank=96,
    kv_rank=64,
    nope_dim=32,
    rope_dim=16,
    v_dim=32,
    num_experts=8,
    top_k=2,
    expert_width=128,
    latent_dim=96,
    num_shared=2,
    vision_layers=2,
    vision_heads=2,
    vision_width=48,
    vision_qkv_width=64,
    vision_ffn_width=96,
    grid_height=8,
    grid_width=6,
)

# No two dimensions equal and none a multiple of another, so that every swap fails; heads that need A_log padding.
F1 = Sizes(
    hidden_size=152,
    vocab_size=536,
    dense_width=344,
    kda_heads=6,
    kda_head_dim=26,
    mla_heads=4,
    q_rank=92,
    kv_rank=58,
    nope_dim=31,
    rope_dim=18,
    v_dim=42,
    num_experts=10,
    top_k=3,
    expert_width=160,
    latent_dim=96,
    vision_heads=3,
    vision_width=68,
    vision_qkv_width=132,
    vision_ffn_width=164,
    grid_height=15,
    grid_width=25,
)

# Dimensions equal on purpose: where a transposed matrix has the right shape, only its values can tell.
F2 = Sizes(
    hidden_size=128,
    dense_width=128,
    kda_heads=8,
    kda_head_dim=16,
    mla_heads=4,
    q_rank=128,
    kv_rank=64,
    nope_dim=24,
    rope_dim=8,
    v_dim=32,
    expert_width=128,
    latent_dim=128,
    num_shared=1,
    vision_width=64,
    vision_qkv_width=64,
    vision_ffn_width=64,
)

# Kimi K3 as published: every field of its config.json that a size depends on.
K3 = Sizes(
    num_layers=93,
    full_attn_layers=(*range(4, 93, 4), 93),
    num_dense_layers=1,
    residual_block=12,
    hidden_size=7168,
    vocab_size=163840,
    max_context=1 << 20,
    dense_width=33792,
    kda_heads=96,
    kda_head_dim=128,
    conv_size=4,
    mla_heads=96,
    q_rank=1536,
    kv_rank=512,
    nope_dim=128,
    rope_dim=64,
    v_dim=128,
    num_experts=896,
    top_k=16,
    expert_width=3072,
    latent_dim=3584,
    num_shared=2,
    vision_layers=27,
    vision_heads=12,
    vision_width=1024,
    vision_qkv_width=1536,
    vision_ffn_width=4096,
    grid_height=64,
    grid_width=64,
)


def k3_config(
    *,
    sizes: Sizes | None = None,
    tokens: SpecialTokens | None = None,
    decay_bound: float = -5.0,
    situ_beta: float = 4.0,
    situ_linear_beta: float = 25.0,
    eps: float = 1e-5,
    projector_eps: float = 1e-5,
    routed_scale: float = 1.0,
    is_quantised: bool = True,
    **changed: object,
) -> dict[str, object]:
    """A `config.json` of K3's form: `F0`, changed by `sizes` and then by single sizes given as keywords.

    Without `tokens` the special ids lie among the last twelve of the vocabulary. Raises TypeError for an unknown size.
    """
    s: dict[str, object] = {**F0, **(sizes or {}), **changed}
    if unknown := sorted(s.keys() - F0.keys()):
        raise TypeError(f"no such size: {', '.join(unknown)}")
    num_layers, vocab = _int(s, "num_layers"), _int(s, "vocab_size")
    tokens = tokens or SpecialTokens(bos=vocab - 12, eos=vocab - 10, pad=vocab - 1, media=vocab - 7)
    ids = {"bos_token_id": tokens.bos, "eos_token_id": tokens.eos, "pad_token_id": tokens.pad}
    full = s["full_attn_layers"]
    assert isinstance(full, tuple)
    text: dict[str, object] = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        **ids,
        "activation_situ_beta": situ_beta,
        "activation_situ_linear_beta": situ_linear_beta,
        "attn_res_block_size": s["residual_block"],
        "first_k_dense_replace": s["num_dense_layers"],
        "hidden_act": "situ",
        "hidden_size": s["hidden_size"],
        "intermediate_size": s["dense_width"],
        "kv_lora_rank": s["kv_rank"],
        "latent_moe_use_norm": True,
        "linear_attn_config": {
            "full_attn_layers": list(full),
            "gate_lower_bound": decay_bound,
            "head_dim": s["kda_head_dim"],
            "kda_layers": [position for position in range(1, num_layers + 1) if position not in full],
            "num_heads": s["kda_heads"],
            "short_conv_kernel_size": s["conv_size"],
            "use_full_rank_gate": True,
        },
        "max_position_embeddings": s["max_context"],
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "moe_intermediate_size": s["expert_width"],
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": s["mla_heads"],
        "num_expert_group": 1,
        "num_experts": s["num_experts"],
        "num_experts_per_token": s["top_k"],
        "num_hidden_layers": num_layers,
        "num_key_value_heads": s["mla_heads"],
        "num_nextn_predict_layers": 0,
        "num_shared_experts": s["num_shared"],
        "q_lora_rank": s["q_rank"],
        "qk_nope_head_dim": s["nope_dim"],
        "qk_rope_head_dim": s["rope_dim"],
        "rms_norm_eps": eps,
        "routed_expert_hidden_size": s["latent_dim"],
        "routed_scaling_factor": routed_scale,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "v_head_dim": s["v_dim"],
        "vocab_size": vocab,
    }
    if is_quantised:
        text["quantization_config"] = _quantization_config()
    vision: dict[str, object] = {
        "activation_func": "gelu_pytorch_tanh",
        "attn_bias": False,
        "init_pos_emb_height": s["grid_height"],
        "init_pos_emb_time": 4,
        "init_pos_emb_width": s["grid_width"],
        "linear_bias": False,
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "mlp_type": "mlp2",
        "mm_hidden_size": s["vision_width"],
        "mm_projector_type": "patchmergerv2",
        "norm_type": "rmsnorm",
        "patch_embed_proj_bias": False,
        "patch_size": 14,
        "pos_emb_interpolation_mode": "bilinear",
        "pos_emb_type": "divided_fixed",
        "projector_hidden_act": "gelu",
        "projector_ln_eps": projector_eps,
        "qkv_hidden_size": s["vision_qkv_width"],
        "text_hidden_size": s["hidden_size"],
        "vt_hidden_size": s["vision_width"],
        "vt_intermediate_size": s["vision_ffn_width"],
        "vt_num_attention_heads": s["vision_heads"],
        "vt_num_hidden_layers": s["vision_layers"],
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        **ids,
        "media_placeholder_token_id": tokens.media,
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": vision,
    }


def _int(sizes: Mapping[str, object], key: str) -> int:
    value = sizes[key]
    assert isinstance(value, int), key
    return value


def _quantization_config() -> dict[str, object]:
    weights: dict[str, object] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": 32,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "scale_dtype": "torch.uint8",
        "strategy": "group",
        "symmetric": True,
        "type": "float",
        "zp_dtype": None,
    }
    group = {
        "format": "mxfp4-pack-quantized",
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": "mxfp4-pack-quantized",
        "global_compression_ratio": None,
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
            "re:.*vision_tower.*",
            "re:.*mm_projector.*",
        ],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def preprocessor_config(*, patch_limit: int = 65536, patch_limit_per_side: int = 512) -> dict[str, object]:
    """A `preprocessor_config.json` of K3's form."""
    background = {
        "pattern": "chessboard",
        "chessboard_square_size": 8,
        "chessboard_square_on_top_left": True,
        "chessboard_white_value": 255,
        "chessboard_gray_value": 180,
    }
    media = {
        "in_patch_limit": patch_limit,
        "patch_size": 14,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_kernel_size": 2,
        "fixed_output_tokens": None,
        "patch_limit_on_one_side": patch_limit_per_side,
        "transparent_bg_config": background,
        "transparent_bg_fill_stage": "after_resize",
    }
    return {"media_proc_cfg": media}
