"""Slices of matrices stored in groups: whole groups go to each rank, anything else is refused by name before a load."""

from __future__ import annotations

from typing import Any

import pytest
from family_configs import config_of

from workbench.base import LayoutError
from workbench.placement import Layout, owned_shards
from workbench.spec import parse_config

SIZES = {"vocab_size": 266, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
SIZES |= {"intermediate_size": 384}
QUERY, OUT = "model.layers.0.self_attn.q_proj.", "model.layers.0.self_attn.o_proj."


def int4(group_size: int) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group_size, "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups, "ignore": []}


def shapes(block: dict[str, Any], tp: int, rank: int, **sizes: int) -> dict[str, tuple[tuple[int, int], ...]]:
    spec = parse_config(config_of("mixtral", quantization_config=block, **SIZES | sizes))
    shards = owned_shards(spec, Layout(tp=tp), rank)
    return {s.tensor.name: tuple(r for dim in s.ranges for r in dim) for s in shards}


def test_each_piece_is_cut_where_its_rows_or_columns_lie() -> None:
    awq = shapes({"quant_method": "awq", "bits": 4, "group_size": 16}, tp=2, rank=1)
    assert awq[f"{QUERY}qweight"] == ((0, 64), (4, 8))  # (in, out / 8): rows 32 to 64
    assert awq[f"{QUERY}scales"] == ((0, 4), (32, 64))
    assert awq[f"{OUT}qweight"] == ((32, 64), (0, 8))  # columns 32 to 64
    assert awq[f"{OUT}qzeros"] == ((2, 4), (0, 8))
    gptq = shapes({"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False}, tp=2, rank=1)
    assert gptq[f"{QUERY}qweight"] == ((0, 8), (32, 64))  # (in / 8, out)
    assert gptq[f"{QUERY}g_idx"] == ((0, 64),)
    assert gptq[f"{OUT}qweight"] == ((4, 8), (0, 64))
    assert gptq[f"{OUT}g_idx"] == ((32, 64),)
    nvfp4 = shapes({"quant_method": "modelopt", "quant_algo": "NVFP4"}, tp=2, rank=1)
    assert nvfp4[f"{OUT}weight"] == ((0, 64), (16, 32))
    assert nvfp4[f"{OUT}weight_scale"] == ((0, 64), (2, 4))
    assert nvfp4[f"{OUT}weight_scale_2"] == ()  # one number, everyone's


def test_p01_a_slice_of_columns_inside_a_group_is_refused() -> None:
    assert shapes(int4(32), tp=2, rank=0)[f"{OUT}weight_scale"] == ((0, 64), (0, 1))
    with pytest.raises(LayoutError, match=r"o_proj.weight_packed: 32 columns on each of 2 ranks .* groups of 64"):
        shapes(int4(64), tp=2, rank=0)
    # Two groups, the second a short one: they divide over two ranks, and the columns of a rank do not fill one.
    with pytest.raises(LayoutError, match=r"o_proj.weight_packed: 32 columns on each of 2 ranks .* groups of 48"):
        shapes(int4(48), tp=2, rank=0)


def test_p01_columns_grouped_in_an_order_of_their_own_are_not_split() -> None:
    block = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True}
    assert shapes(block, tp=1, rank=0)[f"{OUT}g_idx"] == ((0, 64),)
    with pytest.raises(LayoutError, match=r"o_proj.* order of their own \(desc_act\)"):
        shapes(block, tp=2, rank=0)


def test_p01_rows_packed_eight_to_a_word_are_not_cut_inside_one() -> None:
    block = {"quant_method": "awq", "bits": 4, "group_size": 16}
    with pytest.raises(LayoutError, match=r"k_proj.qweight: dimension 1 of \[64, 1\] does not split over 2 ranks"):
        shapes(block, tp=2, rank=0, head_dim=4, num_key_value_heads=2)
