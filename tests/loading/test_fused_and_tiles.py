"""Experts that lie in one tensor, and scales of tiles: every rank's share against matrices expanded by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from workbench.base import LayoutError
from workbench.checkpoint import Checkpoint
from workbench.loading import load_rank
from workbench.nn.quant.fp8_tiles import decode_fp8_tiles_reference
from workbench.nn.quant.mxfp4 import decode_mxfp4_reference
from workbench.placement import Layout
from workbench.spec import parse_config, published_tensors

HIDDEN, WIDTH, EXPERTS, TILE = 32, 64, 4, 8
OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "head_dim": 6,
    "hidden_act": "silu", "hidden_size": HIDDEN, "intermediate_size": WIDTH, "layer_types": ["full_attention"],
    "max_position_embeddings": 64, "num_attention_heads": 2, "num_experts_per_tok": 2, "num_hidden_layers": 1,
    "num_key_value_heads": 2, "num_local_experts": EXPERTS, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "sliding_window": 8, "vocab_size": 22, "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
}  # fmt: skip
TILED = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 8, "hidden_act": "silu",
    "hidden_size": 96, "intermediate_size": 208, "max_position_embeddings": 64, "mlp_only_layers": [0],
    "moe_intermediate_size": 16, "norm_topk_prob": True, "num_attention_heads": 4, "num_experts": 2,
    "num_experts_per_tok": 1, "num_hidden_layers": 1, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "rope_theta": 1e4, "vocab_size": 22, "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [TILE, TILE]},
}  # fmt: skip


def write(root: Path, config: dict[str, object]) -> tuple[Path, dict[str, Tensor]]:
    g = torch.Generator().manual_seed(6)
    stored: dict[str, Tensor] = {}
    for tensor in published_tensors(parse_config(config)):
        values = torch.randn(tensor.shape, generator=g)
        if tensor.dtype == "U8":
            low, high = (0, 256) if tensor.part == "blocks" else (120, 130)
            stored[tensor.name] = torch.randint(low, high, tensor.shape, generator=g, dtype=torch.uint8)
        elif tensor.dtype == "F8_E4M3":
            stored[tensor.name] = (values * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        else:
            stored[tensor.name] = values.to({"BF16": torch.bfloat16, "F32": torch.float32}[tensor.dtype])
    (root / "config.json").write_text(json.dumps(config))
    save_file(stored, root / "model.safetensors")
    return root, stored


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Tensor]], dict[str, Tensor]]:
    """A checkpoint of fused experts, with the matrices and biases of each expert."""
    root, stored = write(tmp_path_factory.mktemp("fused"), OSS)
    at = "model.layers.0.mlp.experts."
    whole: dict[str, list[Tensor]] = {"w1": [], "w2": [], "w3": []}
    for e in range(EXPERTS):
        blocks, scales = (stored[f"{at}gate_up_proj_{x}"][e] for x in ("blocks", "scales"))
        gate_up = decode_mxfp4_reference(blocks.flatten(1), scales)
        whole["w1"].append(gate_up[0::2])
        whole["w3"].append(gate_up[1::2])
        blocks, scales = (stored[f"{at}down_proj_{x}"][e] for x in ("blocks", "scales"))
        whole["w2"].append(decode_mxfp4_reference(blocks.flatten(1), scales))
    bias = stored[f"{at}gate_up_proj_bias"].float()
    biases = {"w1": bias[:, 0::2], "w3": bias[:, 1::2], "w2": stored[f"{at}down_proj_bias"].float()}
    return root, whole, biases


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(tp=2, ep=2), Layout(dp=2, ep=2)], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "mxfp4"])
def test_fused_experts_reach_their_slots_with_gate_and_up_apart(
    fused: tuple[Path, dict[str, list[Tensor]], dict[str, Tensor]], layout: Layout, precision: str
) -> None:
    root, whole, biases = fused
    for rank in range(layout.world_size):
        model, ledger, stats = load_rank(
            Checkpoint.open(root), layout, rank, precision=precision, dtype=torch.float32, window_bytes=1 << 16
        )
        coords, experts = layout.coords(rank), model.layers["0"].ffn.experts
        per_rank, share = EXPERTS // layout.ep, WIDTH // layout.expert_tp
        own = slice(coords.expert_tp * share, (coords.expert_tp + 1) * share)
        for slot in range(per_rank):
            e = coords.ep * per_rank + slot
            for name in ("w1", "w2", "w3"):
                expected = whole[name][e][:, own] if name == "w2" else whole[name][e][own]
                store = getattr(experts, name)
                assert torch.equal(store.dense(torch.float32, slot), expected.float()), f"{name}[{slot}] on {rank}"
                wanted = biases[name][e] if name == "w2" else biases[name][e][own]
                assert torch.equal(store.bias[slot], wanted), f"bias of {name}[{slot}] on {rank}"
        assert stats.bytes_read == stats.bytes_assigned
        entry = ledger.entry("layers.0.ffn.experts.w3.bias", 0)
        assert entry.missing_rows() == []
        assert entry.transform.endswith("rows in turns")


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)], ids=str)
def test_tiles_are_scaled_by_their_own_scale_chunk_by_chunk(tmp_path: Path, layout: Layout) -> None:
    root, stored = write(tmp_path, TILED)
    for rank in range(layout.world_size):
        # A window that takes 14 or 30 rows at a time: chunks have to begin where tiles do, so it takes 8 or 24.
        model, _, stats = load_rank(
            Checkpoint.open(root), layout, rank, precision="fp32", dtype=torch.float32, window_bytes=1 << 17
        )
        for ours, published, dim in (("gate_proj", "gate_proj", 0), ("down_proj", "down_proj", 1)):
            name = f"model.layers.0.mlp.{published}.weight"
            whole = decode_fp8_tiles_reference(stored[name], stored[f"{name}_scale_inv"], TILE)
            expected = whole.chunk(layout.tp, dim)[rank]
            found = model.layers["0"].ffn.get_submodule(ours).weight
            assert (found - expected).abs().max() <= 2.0**-24 * expected.abs().max(), f"{ours} on {rank}"
        assert stats.bytes_read == stats.bytes_assigned


def test_a_layout_that_would_cut_a_tile_is_refused(tmp_path: Path) -> None:
    root, _ = write(tmp_path, {**TILED, "intermediate_size": 200})
    with pytest.raises(LayoutError, match="tile"):
        load_rank(Checkpoint.open(root), Layout(tp=2), 0)


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(tp=2, ep=2), Layout(dp=2, ep=2)], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("window_bytes", [1 << 16, 1 << 20])
def test_experts_stored_as_inputs_by_outputs_are_turned_on_the_way(
    tmp_path: Path, layout: Layout, precision: str, window_bytes: int
) -> None:
    """gpt-oss unquantised: gate and up take turns along the stored columns. Small windows cut every matrix up."""
    root, stored = write(tmp_path, {key: value for key, value in OSS.items() if key != "quantization_config"})
    at = "model.layers.0.mlp.experts."
    gate_up, down = (stored[f"{at}{name}"].float() for name in ("gate_up_proj", "down_proj"))
    assert gate_up.shape == (EXPERTS, HIDDEN, 2 * WIDTH)
    whole = {"w1": gate_up[..., 0::2].mT, "w3": gate_up[..., 1::2].mT, "w2": down.mT}
    for rank in range(layout.world_size):
        model, _, stats = load_rank(
            Checkpoint.open(root), layout, rank, precision=precision, dtype=torch.float32, window_bytes=window_bytes
        )
        coords, experts = layout.coords(rank), model.layers["0"].ffn.experts
        per_rank, share = EXPERTS // layout.ep, WIDTH // layout.expert_tp
        own = slice(coords.expert_tp * share, (coords.expert_tp + 1) * share)
        for slot in range(per_rank):
            for name, matrices in whole.items():
                matrix = matrices[coords.ep * per_rank + slot]
                expected = (matrix[:, own] if name == "w2" else matrix[own]).contiguous()
                store = getattr(experts, name)
                if store.scheme is not None:
                    expected = store.scheme.decode(store.scheme.encode(expected), torch.float32)
                assert torch.equal(store.dense(torch.float32, slot), expected), f"{name}[{slot}] on {rank}"
        assert stats.bytes_read == stats.bytes_assigned
