"""Synthetic checkpoints: of the published form, the same for the same seed, and drawn so that mistakes show."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.base import CheckpointError, ConfigError
from workbench.checkpoint import F1, F2, Checkpoint, k3_config, to_bf16, write_checkpoint, write_shard
from workbench.checkpoint.synthetic import pack_nibbles
from workbench.spec import parse_config, published_tensors

PREFIX = "language_model.model.layers."


def floats(checkpoint: Checkpoint, name: str) -> np.ndarray:
    entry = checkpoint.tensor(name)
    raw = checkpoint.read_bytes(name)
    if entry.dtype == "BF16":
        return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(entry.shape)
    return np.frombuffer(raw, np.float32 if entry.dtype == "F32" else np.uint8).reshape(entry.shape)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(write_checkpoint(tmp_path_factory.mktemp("k3"), k3_config(sizes=F1), seed=11))


def test_published_layout_puts_one_layer_in_a_file_then_head_projector_and_tower(checkpoint: Checkpoint) -> None:
    assert len(checkpoint.headers) == 8 + 3
    for layer in range(8):
        names = checkpoint.headers[f"model-{layer + 1:05d}-of-000011.safetensors"].entries
        assert all(name.startswith(f"{PREFIX}{layer}.") for name in names)
    assert "language_model.lm_head.weight" in checkpoint.headers["model-00009-of-000011.safetensors"].entries
    assert len(checkpoint.headers["model-00010-of-000011.safetensors"].entries) == 3


def test_same_seed_gives_the_same_tensors_however_they_are_dealt(tmp_path: Path, checkpoint: Checkpoint) -> None:
    mixed = Checkpoint.open(write_checkpoint(tmp_path / "a", k3_config(sizes=F1), seed=11, shards=4, layout="mixed"))
    assert mixed.entries.keys() == checkpoint.entries.keys()
    assert all(mixed.read_bytes(name) == checkpoint.read_bytes(name) for name in mixed.entries)
    files = {entry.file for entry in mixed if entry.name.startswith(f"{PREFIX}3.")}
    assert len(files) == 4  # a layer spans files
    other = Checkpoint.open(write_checkpoint(tmp_path / "b", k3_config(sizes=F1), seed=12))
    assert other.read_bytes(f"{PREFIX}1.input_layernorm.weight") != mixed.read_bytes(
        f"{PREFIX}1.input_layernorm.weight"
    )


def test_f1_has_no_two_dimensions_equal_and_none_a_multiple_of_another() -> None:
    counts = {"num_layers", "num_dense_layers", "residual_block", "vision_layers", "num_shared", "top_k"}
    # A width that is heads times head width is a multiple by construction; heads and head widths stand for it.
    built = {"full_attn_layers", "max_context", "kda_heads", "mla_heads", "vision_heads", "num_experts", "conv_size"}
    dims = {name: size for name, size in F1.items() if name not in counts | built}
    spec = parse_config(k3_config(sizes=F1))
    assert spec.vision is not None
    dims |= {"kda_width": 6 * 26, "vision_head_dim": spec.vision.head_dim}
    made_of = {("kda_head_dim", "kda_width"), ("vision_head_dim", "vision_qkv_width")}
    for (a, x), (b, y) in itertools.permutations(dims.items(), 2):
        assert x != y, (a, b)
        assert (a, b) in made_of or y % x, f"{b}={y} is a multiple of {a}={x}"


def test_f2_experts_and_feed_forward_are_square() -> None:
    shapes = {t.name: t.shape for t in published_tensors(parse_config(k3_config(sizes=F2)))}
    assert shapes[f"{PREFIX}0.mlp.gate_proj.weight"] == (128, 128)
    assert shapes[f"{PREFIX}1.block_sparse_moe.experts.0.w1.weight_packed"] == (128, 64)
    assert shapes[f"{PREFIX}1.block_sparse_moe.experts.0.w2.weight_packed"] == (128, 64)


def test_values_are_such_that_mistakes_show(checkpoint: Checkpoint) -> None:
    bias = floats(checkpoint, f"{PREFIX}1.block_sparse_moe.gate.e_score_correction_bias")
    assert 6.75 <= bias.min() < bias.max() <= 7.25
    assert len(set(bias.tolist())) > len(set((np.round(bias * 32) / 32).tolist()))  # bf16 steps of 1/32 merge some
    head = floats(checkpoint, "language_model.lm_head.weight")
    assert np.std(head @ np.random.default_rng(0).standard_normal(152)) == pytest.approx(6, rel=0.3)  # peaked logits
    q_a = floats(checkpoint, f"{PREFIX}3.self_attn.q_a_proj.weight")
    assert np.mean((q_a @ np.random.default_rng(1).standard_normal(152)) ** 2) == pytest.approx(4e-4, rel=0.6)
    a_log = floats(checkpoint, f"{PREFIX}0.self_attn.A_log")
    assert a_log.shape == (8,)
    assert np.all(a_log[:6] != 0)
    assert not a_log[6:].any()


def test_experts_have_unit_gain_minus_zeros_and_empty_groups(checkpoint: Checkpoint) -> None:
    prefix = f"{PREFIX}2.block_sparse_moe.experts.4.w1."
    packed, scale = floats(checkpoint, prefix + "weight_packed"), floats(checkpoint, prefix + "weight_scale")
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(160, 96)
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.where(codes & 8, -1, 1) * magnitudes[codes & 7] * np.repeat(2.0 ** (scale.astype(float) - 127), 32, 1)
    assert np.std(values) * 96**0.5 == pytest.approx(1, rel=0.5)
    assert (codes == 8).any()
    empty = [
        not floats(checkpoint, f"{PREFIX}{layer}.block_sparse_moe.experts.{e}.w1.weight_packed")
        .reshape(-1, 16)
        .any(axis=1)
        .all()
        for layer in (1, 2)
        for e in range(10)
    ]
    assert any(empty)


def test_l16_even_columns_lie_in_the_low_nibble_pinned_bytes() -> None:
    codes = np.arange(16, dtype=np.uint8).reshape(1, 16)
    assert pack_nibbles(codes).tobytes() == bytes.fromhex("1032547698badcfe")
    # 0,2,4,6,1,3,5,7 inside eight codes is the interleaved order of other formats: other bytes, same length.
    interleaved = codes.reshape(1, 2, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(1, 16)
    assert pack_nibbles(interleaved).tobytes() == bytes.fromhex("20643175a8ecb9fd")


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_bf16_rounds_to_the_nearest_and_ties_to_even(value: float) -> None:
    x = np.array([value], np.float32)
    bits = int(x.view(np.uint32)[0])
    got = int(to_bf16(x)[0])
    below = bits >> 16
    rest = bits & 0xFFFF
    expected = below + (1 if rest > 0x8000 or (rest == 0x8000 and below & 1) else 0)
    assert got == expected


def test_bf16_pinned_values() -> None:
    values = np.array([1.0, -2.5, 1.00390625, 1.01171875, 3.1415927, 0.0], np.float32)
    assert [f"{x:04x}" for x in to_bf16(values)] == ["3f80", "c020", "3f80", "3f82", "4049", "0000"]


def test_config_files_are_written_beside_the_weights(checkpoint: Checkpoint) -> None:
    root = checkpoint.root
    assert json.loads((root / "config.json").read_text()) == k3_config(sizes=F1)
    assert json.loads((root / "generation_config.json").read_text()) == {"max_length": 4096, "eos_token_id": 526}
    assert checkpoint.spec.image is not None
    assert checkpoint.spec.image.patch_limit == 65536


def test_folder_that_holds_shards_unknown_sizes_and_unsound_configs_are_refused(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    with pytest.raises(CheckpointError, match="already holds safetensors files"):
        write_checkpoint(checkpoint.root)
    with pytest.raises(TypeError, match="no such size: hidden"):
        k3_config(hidden=7)
    with pytest.raises(ConfigError, match="cover every layer"):
        write_checkpoint(tmp_path, k3_config(num_layers=3))
    assert list(tmp_path.iterdir()) == []


def test_writer_refuses_data_of_another_length(tmp_path: Path) -> None:
    tensor = next(iter(published_tensors(parse_config(k3_config()))))
    with pytest.raises(CheckpointError, match="wrong number of bytes"):
        write_shard(tmp_path / "x.safetensors", [tensor], lambda _: b"short")
