"""One tensor per expert or all of a layer in one: the same model either way, in every scheme that both can have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from family_configs import config_of
from safetensors.torch import save_file
from torch import Tensor

from workbench.base import LoadError
from workbench.checkpoint import Checkpoint
from workbench.loading import load_rank
from workbench.placement import Layout
from workbench.spec import families, parse_config, published_tensors

TOY = """
from dataclasses import replace
from workbench.spec import naming
from workbench.spec.dialect import is_named
from workbench.spec.families import mixtral
FAMILY, ARCHITECTURES = "toy_stacked", ("ToyStackedForCausalLM",)
def matches(config):
    return is_named(config, (FAMILY,), ARCHITECTURES)
def parse(config, image_config=None):
    theirs = {**config, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    return replace(mixtral.parse(theirs), family=FAMILY, architecture=ARCHITECTURES[0])
def tensors(spec):
    return naming.standard_tensors(spec, replace(mixtral.NAMES, is_fused=True))
"""
SIZES = {"vocab_size": 42, "hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SIZES |= {"intermediate_size": 64, "num_local_experts": 4, "num_hidden_layers": 1}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
BLOCKS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "fp8 tiles": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]},
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}},
        "ignore": ["lm_head"],
    },
}
TYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn, "I32": torch.int32}


@pytest.fixture
def stacked_family(tmp_path: Path) -> Iterator[None]:
    folder = tmp_path / "families"
    folder.mkdir()
    (folder / "toy_stacked.py").write_text(TOY)
    families.__path__.append(str(folder))
    yield
    families.__path__.remove(str(folder))


def config(block: dict[str, Any] | None, *, is_stacked: bool) -> dict[str, Any]:
    own = config_of("mixtral", **SIZES) | ({} if block is None else {"quantization_config": block})
    return own | ({"architectures": ["ToyStackedForCausalLM"], "model_type": "toy_stacked"} if is_stacked else {})


def apart(block: dict[str, Any] | None) -> dict[str, Tensor]:
    """Random tensors, one for each expert and matrix."""
    g, out = torch.Generator().manual_seed(3), {}
    for tensor in published_tensors(parse_config(config(block, is_stacked=False))):
        if tensor.dtype == "I32":
            out[tensor.name] = torch.randint(-(2**31), 2**31, tensor.shape, generator=g, dtype=torch.int64).int()
        else:
            out[tensor.name] = (torch.rand(tensor.shape, generator=g) + 0.1).to(TYPES[tensor.dtype])
    return out


def together(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same with the experts of each layer in one tensor, gate above up."""
    out, experts = {}, {}
    for name, value in tensors.items():
        before, found, after = name.partition(".experts.")
        if not found:
            out[name] = value
            continue
        expert, matrix, part = after.split(".", 2)
        experts.setdefault((before, part), {})[int(expert), matrix] = value
    for (before, part), own in experts.items():
        suffix = "" if part == "weight" and own[0, "w1"].dtype == torch.bfloat16 else f".{part}"
        is_shape = part == "weight_shape"
        gate_up = [own[e, "w1"] if is_shape else torch.cat([own[e, "w1"], own[e, "w3"]]) for e in range(4)]
        out[f"{before}.experts.gate_up_proj{suffix}"] = torch.stack(gate_up)
        out[f"{before}.experts.down_proj{suffix}"] = torch.stack([own[e, "w2"] for e in range(4)])
    return out


def written(root: Path, block: dict[str, Any] | None, tensors: dict[str, Tensor], *, is_stacked: bool) -> Checkpoint:
    root.mkdir()
    (root / "config.json").write_text(json.dumps(config(block, is_stacked=is_stacked)))
    save_file(tensors, root / "model.safetensors", {"format": "pt"})
    return Checkpoint.open(root)


@pytest.mark.parametrize("kind", BLOCKS)
def test_l13_stacked_and_separate_experts_load_to_identical_tensors(
    kind: str, stacked_family: None, tmp_path: Path
) -> None:
    block, tensors = BLOCKS[kind], apart(BLOCKS[kind])
    separate = written(tmp_path / "separate", block, tensors, is_stacked=False)
    stacked = written(tmp_path / "stacked", block, together(tensors), is_stacked=True)
    for layout, rank in ((Layout(), 0), (Layout(tp=2), 1), (Layout(tp=2, ep=2), 1)):
        models = [load_rank(x, layout, rank, precision="fp32")[0] for x in (separate, stacked)]
        ours, theirs = (dict([*model.named_parameters(), *model.named_buffers()]) for model in models)
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
        assert ours["layers.0.ffn.experts.w1.weight"].unique().numel() > 100


def test_l13_the_other_layout_than_the_family_declares_is_refused_by_name(stacked_family: None, tmp_path: Path) -> None:
    checkpoint = written(tmp_path / "wrong", None, together(apart(None)), is_stacked=False)
    with pytest.raises(LoadError, match=r"no place in the model for.*experts.gate_up_proj.*missing.*experts.0.w1"):
        load_rank(checkpoint, Layout(), 0)
