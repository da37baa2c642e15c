"""Storage schemes: the pieces of a matrix under each, from every dialect of config that declares one."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from family_configs import config_of

from workbench.base import num_bytes
from workbench.spec import (
    SCHEMES,
    TensorSpec,
    count_model,
    parse_config,
    pieces_of,
    published_tensors,
    scheme_table,
)
from workbench.spec.storage import SchemeName
from workbench.spec.tensors import Part

MODULE = "model.layers.0.self_attn.q_proj"  # (64, 64)
SIZES = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96}


def pieces_in(
    block: dict[str, Any], name: str = "mixtral", module: str = MODULE
) -> dict[str, tuple[str, tuple[int, ...]]]:
    spec = parse_config(config_of(name, quantization_config=block, **SIZES))
    found = {t.name: t for t in published_tensors(spec) if t.name.startswith(module)}
    return {name.removeprefix(module): (t.dtype, t.shape) for name, t in found.items()}


def group(**weights: object) -> dict[str, Any]:
    return {"group_0": {"targets": ["Linear"], "weights": weights}}


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (
            {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]},
            {".weight": ("F8_E4M3", (64, 64)), ".weight_scale_inv": ("F32", (2, 2))},
        ),
        (
            {"quant_method": "fp8", "fmt": "e4m3"},
            {".weight": ("F8_E4M3", (64, 64)), ".weight_scale": ("F32", ())},
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": group(num_bits=8, type="float", strategy="channel"),
            },
            {".weight": ("F8_E4M3", (64, 64)), ".weight_scale": ("F32", (64, 1))},
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "int-quantized",
                "config_groups": group(num_bits=8, type="int", strategy="channel"),
            },
            {".weight": ("I8", (64, 64))},
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": group(num_bits=4, type="int", strategy="group", group_size=32),
            },
            {".weight_packed": ("I32", (64, 8)), ".weight_scale": ("BF16", (64, 2))},
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "config_groups": group(num_bits=4, type="float", strategy="tensor_group", group_size=16),
            },
            {".weight_packed": ("U8", (64, 32)), ".weight_scale": ("F8_E4M3", (64, 4))},
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            {".weight": ("U8", (64, 32)), ".weight_scale": ("F8_E4M3", (64, 4)), ".weight_scale_2": ("F32", ())},
        ),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
            {".qweight": ("I32", (64, 8)), ".qzeros": ("I32", (2, 8)), ".scales": ("F16", (2, 64))},
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False},
            {".qweight": ("I32", (8, 64)), ".qzeros": ("I32", (2, 8)), ".g_idx": ("I32", (64,))},
        ),
    ],
    ids=["fp8 tiles", "fp8 tensor", "fp8 channel", "int8", "int4", "nvfp4 ct", "nvfp4 modelopt", "awq", "gptq"],
)
def test_each_dialect_declares_its_pieces(block: dict[str, Any], expected: dict[str, object]) -> None:
    found = pieces_in(block)
    assert {suffix: found.get(suffix) for suffix in expected} == expected
    assert ".weight" not in found or ".weight" in expected  # never a plain weight beside the codes


def test_awq_and_gptq_have_the_same_sizes_and_are_not_confused() -> None:
    awq = {piece.suffix: piece.shape for piece in pieces_of("int4_awq", 64, 64, 32)}
    gptq = {piece.suffix: piece.shape for piece in pieces_of("int4_gptq", 64, 64, 32)}
    assert awq[".qzeros"] == gptq[".qzeros"]
    assert awq[".qweight"] == (64, 8)  # packed along outputs
    assert gptq[".qweight"] == (8, 64)  # packed along inputs
    assert "0 2 4 6 1 3 5 7" in SCHEMES["int4_awq"].meaning
    assert "plain order" in SCHEMES["int4_gptq"].meaning


def test_power_of_two_scales_are_kept_as_a_fact_of_the_config() -> None:
    tiles = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32], "scale_fmt": "ue8m0"}
    quant = parse_config(config_of("mixtral", quantization_config=tiles)).quant
    assert quant is not None
    assert quant.has_power_of_two_scales
    assert quant.scheme == "fp8_block"  # values are powers of two, stored as F32 all the same


def test_deepseek_v4_stores_experts_in_fp4_and_the_rest_in_tiles_with_exponent_bytes() -> None:
    tiles = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    config = config_of("deepseek_v4", quantization_config=tiles, expert_dtype="fp4", hidden_size=64)
    config["moe_intermediate_size"] = 32
    by_name = {tensor.name: tensor for tensor in published_tensors(parse_config(config))}
    expert = by_name["layers.1.ffn.experts.3.w1.weight"]
    assert (expert.dtype, expert.shape, expert.num_params) == ("I8", (32, 32), 32 * 64)
    assert by_name["layers.1.ffn.experts.3.w1.scale"].dtype == "F8_E8M0"
    assert by_name["layers.1.attn.wq_b.scale"].shape == (2, 1)
    assert by_name["layers.1.attn.wq_b.weight"].dtype == "F8_E4M3"
    assert by_name["head.weight"].dtype == "BF16"
    assert "layers.1.ffn.gate.scale" not in by_name


def test_gpt_oss_experts_are_blocks_where_quantised_and_transposed_where_plain() -> None:
    mxfp4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    packed = {t.name: t for t in published_tensors(parse_config(config_of("gpt_oss", quantization_config=mxfp4)))}
    at = "model.layers.1.mlp.experts."
    assert packed[f"{at}gate_up_proj_blocks"].shape == (5, 192, 2, 16)
    assert packed[f"{at}gate_up_proj_scales"].shape == (5, 192, 2)
    assert packed[f"{at}down_proj_blocks"].shape == (5, 64, 3, 16)
    assert packed[f"{at}gate_up_proj_bias"].shape == (5, 192)
    assert packed[f"{at}gate_up_proj_blocks"].is_interleaved
    assert packed[f"{at}gate_up_proj_blocks"].also_fills == ("layers.1.ffn.experts.w3.weight",)
    plain = {t.name: t for t in published_tensors(parse_config(config_of("gpt_oss")))}
    assert plain[f"{at}gate_up_proj"].shape == (5, 64, 192)
    assert plain[f"{at}gate_up_proj"].is_transposed
    assert sum(t.num_params for t in packed.values()) == sum(t.num_params for t in plain.values())


@pytest.mark.parametrize(
    ("name", "shape", "is_transposed"),
    [
        ("qwen3_vl_moe", (10, 52, 44), True),
        ("qwen3_5_moe", (10, 44, 52), False),
        ("llama4", (7, 60, 68), True),
    ],
)
def test_fused_experts_state_their_orientation(name: str, shape: tuple[int, ...], is_transposed: bool) -> None:
    tensors = [t for t in published_tensors(parse_config(config_of(name))) if t.name.endswith("experts.gate_up_proj")]
    assert {(t.shape, t.is_transposed, t.is_interleaved) for t in tensors} == {(shape, is_transposed, False)}
    assert all(t.num_stacked == shape[0] for t in tensors)


def test_parameters_do_not_depend_on_the_scheme() -> None:
    config = config_of("mixtral", **SIZES)
    plain = count_model(parse_config(config))
    for block in (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {"quant_method": "gptq", "bits": 4, "group_size": 32},
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
    ):
        stored = count_model(parse_config(config | {"quantization_config": block}))
        assert stored.num_params == plain.num_params
        assert stored.weight_bytes < plain.weight_bytes


def test_every_scheme_is_named_described_and_has_one_piece_with_the_weights() -> None:
    assert tuple(SCHEMES) == get_args(SchemeName)
    table = scheme_table()
    assert len(table.rows) == len(SCHEMES)
    for scheme in SCHEMES.values():
        pieces = scheme.pieces(256, 384, 32)
        assert sum(piece.holds_weights for piece in pieces) == 1
        assert all(piece.suffix.lstrip("._") in get_args(Part) for piece in pieces)
        values = next(piece for piece in pieces if piece.holds_weights)
        assert num_bytes(values.dtype, values.shape) * 8 == 256 * 384 * scheme.bits


def test_a_scale_stands_for_no_parameter() -> None:
    tensor = TensorSpec(name="x.scale", shape=(3, 4), dtype="F8_E8M0", role="mla", param="x", part="scale", weights=0)
    assert tensor.num_params == 0
    assert tensor.is_quantised
