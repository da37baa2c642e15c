"""Kinds of trouble that a K3 config can bring: each is planted and must be handled or refused by name."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from k3_published import CONFIG, SIZES, TOKENS

from workbench.base import ConfigError, UnsupportedModelError
from workbench.checkpoint import F1, k3_config, preprocessor_config
from workbench.spec import KDASpec, MLASpec, ModelSpec, MoESpec, parse_config, published_tensors, read_spec

Config = dict[str, Any]


@pytest.fixture
def config() -> Config:
    return copy.deepcopy(k3_config(**F1))


def full_layers(spec: ModelSpec) -> list[int]:
    return [layer.layer_idx for layer in spec.layers_of(MLASpec)]


# K01 layer lists count from 1


def test_k01_published_lists_give_full_attention_at_87_91_and_the_very_last_layer() -> None:
    spec = parse_config(k3_config(sizes=SIZES, tokens=TOKENS))
    assert len(spec.layers_of(KDASpec)) == 69
    assert full_layers(spec) == [*range(3, 92, 4), 92]
    assert not spec.layers[0].is_moe
    assert all(layer.is_moe for layer in spec.layers[1:])


def test_k01_lists_that_count_from_zero_are_refused_with_the_convention_named(config: Config) -> None:
    linear = config["text_config"]["linear_attn_config"]
    for key in ("kda_layers", "full_attn_layers"):
        linear[key] = [position - 1 for position in linear[key]]
    with pytest.raises(ConfigError, match=r"counting from 1.*outside 1\.\.8: \[0\]"):
        parse_config(config)


def test_k01_a_list_that_contains_n_is_taken_and_means_the_last_layer(config: Config) -> None:
    assert config["text_config"]["linear_attn_config"]["full_attn_layers"] == [4, 7, 8]
    assert full_layers(parse_config(config)) == [3, 6, 7]


@pytest.mark.parametrize(
    ("kda", "full"),
    [
        ([1, 2, 3, 5, 6], [4, 7]),  # layer 8 in neither
        ([1, 2, 3, 4, 5, 6], [4, 7, 8]),  # layer 4 in both
        ([1, 2, 3, 5, 5], [4, 7, 8]),  # 5 twice, 6 never
        ([1, 2, 3, 5, 6], [4, 7, 9]),  # beyond the last
    ],
)
def test_k01_lists_that_do_not_cover_each_layer_once_are_refused(
    config: Config, kda: list[int], full: list[int]
) -> None:
    config["text_config"]["linear_attn_config"] |= {"kda_layers": kda, "full_attn_layers": full}
    with pytest.raises(ConfigError, match="cover every layer exactly once"):
        parse_config(config)


# K03 rotary settings: K3 has none, so a config that asks for them is another model


def test_k03_rotary_attention_is_refused_not_ignored(config: Config) -> None:
    config["text_config"]["mla_use_nope"] = False
    with pytest.raises(UnsupportedModelError, match="mla_use_nope"):
        parse_config(config)
    config["text_config"]["mla_use_nope"] = True
    config["text_config"]["rope_scaling"] = {"type": "yarn", "mscale": 0.707}
    assert ("text_config.rope_scaling", {"type": "yarn", "mscale": 0.707}) in parse_config(config).unknown_keys


# K05 a change after the build must not be swallowed


def test_k05_a_spec_cannot_be_changed_and_does_not_follow_its_config(config: Config) -> None:
    spec = parse_config(config)
    before = dataclasses.asdict(spec)
    config["text_config"]["rms_norm_eps"] = 1.0
    config["text_config"]["linear_attn_config"]["full_attn_layers"].append(1)
    assert dataclasses.asdict(spec) == before
    for record, name in ((spec, "norm_eps"), (spec.layers[1], "ffn"), (spec.layers[1].mixer, "norm_eps")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, name, None)


# K06 the config's epsilon reaches every norm that should have it, and no other


def test_k06_each_norm_gets_its_own_epsilon() -> None:
    spec = parse_config(k3_config(**F1, eps=2e-5, projector_eps=3e-5))
    assert spec.residual is not None
    assert spec.vision is not None
    assert spec.projector is not None
    assert spec.norm_eps == spec.residual.norm_eps == 2e-5
    assert {layer.mixer.norm_eps for layer in spec.layers if isinstance(layer.mixer, KDASpec)} == {2e-5}
    assert {layer.ffn.norm_eps for layer in spec.layers if isinstance(layer.ffn, MoESpec)} == {2e-5}
    # Fixed by the released code, whatever the config says.
    assert {layer.mixer.latent_norm_eps for layer in spec.layers if isinstance(layer.mixer, MLASpec)} == {1e-6}
    assert spec.vision.norm_eps == 2.0**-23
    assert spec.projector.norm_eps == 3e-5


# K08 group-limited routing masks groups; K3 has one group, and more than one is refused


@pytest.mark.parametrize("key", ["num_expert_group", "topk_group"])
def test_k08_grouped_routing_is_refused(config: Config, key: str) -> None:
    config["text_config"][key] = 4
    with pytest.raises(UnsupportedModelError, match=f"{key}.*found 4, expected 1"):
        parse_config(config)


# K11 image settings are K3's own


def test_k11_patch_budget_and_chessboard_come_from_the_preprocessor_file(config: Config) -> None:
    image = parse_config(config, preprocessor_config()).image
    assert image is not None
    assert (image.patch_limit, image.patch_limit_per_side) == (65536, 512)
    assert (image.chessboard_square, image.chessboard_white, image.chessboard_grey) == (8, 255, 180)
    changed = parse_config(config, preprocessor_config(patch_limit=16384)).image
    assert changed is not None
    assert changed.patch_limit == 16384


def test_k11_without_a_preprocessor_file_the_budget_is_that_of_k3_not_of_its_ancestor(config: Config) -> None:
    image = parse_config(config).image
    assert image is not None
    assert image.patch_limit == 65536


@pytest.mark.parametrize(
    ("key", "value"),
    [("transparent_bg_fill_stage", "before_resize"), ("fixed_output_tokens", 256), ("patch_size", 16)],
)
def test_k11_another_image_recipe_is_refused(config: Config, key: str, value: object) -> None:
    image_config: Any = preprocessor_config()
    image_config["media_proc_cfg"][key] = value
    with pytest.raises(UnsupportedModelError, match=key):
        parse_config(config, image_config)


# K12 what is not implemented is refused early, with what is


def test_k12_an_unknown_family_is_refused_with_the_known_ones(config: Config) -> None:
    config |= {"model_type": "kimi_k9", "architectures": ["KimiK9"]}
    with pytest.raises(UnsupportedModelError, match=r"kimi_k9.*KimiK3ForConditionalGeneration"):
        parse_config(config)


def test_k12_the_inner_model_type_shared_with_kimi_linear_is_not_taken_for_k3(config: Config) -> None:
    with pytest.raises(UnsupportedModelError, match="no family"):
        parse_config(config["text_config"])


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda text: text.update(hidden_act="silu"), "hidden_act"),
        (lambda text: text.update(num_nextn_predict_layers=1), "num_nextn_predict_layers"),
        (lambda text: text["quantization_config"].update(format="pack-quantized"), "format"),
        (lambda text: text["quantization_config"].update(quant_method="awq"), "quant_method"),
    ],
)
def test_k12_settings_that_are_not_computed_are_refused_by_name(
    config: Config, change: Callable[[Config], None], key: str
) -> None:
    change(config["text_config"])
    with pytest.raises(UnsupportedModelError, match=key):
        parse_config(config)


# the rest of the dialect


def test_unknown_keys_are_kept_with_their_path(config: Config) -> None:
    config["text_config"]["sparse_topk"] = 7
    config["vision_config"]["registers"] = [1]
    config["release"] = "x"
    unknown = dict(parse_config(config).unknown_keys)
    assert unknown == {"release": "x", "text_config.sparse_topk": 7, "vision_config.registers": [1]}


def test_quantisation_block_is_read_inside_the_text_config_and_reported_elsewhere(config: Config) -> None:
    config["quantization_config"] = config["text_config"].pop("quantization_config")
    spec = parse_config(config)
    assert spec.quant is None
    assert [key for key, _ in spec.unknown_keys] == ["quantization_config"]


def test_expert_widths_that_cut_a_quantisation_group_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"routed_expert_hidden_size 80.*multiples of 32"):
        parse_config(k3_config(latent_dim=80))
    parse_config(k3_config(latent_dim=80, is_quantised=False))


def test_every_parameter_of_a_model_is_filled_by_exactly_one_set_of_names(config: Config) -> None:
    """L12: the mapping from names to parameters is one-to-one, and its image is not mapped again."""
    tensors = list(published_tensors(parse_config(config)))
    names = {tensor.name for tensor in tensors}
    targets = {(tensor.param, tensor.expert, tensor.part) for tensor in tensors}
    assert len(names) == len(targets) == len(tensors)
    assert names.isdisjoint(tensor.param for tensor in tensors)
    experts = [tensor for tensor in tensors if tensor.expert is not None]
    assert len(experts) == 7 * 10 * 3 * 2
    assert all(tensor.name.count("experts.") == 1 for tensor in experts)


def test_a_folder_and_a_bare_config_are_read_alike(tmp_path: Path, config: Config) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(preprocessor_config(patch_limit=900)))
    assert read_spec(tmp_path) == read_spec(tmp_path / "config.json")
    image = read_spec(tmp_path).image
    assert image is not None
    assert image.patch_limit == 900


@pytest.mark.skipif(not CONFIG.is_file(), reason="no copy of the published config here")
def test_synthetic_config_of_k3_sizes_says_what_the_published_one_says() -> None:
    published = parse_config(json.loads(CONFIG.read_text()))
    assert parse_config(k3_config(sizes=SIZES, tokens=TOKENS)) == published
