"""Parameters of small configs of every family, against numbers counted by the reference implementations.

The pinned numbers are those of `transformers`' own classes, built without memory; where that package is installed the
pin is checked against it again, so that neither side can drift alone.
"""

from __future__ import annotations

import importlib
import math
from fractions import Fraction
from typing import Any

import pytest
from family_configs import CONFIGS, config_of

from workbench.spec import (
    GQASpec,
    MLASpec,
    count_draft,
    count_model,
    draft_tensors,
    index_bytes_per_token,
    kv_bytes,
    kv_bytes_per_token,
    missing_blocks,
    parse_config,
    published_tensors,
    state_bytes_per_sequence,
)

# name -> parameters of decoder and tower. The names left out below are not built by that package under these keys.
PINNED = {
    "deepseek_v3": 316_720,
    "deepseek_v3 fp8": 316_720,
    "deepseek_v32": 326_980,
    "glm_moe_dsa": 326_980,
    "glm_moe_dsa shared": 320_824,
    "kimi_k2": 363_460,
    "kimi_k2 wrapped": 481_928,
    "kimi_linear": 356_221,
    "qwen3_moe": 200_380,
    "qwen3_vl_moe": 300_834,
    "qwen3_5_moe": 317_560,
    "glm4_moe": 161_328,
    "gpt_oss": 367_809,
    "mixtral": 436_800,
    "olmoe": 437_070,
    "llama": 130_980,
    "llama tied": 129_960,
    "llama 3.1": 130_980,
    "qwen2": 118_380,
    "qwen3": 131_064,
    "llama4": 247_980,
    "minimax_m2": 177_162,
    "minimax_m3": 166_536,
    "mimo_v2_flash": 216_314,
    "deepseek_v4": 323_817,
}
# model type -> the class name that builds it, where the config itself does not lead there
CLASSES = {
    "kimi_k2": ("deepseek_v3", "DeepseekV3ForCausalLM"),
    "kimi_k25": ("kimi_k25", "Kimi_K25ForConditionalGeneration"),
    "llama4": ("llama4_text", "Llama4ForCausalLM"),
    "minimax_m3": ("minimax_m3_vl_text", "MiniMaxM3VLForCausalLM"),
}


def test_every_family_config_is_pinned_and_fully_read() -> None:
    assert PINNED.keys() == CONFIGS.keys()
    for name, config in CONFIGS.items():
        assert parse_config(config).unknown_keys == (), name


@pytest.mark.parametrize("name", PINNED)
def test_parameters_are_those_of_the_reference_implementation(name: str) -> None:
    assert count_model(parse_config(CONFIGS[name])).num_params == PINNED[name]


@pytest.mark.parametrize("name", PINNED)
def test_pin_is_what_transformers_counts_today(name: str) -> None:
    pytest.importorskip("transformers")
    config = config_of(name)
    for part in (config, config.get("text_config", {})):
        part.pop("quantization_config", None)
    assert reference_count(config) == PINNED[name]


# Keys of the published vision config under the names that class has for them.
VISION_KEYS = {
    "vt_hidden_size": "hidden_size",
    "vt_intermediate_size": "intermediate_size",
    "vt_num_attention_heads": "num_attention_heads",
    "vt_num_hidden_layers": "num_hidden_layers",
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
    "init_pos_emb_time": "pos_emb_time",
}


def reference_count(config: dict[str, Any]) -> int:
    """Parameters of the reference class, and the correction biases that it holds as buffers."""
    import torch
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind, architecture = CLASSES.get(config["model_type"], (config["model_type"], config["architectures"][0]))
    if kind.endswith("_text"):  # the text model alone
        config = {**config.get("text_config", config), "model_type": kind}
    elif kind != config["model_type"]:
        config = {**config, "model_type": kind}
    if kind == "kimi_k25":
        vision = {VISION_KEYS.get(key, key): value for key, value in config["vision_config"].items()}
        text = config["text_config"] | {"model_type": "deepseek_v3"}
        config = config | {
            "vision_config": vision,
            "text_config": text,
            "projection_hidden_size": vision["hidden_size"],
        }
    if kind == "mimo_v2_flash":
        names = ("full_attention", "sliding_attention")
        config = config | {"layer_types": [names[bit] for bit in config["hybrid_layer_pattern"]]}
    settings = CONFIG_MAPPING[kind].from_dict(config)
    package = kind.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    with torch.device("meta"):
        model = getattr(module, architecture)._from_config(settings)
    held = {id(p): p.numel() for p in model.parameters()}
    biases = sum(b.numel() for name, b in model.named_buffers() if name.endswith("e_score_correction_bias"))
    return sum(held.values()) + biases


