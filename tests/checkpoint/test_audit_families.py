"""Audit of checkpoints of other families: whole ones pass, planted faults are named, draft layers stand apart."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_configs import config_of
from safetensors.numpy import load_file, save_file

from workbench.checkpoint import audit
from workbench.spec import TensorSpec, draft_tensors, parse_config, published_tensors

NUMPY = {"F16": np.float16, "F32": np.float32, "U8": np.uint8, "I32": np.int32, "I64": np.int64}
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}


def write(root: Path, config: dict[str, Any], tensors: Iterable[TensorSpec]) -> Path:
    rng = np.random.default_rng(9)
    arrays = {}
    for tensor in tensors:
        kind = NUMPY[tensor.dtype]
        if np.issubdtype(kind, np.floating):
            arrays[tensor.name] = rng.standard_normal(tensor.shape).astype(kind)
        else:
            arrays[tensor.name] = rng.integers(100, 140, tensor.shape).astype(kind)
    root.mkdir()
    save_file(arrays, root / "model.safetensors")
    (root / "config.json").write_text(json.dumps(config))
    return root


def made(root: Path, name: str, *, with_draft: bool = False, **changes: object) -> Path:
    config = config_of(name, torch_dtype="float16", **changes) | {"torch_dtype": "float16"}
    spec = parse_config(config)
    return write(root, config, [*published_tensors(spec), *(draft_tensors(spec) if with_draft else ())])


def edit(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    tensors = load_file(root / "model.safetensors")
    change(tensors)
    save_file(tensors, root / "model.safetensors")


@pytest.mark.parametrize("name", ["deepseek_v3", "mixtral", "olmoe", "llama tied", "glm4_moe", "minimax_m2", "kimi_k2"])
def test_a_whole_checkpoint_passes(tmp_path: Path, name: str) -> None:
    report = audit(made(tmp_path / "whole", name))
    assert report.ok, report.render()
    assert not [finding for finding in report.findings if finding.severity == "warning"], report.render()


def test_announced_draft_layers_are_said_to_be_kept_apart(tmp_path: Path) -> None:
    report = audit(made(tmp_path / "draft", "deepseek_v3", with_draft=True))
    assert report.ok
    (finding,) = [finding for finding in report.findings if finding.kind == "mtp_layer"]
    assert finding.severity == "info"
    assert "kept apart" in finding.message
    # A config that announces none: the same names are a warning, and not silently taken for the model's.
    silent = made(tmp_path / "silent", "deepseek_v3", with_draft=True)
    config = json.loads((silent / "config.json").read_text())
    (silent / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    (finding,) = [finding for finding in audit(silent).findings if finding.kind == "mtp_layer"]
    assert finding.severity == "warning"


def test_fused_experts_pass_and_their_transpose_is_named(tmp_path: Path) -> None:
    root = made(tmp_path / "fused", "llama4")
    config = json.loads((root / "config.json").read_text())
    assert audit(root).ok, audit(root).render()
    name = "language_model.model.layers.1.feed_forward.experts.gate_up_proj"
    edit(root, lambda tensors: tensors.update({name: np.ascontiguousarray(tensors[name].swapaxes(1, 2))}))
    (finding,) = [finding for finding in audit(root).findings if finding.severity == "error"]
    assert (finding.kind, finding.tensors) == ("transposed", (name,))
    assert config["model_type"] == "llama4"


def test_packed_blocks_pass_and_lost_scales_are_named(tmp_path: Path) -> None:
    root = made(tmp_path / "packed", "gpt_oss", quantization_config=MXFP4)
    assert audit(root).ok, audit(root).render()
    name = "model.layers.1.mlp.experts.down_proj_scales"
    edit(root, lambda tensors: tensors.pop(name))
    assert name in {t for finding in audit(root).findings if finding.severity == "error" for t in finding.tensors}


def test_a_rule_that_cannot_be_evaluated_is_an_error_of_the_config(tmp_path: Path) -> None:
    root = made(tmp_path / "rule", "gpt_oss", quantization_config=MXFP4)
    config = json.loads((root / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"].append("(x+)+")
    (root / "config.json").write_text(json.dumps(config))
    (finding,) = [finding for finding in audit(root).findings if finding.kind == "config"]
    assert "too complex" in finding.message
