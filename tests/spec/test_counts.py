"""Counts of Kimi K3 to the last byte, and counts of a tiny model against sums made another way."""

from __future__ import annotations

import json
import math

import pytest
from k3_published import CONFIG, SIZES, TOKENS

from workbench.checkpoint import F1, k3_config
from workbench.spec import (
    MLASpec,
    ModelCounts,
    ModelSpec,
    count_model,
    kv_bytes_per_token,
    parse_config,
    published_tensors,
    state_bytes_per_sequence,
)


@pytest.fixture(scope="module")
def k3() -> ModelSpec:
    return parse_config(k3_config(sizes=SIZES, tokens=TOKENS))


@pytest.fixture(scope="module")
def counts(k3: ModelSpec) -> ModelCounts:
    return count_model(k3)


def test_k3_has_its_published_parameters_bytes_and_tensors(counts: ModelCounts) -> None:
    assert counts.num_params == 2_779_931_837_184
    assert counts.weight_bytes == 1_560_860_324_864
    assert counts.num_tensors == 497_220


def test_k3_active_parameters_are_the_published_figure(counts: ModelCounts) -> None:
    assert counts.active_params == 104_189_614_848  # published as 104.2 B: input embedding and tower left out
    assert counts.experts_per_token == 92 * 16


def test_k3_caches_are_latents_of_full_layers_and_states_of_the_others(k3: ModelSpec, counts: ModelCounts) -> None:
    assert counts.kv_bytes_per_token == kv_bytes_per_token(k3) == 24 * 576 * 2 == 27_648
    assert kv_bytes_per_token(k3, "F8_E4M3") == 13_824
    assert counts.state_bytes_per_sequence == state_bytes_per_sequence(k3) == 449_372_160
    # P08: counting every layer as attention would claim 3.9 times the cache.
    assert 93 * 576 * 2 / counts.kv_bytes_per_token == pytest.approx(3.875)


def test_k3_layers_weigh_what_the_published_files_do(counts: ModelCounts) -> None:
    per_kind = {layer.kind: layer.weight_bytes for layer in counts.layers}
    assert per_kind == {"KDA+dense": 2_341_213_184, "KDA+MoE": 16_990_092_800, "MLA+MoE": 16_566_684_160}
    assert counts.bytes_by_role["routed_expert"] == 1_446_456_066_048
    assert sum(counts.bytes_by_role.values()) == sum(counts.bytes_by_dtype.values()) == counts.weight_bytes


def test_layer_profile_adds_up_to_the_totals(counts: ModelCounts) -> None:
    outside = {role: counts.params_by_role[role] for role in ("embedding", "head", "vision", "projector")}
    edge_norms = 3 * 7168  # final norm and the two vectors of the last residual mix
    assert sum(layer.num_params for layer in counts.layers) + sum(outside.values()) + edge_norms == counts.num_params
    assert sum(layer.active_params for layer in counts.layers) + outside["head"] + edge_norms == counts.active_params
    # One token at batch 1 reads about 137 GB of weights, most of it outside the experts.
    assert counts.active_weight_bytes == 136_990_303_232


@pytest.mark.skipif(not CONFIG.is_file(), reason="no copy of the published config here")
def test_published_config_counts_the_same(k3: ModelSpec, counts: ModelCounts) -> None:
    published = parse_config(json.loads(CONFIG.read_text()))
    assert count_model(published) == counts
    assert published.layers == k3.layers
    assert published.unknown_keys == ()


def test_counts_of_a_model_of_unequal_sizes_equal_brute_force() -> None:
    spec = parse_config(k3_config(**F1))
    tensors = list(published_tensors(spec))
    counts = count_model(spec)
    assert counts.num_params == sum(
        math.prod(t.shape) * {"weight": 1, "weight_packed": 2, "weight_scale": 0}[t.part] for t in tensors
    )
    routed = sum(t.num_params for t in tensors if t.role == "routed_expert")
    idle = sum(t.num_params for t in tensors if t.role in ("embedding", "vision", "projector"))
    assert counts.active_params == counts.num_params - idle - routed * 7 // 10  # 3 of 10 experts are visited
    latent = sum(
        layer.mixer.kv_rank + layer.mixer.rope_dim for layer in spec.layers if isinstance(layer.mixer, MLASpec)
    )
    assert counts.kv_bytes_per_token == 2 * latent == 2 * 3 * (58 + 18)
    assert counts.state_bytes_per_sequence == 5 * (4 * 6 * 26 * 26 + 2 * 3 * (6 * 26) * 3)


def test_unquantised_experts_count_the_same_parameters_in_more_bytes() -> None:
    packed = count_model(parse_config(k3_config(**F1)))
    plain = count_model(parse_config(k3_config(**F1, is_quantised=False)))
    assert plain.num_params == packed.num_params
    assert plain.active_params == packed.active_params
    assert plain.bytes_by_role["routed_expert"] == 2 * packed.params_by_role["routed_expert"]


def test_handing_the_tensor_list_in_changes_nothing() -> None:
    spec = parse_config(k3_config(**F1))
    assert count_model(spec, list(published_tensors(spec))) == count_model(spec)
