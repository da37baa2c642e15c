"""Converted checkpoints: bytes against a float64 reference, whole or absent, audited, loaded as if encoded on load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from workbench.base import CheckpointError, ConfigError, LayoutError, LoadError
from workbench.checkpoint import Checkpoint, audit, write_checkpoint
from workbench.checkpoint.synthetic_config import Sizes, k3_config
from workbench.loading import load_sharded_weights
from workbench.loading.load import load_rank
from workbench.nn.precision_map import PrecisionMap
from workbench.nn.quant import SCHEMES
from workbench.placement import Layout
from workbench.quantize import encode_stored, quantize_checkpoint, stored_reference
from workbench.quantize.storage import decode_stored
from workbench.spec import published_tensors, read_spec, resolve_quant_rules

SIZES = Sizes(
    num_layers=3,
    full_attn_layers=(3,),
    residual_block=2,
    hidden_size=96,
    vocab_size=160,
    dense_width=192,
    kda_heads=4,
    kda_head_dim=16,
    mla_heads=4,
    q_rank=96,
    kv_rank=48,
    nope_dim=24,
    rope_dim=8,
    v_dim=16,
    num_experts=4,
    top_k=2,
    expert_width=64,
    latent_dim=96,
    vision_layers=1,
)
SCHEME_NAMES = ("fp8", "int8", "int4", "mxfp4")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint(tmp_path_factory.mktemp("source"), k3_config(**SIZES), seed=3)
    (folder / "notes.txt").write_text("kept")
    return folder


@pytest.fixture(scope="module")
def converted(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("converted")
    for name in SCHEME_NAMES:
        quantize_checkpoint(root, folder / name, name)
    return {name: folder / name for name in SCHEME_NAMES}


def pieces(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def state(folder: Path, precision: str) -> dict[str, torch.Tensor]:
    model = load_sharded_weights(folder, precision=precision, device="cpu").model
    return {
        name: x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x for name, x in model.state_dict().items()
    }


@pytest.mark.parametrize("scheme", SCHEME_NAMES)
def test_stored_bytes_mean_what_the_reference_reads(scheme: str) -> None:
    values = (
        torch.randn(5, 96, generator=torch.Generator().manual_seed(1)) * torch.tensor([1e-3, 1, 7, 1e3, 0])[:, None]
    )
    stored = encode_stored(scheme, values)
    expected = stored_reference(scheme, stored)
    found = decode_stored(scheme, stored).double()
    assert torch.allclose(found, expected, rtol=1e-6, atol=0)
    bound = {"fp8": 2**-4, "int8": 1 / 250, "int4": 1 / 13, "mxfp4": 0.26}[scheme]
    peak = values.abs().amax(-1, keepdim=True).double()
    assert bool(((expected - values.double()).abs() <= bound * peak + 1e-30).all())
    assert not expected[4].any()


def test_pinned_bytes_of_each_scheme() -> None:
    row = torch.tensor([[0.0, 1.0, -2.0, 3.5] + [7.0, -7.0, 0.5, 4.0] * 7])
    assert encode_stored("int4", row)["weight_packed"][0, 0].item() & 0xFFFFFFFF == int.from_bytes(
        bytes([8 | 9 << 4, 6 | 12 << 4, 15 | 1 << 4, 8 | 12 << 4]), "little"
    )
    assert encode_stored("int4", row)["weight_scale"].tolist() == [[1.0]]
    assert encode_stored("fp8", row)["weight"].view(torch.uint8)[0, :6].tolist() == [0, 104, 240, 118, 126, 254]
    assert encode_stored("fp8", row)["weight_scale"].shape == (1, 1)
    eight = encode_stored("int8", row)
    assert eight["weight_scale"].dtype == torch.bfloat16
    assert eight["weight"][0, 4].item() == 127
    four = encode_stored("mxfp4", row)  # the largest, 7, lies in [4, 8): scale 1; 3.5 ties to the even code of 4
    assert four["weight_scale"].tolist() == [[127]]
    assert four["weight_packed"][0, :2].tolist() == [0 | 2 << 4, 4 | 8 | 6 << 4]


@pytest.mark.parametrize("scheme", SCHEME_NAMES)
def test_a_converted_checkpoint_is_sound_and_loads_as_encoding_on_load_does(
    scheme: str, converted: dict[str, Path], root: Path
) -> None:
    folder = converted[scheme]
    report = audit(folder)
    assert report.ok, report.render()
    assert not report.warnings, report.render()
    assert (folder / "notes.txt").read_text() == "kept"
    spec = read_spec(folder)
    expected = {tensor.name: tensor for tensor in published_tensors(spec)}
    held = pieces(folder)
    assert held.keys() == expected.keys()
    assert all(held[name].shape == expected[name].shape for name in held if expected[name].used_rows is None)
    assert not resolve_quant_rules(spec, held.keys()).disagreements or scheme == "mxfp4"
    stored, encoded = state(folder, scheme), state(root, scheme)
    assert stored.keys() == encoded.keys()
    if scheme in ("fp8", "int8"):  # stored scales are rounded to bf16, those made on load are not
        differ = {name for name in stored if not torch.equal(stored[name], encoded[name])}
        assert all(name.endswith(("weight_packed", "weight_scale")) for name in differ)
    else:
        assert all(torch.equal(stored[name], encoded[name]) for name in stored)


@pytest.mark.parametrize("scheme", ["fp8", "int8", "int4"])
def test_a_converted_checkpoint_expands_to_the_values_of_its_bytes(scheme: str, converted: dict[str, Path]) -> None:
    held, dense = pieces(converted[scheme]), state(converted[scheme], "fp32")
    prefix = "language_model.model.layers.1."
    for module, param, slot in (
        ("self_attn.o_proj", "mixer.o_proj.weight", None),
        ("block_sparse_moe.experts.2.w2", "ffn.experts.w2.weight", 2),
    ):
        parts = {name.rpartition(".")[2]: x for name, x in held.items() if name.startswith(f"{prefix}{module}.")}
        expected = stored_reference(scheme, parts)
        found = dense[f"layers.1.{param}"] if slot is None else dense[f"layers.1.{param}"][slot]
        assert torch.allclose(found.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scheme", ["fp8", "int8", "int4"])
def test_ranks_hold_slices_of_a_converted_checkpoint(scheme: str, converted: dict[str, Path]) -> None:
    whole = state(converted[scheme], scheme)
    layout = Layout(tp=2, ep=2) if scheme == "int4" else Layout(tp=2)
    checkpoint = Checkpoint.open(converted[scheme])
    halves = [load_rank(checkpoint, layout, rank, precision=scheme)[0].state_dict() for rank in range(2)]
    name = "layers.1.mixer.o_proj.weight_packed"
    joined = torch.cat([half[name].view(torch.uint8) for half in halves], 1)
    assert torch.equal(joined, whole[name].view(torch.uint8))
    if scheme != "int4":  # one scale for a whole row is everyone's
        scale = "layers.1.mixer.o_proj.weight_scale"
        assert all(torch.equal(half[scale], whole[scale]) for half in halves)


def test_bytes_after_conversion_are_within_the_promised_shares(root: Path, tmp_path: Path) -> None:
    limits = {"fp8": 0.53, "int8": 0.53, "int4": 0.29, "mxfp4": 0.29}
    for scheme, limit in limits.items():
        report = quantize_checkpoint(root, tmp_path / scheme, scheme)
        assert report.quantised_ratio <= limit, report.render()
        stored = sum(x.numel() * x.element_size() for x in pieces(tmp_path / scheme).values())
        assert report.bytes_stored == stored
        experts = next(kind for kind in report.kinds if kind.kind.endswith("experts.*.w1"))
        assert experts.num_matrices == 2 * 4
        assert experts.relative_error == 0.0 if scheme == "mxfp4" else 0 < experts.relative_error < 0.2
        assert "everything else" in report.render()
        json.dumps(report.to_json(), allow_nan=False)


def test_an_expert_that_passes_through_keeps_its_bytes(root: Path, converted: dict[str, Path]) -> None:
    source, target = pieces(root), pieces(converted["mxfp4"])
    assert source.keys() == target.keys()
    assert all(torch.equal(source[name], target[name]) for name in source)


def test_a_precision_map_mixes_schemes_module_by_module(root: Path, tmp_path: Path) -> None:
    mixed = PrecisionMap(
        default="fp8",
        rules=(
            ("layers.*.ffn.experts.*", "int4"),
            ("layers.1.ffn.experts.w2.weight", "mxfp4"),
            ("layers.2.mixer.*", "bf16"),
            ("layers.0.mixer.o_proj.weight", "int8"),
        ),
    )
    mixed.save(tmp_path / "map.json")
    report = quantize_checkpoint(root, tmp_path / "out", str(tmp_path / "map.json"))
    assert {kind.scheme for kind in report.kinds} == {"bf16", "fp8", "int8", "int4", "mxfp4"}
    assert audit(tmp_path / "out").ok
    held = pieces(tmp_path / "out")
    layers = "language_model.model.layers."
    assert held[f"{layers}0.self_attn.o_proj.weight"].dtype == torch.int8
    assert held[f"{layers}1.self_attn.o_proj.weight"].dtype == torch.float8_e4m3fn
    assert held[f"{layers}2.self_attn.o_proj.weight"].dtype == torch.bfloat16
    assert held[f"{layers}1.block_sparse_moe.experts.0.w2.weight_packed"].dtype == torch.uint8
    assert held[f"{layers}1.block_sparse_moe.experts.0.w1.weight_packed"].dtype == torch.int32
    # The same map holds the same weights when it is given to the loader.
    model = load_sharded_weights(tmp_path / "out", precision=str(tmp_path / "map.json"), device="cpu").model
    assert model.layers["2"].ffn.experts.w3.scheme is SCHEMES["int4"]
    assert model.layers["2"].mixer.o_proj.scheme is None
    assert torch.equal(
        model.layers["1"].ffn.experts.w1.weight_packed[0],
        held[f"{layers}1.block_sparse_moe.experts.0.w1.weight_packed"].view(torch.uint8),
    )


def test_a_conversion_back_to_bf16_keeps_the_values(converted: dict[str, Path], tmp_path: Path) -> None:
    quantize_checkpoint(converted["int4"], tmp_path / "plain", "bf16")
    back, held = state(tmp_path / "plain", "fp32"), state(converted["int4"], "fp32")
    assert "quantization_config" not in (tmp_path / "plain" / "config.json").read_text()
    assert all(torch.allclose(back[name], held[name], rtol=2**-8, atol=0) for name in back)


def test_a_conversion_from_one_scheme_to_another(converted: dict[str, Path], tmp_path: Path) -> None:
    quantize_checkpoint(converted["fp8"], tmp_path / "int8", "int8")
    assert audit(tmp_path / "int8").ok
    first, second = state(converted["fp8"], "fp32"), state(tmp_path / "int8", "fp32")
    name = "layers.0.mixer.q_proj.weight"
    gap = (first[name] - second[name]).norm() / first[name].norm()
    assert 0 < gap < 0.02


def test_scales_that_do_not_split_are_refused_by_name(root: Path, tmp_path: Path) -> None:
    sizes = Sizes(**{**SIZES, "dense_width": 160})  # type: ignore[typeddict-item]
    odd = write_checkpoint(tmp_path / "odd", k3_config(**sizes))
    quantize_checkpoint(odd, tmp_path / "out", "int4")
    with pytest.raises(LayoutError, match=r"down_proj\.weight_packed: 80 columns on each of 2 ranks .* groups of 32"):
        load_rank(Checkpoint.open(tmp_path / "out"), Layout(tp=2), 0, precision="int4")


def test_nothing_is_left_behind_where_a_conversion_fails(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LoadError, match="cannot store precision"):
        quantize_checkpoint(root, tmp_path / "out", "int3")
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="already exists"):
        quantize_checkpoint(root, tmp_path / "there", "fp8")
    (tmp_path / "bad.json").write_text('{"format": "workbench-precision-map", "version": 1, "default": "int3"}')
    with pytest.raises(ConfigError, match="unknown scheme"):
        quantize_checkpoint(root, tmp_path / "out", str(tmp_path / "bad.json"))
    PrecisionMap(rules=(("layers.9.mixer.*", "fp8"),)).save(tmp_path / "other.json")
    with pytest.raises(LoadError, match="match no matrix"):
        quantize_checkpoint(root, tmp_path / "out", str(tmp_path / "other.json"))
    torn = tmp_path / "torn"
    shutil.copytree(root, torn)
    shard = sorted(torn.glob("*.safetensors"))[2]
    shard.write_bytes(shard.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match="missing"):
        quantize_checkpoint(torn, tmp_path / "out", "fp8")
    monkeypatch.setattr("workbench.quantize.convert.audit", lambda path: audit(torn))
    with pytest.raises(CheckpointError, match="does not pass its audit"):
        quantize_checkpoint(root, tmp_path / "out", "fp8")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="no room on the disk"):
        quantize_checkpoint(root, tmp_path / "out", "fp8")
    assert {path.name for path in tmp_path.iterdir()} == {"there", "bad.json", "other.json", "torn"}


def test_columns_that_make_no_whole_groups_are_refused(tmp_path: Path) -> None:
    sizes = Sizes(**{**SIZES, "hidden_size": 104})  # type: ignore[typeddict-item]
    root = write_checkpoint(tmp_path / "odd", k3_config(**sizes))
    with pytest.raises(LoadError, match="whole groups of 32"):
        quantize_checkpoint(root, tmp_path / "out", "int4")