@pytest.mark.parametrize("name", PINNED)
def test_names_and_places_are_one_to_one(name: str) -> None:
    spec = parse_config(CONFIGS[name])
    tensors = [*published_tensors(spec), *draft_tensors(spec)]
    names = [tensor.name for tensor in tensors]
    places = [
        (param, t.expert, t.part) for t in tensors for param in (t.param, *t.also_fills) if t.part != "weight_shape"
    ]
    assert len(set(names)) == len(names)
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("name", PINNED)
def test_active_parameters_leave_out_idle_experts_the_lookup_and_the_tower(name: str) -> None:
    spec = parse_config(CONFIGS[name])
    tensors = list(published_tensors(spec))
    expected = Fraction(0)
    for tensor in tensors:
        if tensor.role in ("embedding", "vision", "projector"):
            continue
        size = Fraction(tensor.num_params)
        if tensor.role == "routed_expert":
            ffn = spec.layers[tensor.layer or 0].ffn
            size *= Fraction(ffn.top_k, ffn.num_experts)  # type: ignore[union-attr]
        expected += size
    assert count_model(spec).active_params == expected


def test_caches_follow_from_the_kinds_of_layer() -> None:
    assert kv_bytes_per_token(parse_config(CONFIGS["deepseek_v3"])) == 5 * (26 + 10) * 2
    assert kv_bytes_per_token(parse_config(CONFIGS["qwen3_moe"])) == 4 * 2 * 2 * 16 * 2
    mimo = parse_config(CONFIGS["mimo_v2_flash"])
    assert kv_bytes_per_token(mimo) == 2 * (2 * (18 + 10) * 2) + 2 * (4 * (18 + 10) * 2)
    # Two of four layers stop growing at 128 tokens.
    assert kv_bytes(mimo, 1000) == 1000 * 2 * 112 + 128 * 2 * 224
    assert kv_bytes(mimo, 100) == 100 * kv_bytes_per_token(mimo)
    llama4 = parse_config(CONFIGS["llama4"])
    assert [layer.mixer.span for layer in llama4.layers_of(GQASpec)] == [64, 64, 64, None, 64]  # type: ignore[union-attr]


def test_index_keys_are_counted_apart_and_only_where_a_layer_owns_them() -> None:
    assert index_bytes_per_token(parse_config(CONFIGS["deepseek_v32"])) == 5 * 12
    shared = parse_config(CONFIGS["glm_moe_dsa shared"])
    assert index_bytes_per_token(shared) == 2 * 12
    assert [layer.mixer.indexer.owns_choice for layer in shared.layers_of(MLASpec)] == [  # type: ignore[union-attr]
        True, False, True, False, False,
    ]  # fmt: skip


def test_states_of_linear_layers_use_their_own_head_counts() -> None:
    qwen = parse_config(CONFIGS["qwen3_5_moe"])
    assert state_bytes_per_sequence(qwen) == 3 * (4 * 6 * 10 * 14 + 2 * (2 * 2 * 10 + 6 * 14) * 3)
    kimi = parse_config(CONFIGS["kimi_linear"])
    assert state_bytes_per_sequence(kimi) == 3 * (4 * 3 * 16 * 16 + 2 * 3 * 3 * 16 * 3)


def test_compressed_entries_count_by_the_tokens_they_stand_for() -> None:
    spec = parse_config(CONFIGS["deepseek_v4"])
    # layers of ratio 0, 128, 4, 4; entries of 32 values in bf16
    assert kv_bytes_per_token(spec) == 0 + 64 // 128 + 64 // 4 + 64 // 4
    assert kv_bytes(spec, 1024) == 64 * (4 * 128 + 8 + 256 + 256)


def test_draft_layers_stand_apart_from_the_total() -> None:
    spec = parse_config(CONFIGS["deepseek_v3"])
    without = parse_config(config_of("deepseek_v3", num_nextn_predict_layers=0))
    assert count_model(spec) == count_model(without)
    assert count_draft(without) == (0, 0)
    one_layer = count_model(spec).layers[-1].num_params
    own = 2 * 257 * 44 + 2 * 44 * 44 + 3 * 44  # embedding, head, join, norms
    assert count_draft(spec)[0] == one_layer + own
    assert {tensor.name.split(".")[2] for tensor in draft_tensors(spec)} == {"5"}


# What keeps each of these from running; every other model of the table has its blocks, and a golden that proves them.
NOT_RUN = {
    "deepseek_v4": "compressed attention",
    "mimo_v2_flash": "grouped-query attention: value scale",
    "minimax_m3": "grouped-query attention: block-sparse reading",
}


@pytest.mark.parametrize("name", PINNED)
def test_a_family_runs_where_its_blocks_do_and_no_other_runs_by_accident(name: str) -> None:
    missing = missing_blocks(parse_config(CONFIGS[name]))
    assert (NOT_RUN[name] in missing) if name in NOT_RUN else missing == ()


def test_bytes_are_those_of_the_storage_format() -> None:
    plain = count_model(parse_config(CONFIGS["deepseek_v3"]))
    fp8 = count_model(parse_config(CONFIGS["deepseek_v3 fp8"]))
    assert fp8.num_params == plain.num_params
    spec = parse_config(CONFIGS["deepseek_v3 fp8"])
    expected = 0
    for tensor in published_tensors(spec):
        size = {"F8_E4M3": 1, "BF16": 2, "F32": 4}[tensor.dtype]
        expected += size * math.prod(tensor.shape)
    assert fp8.weight_bytes == expected < plain.weight_bytes
