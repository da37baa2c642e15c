"""Published configs against published sizes; skipped where no copy of the configs is here.

Totals are of the decoder, without tower and draft layers; active leaves out the input embedding. Where our number is
not the one a publisher states, the reason stands beside it.
"""

from __future__ import annotations

import dataclasses
import json

import pytest
from k3_published import REFERENCE

from workbench.spec import (
    ModelSpec,
    count_draft,
    count_model,
    index_bytes_per_token,
    kv_bytes_per_token,
    parse_config,
    state_bytes_per_sequence,
)
from workbench.spec.overview import FamilyReport, describe_configs
from workbench.spec.published import PUBLISHED as STATED

CONFIGS = REFERENCE / "configs"
pytestmark = pytest.mark.skipif(not CONFIGS.is_dir(), reason="no copy of the published configs here")

# config -> total, active (both in 1e9, two decimals), KV bytes per token, state bytes, index bytes per token
PUBLISHED = {
    "moonshotai__Kimi-Linear-48B-A3B-Instruct": (49.12, 3.11, 8_064, 43_417_600, 0),
    "moonshotai__Kimi-K2-Instruct": (1026.41, 31.69, 70_272, 0, 0),
    "moonshotai__Kimi-K2.5": (1026.41, 31.69, 70_272, 0, 0),
    "nvidia__Kimi-K2.5-NVFP4": (1026.41, 31.69, 70_272, 0, 0),
    # 36.63 is 36.626 rounded; 36.62 elsewhere is the same number cut off.
    "deepseek-ai__DeepSeek-V3": (671.03, 36.63, 70_272, 0, 0),
    "deepseek-ai__DeepSeek-R1": (671.03, 36.63, 70_272, 0, 0),
    "deepseek-ai__DeepSeek-V3.2": (671.88, 37.48, 70_272, 0, 7_808),
    # Published as 284B / 13B and 1.6T / 49B. KV: one bf16 entry of 512 per 4 or 128 tokens, the window left out.
    "deepseek-ai__DeepSeek-V4-Flash": (284.33, 13.27, 21 * 256 + 20 * 8, 0, 21 * 32),
    "deepseek-ai__DeepSeek-V4-Pro": (1573.00, 48.85, 30 * 256 + 31 * 8, 0, 30 * 32),
    "Qwen__Qwen3-235B-A22B": (235.09, 21.57, 192_512, 0, 0),
    "Qwen__Qwen3-30B-A3B": (30.53, 3.04, 98_304, 0, 0),
    "Qwen__Qwen3-30B-A3B-FP8": (30.53, 3.04, 98_304, 0, 0),
    "Qwen__Qwen3-VL-235B-A22B-Instruct": (235.09, 21.57, 192_512, 0, 0),
    "Qwen__Qwen3-VL-30B-A3B-Instruct": (30.53, 3.04, 98_304, 0, 0),
    "Qwen__Qwen3.5-35B-A3B": (34.66, 2.95, 20_480, 64_389_120, 0),
    "Qwen__Qwen3.5-397B-A17B": (396.35, 16.33, 30_720, 192_061_440, 0),
    "zai-org__GLM-4.5": (352.80, 32.86, 376_832, 0, 0),
    "zai-org__GLM-5.1": (743.91, 40.83, 89_856, 0, 9_984),
    "zai-org__GLM-5.2": (743.38, 40.30, 89_856, 0, 2_688),
    "openai__gpt-oss-120b": (116.83, 5.13, 73_728, 0, 0),
    "openai__gpt-oss-20b": (20.91, 3.61, 49_152, 0, 0),
    "mistralai__Mixtral-8x7B-v0.1": (46.70, 12.75, 131_072, 0, 0),
    "meta-llama__Llama-4-Maverick-17B-128E-Instruct": (400.71, 16.15, 196_608, 0, 0),
    "MiniMaxAI__MiniMax-M2.5": (228.69, 10.42, 253_952, 0, 0),
    # Published as 427B / 26B. Without its index projections (57 layers of 3.9M) the sum is 425.95 and 24.51.
    "MiniMaxAI__MiniMax-M3": (426.17, 24.73, 122_880, 0, 57 * 128),
    "allenai__OLMoE-1B-7B-0125-Instruct": (6.92, 1.18, 131_072, 0, 0),
    # Published as 309B / 15B. Keys of 192 and values of 128 in 9 full layers of 4 heads and 39 windows of 8.
    "XiaomiMiMo__MiMo-V2-Flash": (308.78, 14.82, (9 * 4 + 39 * 8) * (192 + 128) * 2, 0, 0),
}


