"""Kinds of trouble that configs bring, planted in every family they can strike: handled, or refused by name.

The K3 family has its own file; here are the others, and the planning kinds that follow from a config alone.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from family_configs import CONFIGS, config_of

from workbench.base import ConfigError, LayoutError, UnsupportedModelError
from workbench.checkpoint import k3_config
from workbench.placement import Layout, check_layout, place, tile_fit, tile_table
from workbench.spec import (
    GQASpec,
    KDASpec,
    MLASpec,
    ModelSpec,
    MoESpec,
    QuantSpec,
    RopeSpec,
    RuleBook,
    YarnSpec,
    choose_experts,
    missing_blocks,
    parse_config,
    published_tensors,
    require_runnable,
    resolve_quant_rules,
)
from workbench.spec.families import family_of

Config = dict[str, Any]


def moe_of(spec: ModelSpec) -> MoESpec:
    ffn = spec.layers[-1].ffn
    assert isinstance(ffn, MoESpec)
    return ffn


# K01 layer lists: which layers are which, and how they are counted


def test_k01_kimi_linear_counts_its_layers_from_one() -> None:
    spec = parse_config(CONFIGS["kimi_linear"])
    assert [layer.layer_idx for layer in spec.layers_of(KDASpec)] == [0, 1, 2]
    config = config_of("kimi_linear")
    for key in ("kda_layers", "full_attn_layers"):
        config["linear_attn_config"][key] = [place - 1 for place in config["linear_attn_config"][key]]
    with pytest.raises(ConfigError, match="counting from 1"):
        parse_config(config)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("gpt_oss", "layer_types", ["sliding_attention", "full_attention"]),
        ("gpt_oss", "layer_types", ["sliding_attention", "full_attention", "chunked_attention"]),
        ("qwen3_5_moe", "layer_types", ["linear_attention"] * 5),
        ("mimo_v2_flash", "hybrid_layer_pattern", [0, 1, 1]),
        ("minimax_m3", "moe_layer_freq", [0, 1]),
        ("deepseek_v4", "compress_ratios", [0, 128, 4]),
        ("deepseek_v4", "compress_ratios", [0, 128, 4, 7]),
        ("glm_moe_dsa shared", "indexer_types", ["shared", "full", "full", "full", "full"]),
        ("glm_moe_dsa", "mlp_layer_types", ["dense", "dense", "dense", "sparse", "sparse"]),
        ("llama4", "no_rope_layers", [1, 1]),
    ],
)
def test_k01_a_list_that_does_not_give_each_layer_a_known_kind_is_refused(name: str, key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        parse_config(config_of(name, **{key: value}))


def test_k01_steps_and_prefixes_give_the_layers_they_mean() -> None:
    assert [layer.is_moe for layer in parse_config(CONFIGS["llama4"]).layers] == [False, True, False, True, False]
    assert [layer.is_moe for layer in parse_config(CONFIGS["qwen3_moe"]).layers] == [True, False, True, True]
    step = parse_config(config_of("qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[]))
    assert [layer.is_moe for layer in step.layers] == [False, True, False, True]
    llama4 = parse_config(CONFIGS["llama4"])
    assert [layer.mixer.rope is None for layer in llama4.layers] == [False, False, False, True, False]  # type: ignore[union-attr]


# K03 YaRN has two scales, and they are not one


@pytest.mark.parametrize(
    ("mscale", "all_dim", "cos", "softmax"),
    [
        (1.0, 1.0, 1.0, (0.1 * math.log(40) + 1) ** 2),
        (0.707, 0.707, 1.0, (0.0707 * math.log(40) + 1) ** 2),
        (1.0, 0.0, 0.1 * math.log(40) + 1, 1.0),
        (1.0, 0.5, (0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1), (0.05 * math.log(40) + 1) ** 2),
        (None, None, 0.1 * math.log(40) + 1, 1.0),
    ],
)
def test_k03_cos_and_softmax_scale_follow_their_own_mscale(
    mscale: float | None, all_dim: float | None, cos: float, softmax: float
) -> None:
    yarn = YarnSpec(factor=40, original_context=4096, mscale=mscale, mscale_all_dim=all_dim)
    rope = RopeSpec(theta=10000, dim=64, yarn=yarn)
    assert rope.cos_scale == pytest.approx(cos, rel=1e-12)
    assert rope.softmax_scale == pytest.approx(softmax, rel=1e-12)


def test_k03_both_scales_come_from_the_config_and_reach_the_attention() -> None:
    mixer = parse_config(CONFIGS["deepseek_v3"]).layers[0].mixer
    assert isinstance(mixer, MLASpec)
    assert mixer.rope is not None
    assert mixer.rope.cos_scale == 1.0
    assert mixer.softmax_scale == pytest.approx(24**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    changed = config_of("deepseek_v3")
    changed["rope_scaling"] = {**changed["rope_scaling"], "mscale_all_dim": 0}
    other = parse_config(changed).layers[0].mixer
    assert isinstance(other, MLASpec)
    assert other.softmax_scale == pytest.approx(24**-0.5)


def test_k03_frequencies_ramp_between_kept_and_divided_ones() -> None:
    plain = RopeSpec(theta=10000, dim=64).frequencies()
    yarn = RopeSpec(theta=10000, dim=64, yarn=YarnSpec(factor=40, original_context=4096)).frequencies()
    ratios = [a / b for a, b in zip(plain, yarn, strict=True)]
    # 32 turns over 4096 positions are made by pair 10.4, one turn by pair 22.5: kept up to 10, divided from 23 on.
    assert ratios[:11] == pytest.approx([1.0] * 11)
    assert ratios[23:] == pytest.approx([40.0] * 9)
    assert all(1 < ratio < 40 for ratio in ratios[11:23])
    assert ratios[11:23] == sorted(ratios[11:23])


def test_k03_llama_frequencies_keep_short_waves_and_stretch_long_ones() -> None:
    mixer = parse_config(CONFIGS["llama 3.1"]).layers[0].mixer
    assert isinstance(mixer, GQASpec)
    assert mixer.rope is not None
    plain = RopeSpec(theta=500000.0, dim=14).frequencies()
    for kept, stretched in zip(plain, mixer.rope.frequencies(), strict=True):
        turns = 8192 * kept / (2 * math.pi)
        assert (stretched == kept) == (turns >= 4)
        assert (stretched == pytest.approx(kept / 8)) == (turns <= 1)


# K05 two spellings of one setting, and settings changed after the build


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_moe", "llama", "gpt_oss"])
def test_k05_rotary_settings_in_two_spellings_that_differ_are_refused(name: str) -> None:
    theta = config_of(name)["rope_theta"]
    agreeing = config_of(name, rope_parameters=None)
    assert parse_config(agreeing).layers == parse_config(CONFIGS[name]).layers
    with pytest.raises(ConfigError, match="rope_theta stands twice"):
        parse_config(config_of(name, rope_parameters={"rope_type": "default", "rope_theta": theta * 2}))
    other = {"rope_type": "llama3", "factor": 2, "original_max_position_embeddings": 128}
    with pytest.raises(ConfigError, match="say different things"):
        parse_config(
            config_of(
                name,
                rope_scaling={**other, "low_freq_factor": 1, "high_freq_factor": 4},
                rope_parameters={"rope_type": "default", "rope_theta": theta},
            )
        )


def test_k05_old_and_new_spelling_of_the_same_setting_are_one_model() -> None:
    new = config_of("llama 3.1")
    new["rope_parameters"] = {**new.pop("rope_scaling"), "rope_theta": new.pop("rope_theta")}
    assert parse_config(new).layers == parse_config(CONFIGS["llama 3.1"]).layers


def test_k05_a_spec_neither_follows_its_config_nor_can_be_changed() -> None:
    config = config_of("deepseek_v3")
    spec = parse_config(config)
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, MLASpec)
    assert mixer.rope is not None
    before = mixer.rope.frequencies()
    config["rope_scaling"]["factor"] = 3
    config["rope_theta"] = 7
    assert mixer.rope.frequencies() == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        mixer.rope.theta = 5.0  # type: ignore[misc]
    # What is made anew is computed anew: nothing is kept from the first record.
    assert dataclasses.replace(mixer.rope, theta=5.0).frequencies() != before


# K06 the config's epsilon reaches every norm that should have it


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "deepseek_v3 fp8"])
def test_k06_epsilon_of_the_config_reaches_every_norm(name: str) -> None:
    key = "layernorm_epsilon" if name == "mimo_v2_flash" else "rms_norm_eps"
    spec = parse_config(config_of(name, **{key: 3e-4}))
    assert spec.norm_eps == 3e-4
    for layer in spec.layers:
        mixer = layer.mixer
        if isinstance(mixer, GQASpec) and mixer.qk_norm != "none":
            assert mixer.qk_norm_eps == 3e-4
        if isinstance(mixer, MLASpec):
            assert mixer.latent_norm_eps == 1e-6  # fixed by the class, whatever the config says
        elif not isinstance(mixer, GQASpec):
            assert mixer.norm_eps == 3e-4
        if isinstance(layer.ffn, MoESpec):
            assert layer.ffn.norm_eps == 3e-4


# K08 group-limited routing


def test_k08_a_group_out_of_the_race_cannot_win_where_all_scores_are_below_zero() -> None:
    moe = moe_of(parse_config(CONFIGS["deepseek_v3"]))  # 12 experts in 4 groups, 2 stay, 3 experts chosen
    logits = [-9.0] * 12
    for expert in (0, 1, 2, 6, 7, 8):  # groups 0 and 2 are the strong ones
        logits[expert] = -2.0 - expert / 100
    bias = [-0.5] * 12  # every score plus bias is negative: masked to 0.0, the lost groups would lead
    ids, weights = choose_experts(moe, logits, bias)
    assert ids == (0, 1, 2)
    masked_with_zero = [value if e // 3 in (0, 2) else 0.0 for e, value in enumerate([-0.4] * 12)]
    assert sorted(range(12), key=lambda e: -masked_with_zero[e])[:3] == [3, 4, 5]  # what the fault would choose
    assert sum(weights) == pytest.approx(2.5)


def test_k08_bias_joins_the_choice_and_not_the_weights() -> None:
    moe = dataclasses.replace(moe_of(parse_config(CONFIGS["minimax_m2"])), renormalize=False)
    logits = [0.0] * 10
    ids, weights = choose_experts(moe, logits, [7.0 if e in (2, 5, 9) else 0.0 for e in range(10)])
    assert ids == (2, 5, 9)
    assert weights == pytest.approx((0.5, 0.5, 0.5))


def test_k08_groups_that_do_not_divide_the_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match="12 experts in 5 groups"):
        parse_config(config_of("deepseek_v3", n_group=5))
    with pytest.raises(ConfigError, match="of which 6 stay"):
        parse_config(config_of("deepseek_v3", topk_group=6))


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "qwen3_moe", "gpt_oss", "mixtral", "olmoe"])
def test_k08_choice_of_experts_is_that_of_the_reference_implementation(name: str) -> None:
    pytest.importorskip("transformers")
    import importlib

    import torch
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = config_of(name)
    kind = config["model_type"]
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    routers = {
        "deepseek_v3": "DeepseekV3TopkRouter",
        "glm4_moe": "Glm4MoeTopkRouter",
        "qwen3_moe": "Qwen3MoeTopKRouter",
        "gpt_oss": "GptOssTopKRouter",
        "mixtral": "MixtralTopKRouter",
        "olmoe": "OlmoeTopKRouter",
    }
    moe = moe_of(parse_config(config))
    router = getattr(module, routers[name])(CONFIG_MAPPING[kind].from_dict(config)).double()
    torch.manual_seed(3)
    with torch.no_grad():
        for tensor in router.state_dict().values():
            tensor.copy_(torch.randn_like(tensor) * 0.4)
    x = torch.randn(9, config["hidden_size"], dtype=torch.float64)
    _logits, weights, ids = router(x)
    bias = router.state_dict().get("e_score_correction_bias")
    raw = torch.nn.functional.linear(x, router.weight, getattr(router, "bias", None)).tolist()
    for row in range(9):
        ours, ours_weights = choose_experts(moe, raw[row], None if bias is None else bias.tolist())
        theirs = dict(zip(ids[row].tolist(), weights[row].flatten().tolist(), strict=False))
        assert set(ours) == set(theirs)
        assert [theirs[e] for e in ours] == pytest.approx(list(ours_weights), rel=1e-5)


# K09 rules about modules: prefixes of names, wrong prefixes, other grammars


def book(*ignore: str, grammar: str) -> RuleBook:
    return RuleBook(QuantSpec(scheme="fp8_block", group_size=128, ignore=ignore, grammar=grammar))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("grammar", "rule", "taken", "left"),
    [
        ("transformers", "mlp.gate", ["mlp.gate", "mlp.gate.x", "a.mlp.gate"], ["mlp.gate_proj", "a.mlp.gate_proj"]),
        ("transformers", "gate", ["block.gate", "gate.x"], ["block.gate_proj", "gate_proj"]),
        (
            "transformers",
            "model.layers.*.self_attn",
            ["model.layers.3.self_attn.q_proj"],
            ["model.layers.3.self_attnx"],
        ),
        ("transformers", "model.layers.1", ["model.layers.1.mlp"], ["model.layers.11.mlp"]),
        ("glob", "model.layers.1.self_attn*", ["model.layers.1.self_attn.q_proj"], ["model.layers.11.self_attn.q"]),
        ("glob", "vision_tower*", ["vision_tower.blocks.0.wo"], ["my.vision_tower.x"]),
        ("glob", "lm_head", ["lm_head"], ["language_model.lm_head", "lm_head.x"]),
        ("compressed-tensors", "re:.*mlp\\.(gate|up)_proj.*", ["a.mlp.gate_proj"], ["a.mlp.experts.0.gate_proj"]),
        ("compressed-tensors", "lm_head", ["lm_head"], ["language_model.lm_head"]),
    ],
)
def test_k09_each_grammar_takes_the_modules_its_engine_takes(
    grammar: str, rule: str, taken: list[str], left: list[str]
) -> None:
    rules = book(rule, grammar=grammar)
    assert [name for name in taken if rules.decide(name).group is not None] == []
    assert [name for name in left if rules.decide(name).group is None] == []


def test_k09_rules_of_fp8_editions_reach_routers_and_nothing_beside_them() -> None:
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}
    rules = ["lm_head", *(f"model.layers.{i}.mlp.gate" for i in range(4))]
    spec = parse_config(config_of("qwen3_moe", quantization_config=fp8 | {"modules_to_not_convert": rules}))
    by_name = {tensor.name: tensor for tensor in published_tensors(spec)}
    assert by_name["model.layers.1.mlp.gate_proj.weight"].dtype == "F8_E4M3"  # the dense layer beside the routers
    assert by_name["model.layers.1.mlp.gate_proj.weight_scale_inv"].shape == (6, 4)
    assert by_name["model.layers.0.mlp.gate.weight"].dtype == "BF16"
    assert by_name["lm_head.weight"].dtype == "BF16"
    table = resolve_quant_rules(spec)
    assert table.disagreements == ()
    assert table.unused_rules == ("model.layers.1.mlp.gate",)  # layer 1 has no router


def test_k09_a_rule_without_the_wrappers_prefix_matches_nothing_and_is_named() -> None:
    config = config_of("kimi_k2 wrapped")
    assert resolve_quant_rules(parse_config(config)).unused_rules == ()  # inside text_config, of the text's own names
    config["quantization_config"] = config["text_config"].pop("quantization_config")
    ignore = config["quantization_config"]["ignore"]
    assert resolve_quant_rules(parse_config(config)).unused_rules == ("lm_head",)  # the head is language_model.lm_head
    ignore[0] = "language_model.lm_head"
    assert resolve_quant_rules(parse_config(config)).unused_rules == ()
    ignore.append("re:model\\.layers\\..*")
    assert resolve_quant_rules(parse_config(config)).unused_rules == ("re:model\\.layers\\..*",)


def test_k09_experts_alone_are_packed_where_the_rules_spare_everything_else() -> None:
    spec = parse_config(CONFIGS["kimi_k2 wrapped"])
    packed = {tensor.role for tensor in published_tensors(spec) if tensor.is_quantised}
    assert packed == {"routed_expert"}
    table = resolve_quant_rules(spec).table().render()
    assert "language_model.model.layers.*.mlp.experts.*.down_proj" in table
    assert "int4_packed" in table


def test_k09_config_groups_store_each_module_by_its_own_target() -> None:
    config = config_of("kimi_k2 wrapped")
    block = config["text_config"]["quantization_config"]
    weights = block["config_groups"]["group_0"]["weights"]
    block["format"] = "mixed-precision"
    block["config_groups"] = {
        "experts": {"format": "pack-quantized", "targets": ["re:.*mlp\\.experts\\."], "weights": weights},
        "rest": {
            "format": "float-quantized",
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
        },
    }
    block["ignore"] = ["re:.*self_attn.*", "language_model.lm_head"]
    kinds = {row.module.rpartition("layers.")[2]: row.scheme for row in resolve_quant_rules(parse_config(config)).rows}
    assert kinds["*.mlp.experts.*.up_proj"] == "int4_packed"
    assert kinds["*.mlp.shared_experts.up_proj"] == "fp8_channel"
    assert kinds["*.self_attn.o_proj"] is None


# K11 image settings belong to one family


def test_k11_kimi_k25_and_k3_are_told_apart_and_do_not_share_image_settings() -> None:
    k25, k3 = family_of(CONFIGS["kimi_k2 wrapped"]), family_of(k3_config())
    assert (k25.FAMILY, k3.FAMILY) == ("kimi_k2", "kimi_k3")  # type: ignore[union-attr]
    assert parse_config(CONFIGS["kimi_k2 wrapped"]).image is None  # not K3's budget and chessboard
    image = parse_config(k3_config()).image
    assert image is not None
    assert image.patch_limit == 65536


# K12 what is not known is refused early, with what is


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "mixtral",
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            r"quant_method.*compressed-tensors or fp8",
        ),
        ("mixtral", {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "fmt.*e4m3"),
        ("mixtral", {"quantization_config": {"quant_method": "gptq", "bits": 8}}, "bits.*found 8, expected 4"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func.*expected sigmoid"),
        ("deepseek_v3", {"hidden_act": "gelu"}, "hidden_act.*expected 'silu'"),
        ("gpt_oss", {"rope_scaling": {"rope_type": "longrope"}}, "rope_type.*yarn"),
        ("minimax_m3", {"qk_norm_type": "per_layer"}, "qk_norm_type"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window"),
    ],
)
def test_k12_settings_that_are_not_known_are_refused_with_those_that_are(
    name: str, changes: Config, message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        parse_config(config_of(name, **changes))


def test_k12_a_model_that_cannot_run_is_refused_with_the_whole_list_of_missing_blocks() -> None:
    spec = parse_config(CONFIGS["minimax_m3"])
    with pytest.raises(UnsupportedModelError) as caught:
        require_runnable(spec)
    assert all(block in str(caught.value) for block in missing_blocks(spec))
    assert "grouped-query attention: block-sparse reading" in missing_blocks(spec)
    require_runnable(parse_config(k3_config()))


def test_k12_every_way_to_run_a_model_refuses_at_once(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from workbench.day0 import run_day0
    from workbench.deployment import Deployment
    from workbench.loading import load_sharded_weights
    from workbench.nn.model import Model

    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["minimax_m3"]))
    import numpy as np
    from safetensors.numpy import save_file

    save_file({"model.norm.weight": np.zeros(44, np.float16)}, tmp_path / "model.safetensors")
    for run in (
        lambda: Model(parse_config(CONFIGS["minimax_m3"])),
        lambda: load_sharded_weights(tmp_path),
        lambda: Deployment.start(tmp_path),
        lambda: run_day0(tmp_path, out=None),
    ):
        with pytest.raises(UnsupportedModelError, match="block-sparse reading"):
            run()


# P01 quantisation tiles


@pytest.mark.parametrize("size", [18432, 320, 512, 768, 576])
@pytest.mark.parametrize("degree", [1, 2, 4, 8, 16, 32])
def test_p01_a_slice_is_split_only_where_no_tile_is_cut(size: int, degree: int) -> None:
    fit = tile_fit(size, degree, 128)
    bounds = [rank * size / degree for rank in range(1, degree)]
    is_whole = all(bound % 128 == 0 for bound in bounds) and size % degree == 0
    is_whole = is_whole and (degree == 1 or (size // degree) % 128 == 0)
    assert (fit.verdict == "split") == is_whole
    if fit.verdict == "replicate":
        assert math.ceil(size / 128) < degree
        assert fit.local == size
    else:
        assert fit.local * degree == fit.padded >= size
        assert degree == 1 or fit.local % 128 == 0


def test_p01_the_cases_that_stopped_engines_are_told_before_loading() -> None:
    verdicts = {(size, tp): str(tile_fit(size, tp, 128)) for size in (18432, 320, 768, 576) for tp in (4, 8, 32)}
    assert verdicts[18432, 32] == "pad to 20,480, 640 each"
    assert verdicts[18432, 8] == "pad to 18,432, 2304 each" or verdicts[18432, 8] == "2304 each"
    assert verdicts[320, 4] == "replicate"
    assert verdicts[768, 4] == "pad to 1,024, 256 each"
    assert verdicts[576, 8] == "replicate"


def test_p01_a_layout_that_cuts_a_tile_is_refused_for_the_dimension_and_shown_in_a_table() -> None:
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 768,
        "vocab_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "moe_intermediate_size": 512,
        "v_head_dim": 128,
    }
    spec = parse_config(config_of("deepseek_v3 fp8", **sizes))
    check_layout(spec, Layout(tp=2))
    with pytest.raises(LayoutError, match=r"feed-forward width 768 over 4 ranks.*1\.5 tiles each.*pad to 1,024"):
        check_layout(spec, Layout(tp=4))
    rendered = tile_table(spec).render()
    assert "pad to 1,024, 256 each" in rendered
    plain = parse_config(config_of("deepseek_v3", **sizes))
    check_layout(plain, Layout(tp=4))


# P02 fewer key-value heads than ranks


@pytest.mark.parametrize(("kv_heads", "tp"), [(4, 8), (8, 16), (4, 4), (8, 2), (2, 8)])
def test_p02_each_rank_holds_the_key_value_head_of_its_queries(kv_heads: int, tp: int) -> None:
    heads, dim = 16, 8
    spec = parse_config(
        config_of("minimax_m2", num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=dim, vocab_size=320)
    )
    layout = Layout(tp=tp)
    tensors = {t.name.removeprefix("model.layers.0.self_attn."): t for t in published_tensors(spec) if t.layer == 0}

    def rows(name: str, rank: int) -> range:
        shard = place(spec, layout, layout.coords(rank), tensors[name])
        assert shard is not None
        ((start, stop),) = shard.ranges[0]
        return range(start, stop)

    for rank in range(tp):
        queries = {row // dim for row in rows("q_proj.weight", rank)}
        held = {row // dim for row in rows("k_proj.weight", rank)}
        assert {query * kv_heads // heads for query in queries} == held
        assert rows("v_proj.weight", rank) == rows("k_proj.weight", rank)
        assert rows("k_norm.weight", rank) == rows("k_proj.weight", rank)  # a norm across heads is cut like the heads
        assert rows("q_norm.weight", rank) == rows("q_proj.weight", rank)
        assert all(len(rows(f"{x}_proj.weight", rank)) % dim == 0 for x in "qkv")  # never part of a head
    assert {row for rank in range(tp) for row in rows("k_proj.weight", rank)} == set(range(kv_heads * dim))


def test_p02_a_norm_shared_by_all_heads_stays_whole() -> None:
    spec = parse_config(config_of("qwen3_moe", num_attention_heads=8, num_key_value_heads=2, vocab_size=264))
    layout = Layout(tp=4)
    for tensor in published_tensors(spec):
        if tensor.name.endswith(("q_norm.weight", "k_norm.weight")):
            shard = place(spec, layout, layout.coords(3), tensor)
            assert shard is not None
            assert shard.shape == (16,)


def test_p02_heads_that_lie_unevenly_are_refused_before_loading() -> None:
    sizes = {"num_attention_heads": 24, "num_key_value_heads": 6, "vocab_size": 324, "intermediate_size": 24}
    spec = parse_config(config_of("minimax_m2", **sizes))
    check_layout(spec, Layout(tp=3))
    check_layout(spec, Layout(tp=12))
    with pytest.raises(LayoutError, match="6 key-value heads lie unevenly on tp=4"):
        check_layout(spec, Layout(tp=4))


# every family at once: nothing hostile gets past a config


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_with_any_value_anywhere_parses_or_is_refused(name: str) -> None:
    rng = random.Random(name)
    values: list[object] = [
        None,
        True,
        0,
        -1,
        2**63,
        1e308,
        float("nan"),
        "x",
        [],
        {},
        [0],
        ["a"],
        [[1]],
        {"a": 1},
        ...,
    ]
    for _ in range(60):
        config = copy.deepcopy(CONFIGS[name])
        target: Any = config
        keys = list(target)
        key: Any = rng.choice(keys)
        while isinstance(target[key], dict) and target[key] and rng.random() < 0.8:
            target = target[key]
            key = rng.choice(list(target))
        value = rng.choice(values)
        if value is ...:
            del target[key]
        else:
            target[key] = value
        try:
            spec = parse_config(config)
        except ConfigError:
            continue
        assert spec.num_layers > 0
