"""What published forms become in each precision: kept byte for byte where ours says the same, else made anew."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from workbench.base import LoadError
from workbench.checkpoint import audit
from workbench.loading import LoadedModel, load_sharded_weights
from workbench.nn.linear import MatrixStore

FAMILIES = Path(__file__).resolve().parents[1] / "golden" / "families"
EXPERT, DENSE = "layers.1.ffn.experts.w1", "layers.1.ffn.gate_proj"
KEPT = (
    ("kimi_k25-int4", "int4", EXPERT, "language_model.model.layers.1.mlp.experts.0.gate_proj.weight_packed"),
    ("llama-fp8_channel", "fp8", DENSE, "model.layers.1.mlp.gate_proj.weight"),
    ("qwen2-fp8_tensor", "fp8", DENSE, "model.layers.1.mlp.gate_proj.weight"),
    ("mistral-int8", "int8", DENSE, "model.layers.1.mlp.gate_proj.weight"),
)
MADE_ANEW = (
    ("mixtral-awq", EXPERT, "int4_awq"),
    ("qwen3-gptq", DENSE, "int4_gptq"),
    ("qwen3_moe-nvfp4", EXPERT, "nvfp4_packed"),
)


def load(name: str | Path, precision: str) -> LoadedModel:
    return load_sharded_weights(FAMILIES / name, precision=precision, device="cpu")


def store_of(loaded: LoadedModel, name: str) -> MatrixStore:
    store = loaded.model.get_submodule(name)
    assert isinstance(store, MatrixStore)
    return store


def values_of(store: MatrixStore) -> Tensor:
    return store.scheme.decode(store.parts, torch.float32) if store.scheme is not None else store.weight.float()


@pytest.mark.parametrize(("name", "precision", "module", "stored"), KEPT, ids=[case[0] for case in KEPT])
def test_a_form_that_ours_says_too_is_kept_byte_for_byte(name: str, precision: str, module: str, stored: str) -> None:
    loaded = load(name, precision)
    store = store_of(loaded, module)
    packed = store.parts["weight_packed"]
    with safe_open(FAMILIES / name / "model.safetensors", "pt") as file:
        codes = file.get_tensor(stored)
    own = packed[0] if module == EXPERT else packed
    assert torch.equal(own.view(torch.uint8), codes.view(torch.uint8))
    expanded = values_of(store_of(load(name, "fp32"), module))
    assert torch.equal(values_of(store), expanded)
    assert expanded.unique().numel() > 30


@pytest.mark.parametrize(
    ("name", "module", "scheme"),
    [
        ("mixtral-awq", EXPERT, "int4_awq"),
        ("qwen3-gptq", DENSE, "int4_gptq"),
        ("qwen3_moe-nvfp4", EXPERT, "nvfp4_packed"),
    ],
)
def test_any_other_form_is_expanded_and_encoded_anew(name: str, module: str, scheme: str) -> None:
    loaded, plain = load(name, "int8"), load(name, "fp32")
    ours, exact = values_of(store_of(loaded, module)), values_of(store_of(plain, module))
    step = exact.abs().amax(-1, keepdim=True) / 127
    assert ((ours - exact).abs() <= step * 0.501).all()
    assert not torch.equal(ours, exact)
    transforms = {entry.transform for entry in loaded.ledger.entries if entry.name.startswith(f"{module}.")}
    assert transforms == {f"expand {scheme}, encode int8"}


def rewritten(name: str, root: Path, part: str, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> Path:
    """A copy of a golden with every piece called `part` in another dtype, and shape."""
    shutil.copytree(FAMILIES / name, root)
    tensors = load_file(root / "model.safetensors")
    for key, value in tensors.items():
        if key.endswith(part):
            tensors[key] = value.to(dtype) if shape is None else value.to(dtype).reshape(shape)
    save_file(tensors, root / "model.safetensors", {"format": "pt"})
    return root


@pytest.mark.parametrize(
    ("name", "part", "dtype", "shape", "module"),
    [
        ("llama-fp8_channel", "weight_scale", torch.bfloat16, None, DENSE),
        ("qwen2-fp8_tensor", "weight_scale", torch.bfloat16, (1,), DENSE),
        ("mistral-int8", "weight_scale", torch.float32, None, DENSE),
        ("kimi_k25-int4", "weight_scale", torch.float16, None, EXPERT),
        ("kimi_k25-int4", "weight_shape", torch.int64, None, EXPERT),
    ],
)
def test_scales_may_have_the_float_type_their_header_says(
    name: str, part: str, dtype: torch.dtype, shape: tuple[int, ...] | None, module: str, tmp_path: Path
) -> None:
    root = rewritten(name, tmp_path / "other", part, dtype, shape)
    assert audit(root).ok
    loaded = load(root, "fp32")
    ours, exact = values_of(store_of(loaded, module)), values_of(store_of(load(name, "fp32"), module))
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-10
    assert ((ours - exact).abs() <= exact.abs() * rounding).all()
    assert torch.equal(ours, exact) == (dtype != torch.bfloat16)
    assert loaded.stats.bytes_read == loaded.stats.bytes_assigned


def test_scales_of_another_kind_of_number_are_refused_by_name(tmp_path: Path) -> None:
    root = rewritten("llama-fp8_channel", tmp_path / "other", "weight_scale", torch.int32)
    assert not audit(root).ok
    with pytest.raises(LoadError, match=r"wrong dtype.*weight_scale is I32"):
        load(root, "fp32")