def spec_of(name: str) -> ModelSpec:
    return parse_config(json.loads((CONFIGS / f"{name}.json").read_text()))


def test_every_config_here_is_held_to_a_number() -> None:
    here = {path.stem for path in CONFIGS.glob("*.json")}
    assert here - {"moonshotai__Kimi-K3"} <= PUBLISHED.keys()  # K3 is counted to the byte in test_counts


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_gives_its_published_sizes(name: str) -> None:
    if not (CONFIGS / f"{name}.json").is_file():
        pytest.skip("this config is not here")
    total, active, kv, state, index = PUBLISHED[name]
    spec = spec_of(name)
    counts = count_model(spec)
    tower = sum(counts.params_by_role.get(role, 0) for role in ("vision", "projector"))
    assert round((counts.num_params - tower) / 1e9, 2) == total
    assert round(counts.active_params / 1e9, 2) == active
    assert kv_bytes_per_token(spec) == counts.kv_bytes_per_token == kv
    assert state_bytes_per_sequence(spec) == state
    assert index_bytes_per_token(spec) == index
    assert spec.unknown_keys == ()


@pytest.mark.parametrize(
    ("name", "tower"), [("Qwen__Qwen3-VL-30B-A3B-Instruct", 538_631_408), ("Qwen__Qwen3.5-35B-A3B", 446_571_248)]
)
def test_towers_have_the_parameters_of_the_reference_implementation(name: str, tower: int) -> None:
    by_role = count_model(spec_of(name)).params_by_role
    assert by_role["vision"] + by_role["projector"] == tower


def test_deepseek_v3_files_weigh_what_is_published_with_their_draft_layer() -> None:
    spec = spec_of("deepseek-ai__DeepSeek-V3")
    draft_params, draft_bytes = count_draft(spec)
    own_copies = 2 * 129_280 * 7_168  # embedding and head, stored a second time
    assert round((draft_params - own_copies) / 1e9, 1) == 11.6
    assert round((count_model(spec).weight_bytes + draft_bytes) / 1e9, 1) == 688.6  # published: 688.6 GB


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("openai__gpt-oss-120b", 65.2),
        ("openai__gpt-oss-20b", 13.8),
        ("Qwen__Qwen3-30B-A3B", 61.1),
        ("mistralai__Mixtral-8x7B-v0.1", 93.4),
        ("allenai__OLMoE-1B-7B-0125-Instruct", 13.8),
    ],
)
def test_checkpoint_bytes_follow_from_the_storage_scheme(name: str, gigabytes: float) -> None:
    assert round(count_model(spec_of(name)).weight_bytes / 1e9, 1) == gigabytes


def test_each_figure_is_the_published_one_or_a_remark_says_why_not() -> None:
    for name, (total, active, kv, state, index) in PUBLISHED.items():
        known = STATED[name.replace("__", "/")]
        has_count = known.total is not None
        pairs = ((total, known.total), (active, known.active), (kv, known.kv), (state, known.state))
        is_same = has_count and all(ours == theirs for ours, theirs in pairs) and index == known.index
        assert is_same == (not known.remark), name
    assert STATED.keys() == {name.replace("__", "/") for name in PUBLISHED} | {"moonshotai/Kimi-K3"}


def test_the_table_holds_figures_against_published_ones_and_names_those_that_differ() -> None:
    report = describe_configs(CONFIGS / "allenai__OLMoE-1B-7B-0125-Instruct.json")
    assert rows_against(report) == [("total, active, KV", "6.92; 1.18; 131072", "6.92; 1.18; 131072", "all")]
    off = dataclasses.replace(report.lines[0], active_params=1_190_000_000, state_bytes=8)
    (row,) = rows_against(FamilyReport(lines=(off,), refused=()))
    assert row[1] == "6.92; 1.19; 131072; 8"
    assert row[3] == "not active, state"
    unknown = dataclasses.replace(off, name="nobody__Nothing-1B")
    assert rows_against(FamilyReport(lines=(unknown,), refused=())) == []


def rows_against(report: FamilyReport) -> list[tuple[object, ...]]:
    tables = [table for table in report.tables() if table.title == "Against published figures"]
    return [row[2:6] for table in tables for row in table.rows]
