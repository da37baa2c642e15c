"""A trained run as published files: sound, whole, and computing exactly what training computed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_runs import give_tokenizer, make_packs, write_recipe

from workbench.base import CheckpointError
from workbench.checkpoint import Checkpoint, audit
from workbench.loading import load_sharded_weights
from workbench.nn.model import Model
from workbench.parallel import attach, build_stage, single_context
from workbench.placement import Layout
from workbench.serving.inputs import read_tokenizer
from workbench.spec import read_spec
from workbench.training.checkpointing import find_states
from workbench.training.config import TrainConfig, read_config
from workbench.training.export import export_run, load_whole
from workbench.training.launch import train
from workbench.training.quantise import AsPublished
from workbench.training.step import token_batch


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainConfig, Path]:
    folder = tmp_path_factory.mktemp("run")
    give_tokenizer(folder / "out")
    recipe = write_recipe(folder, steps=4)
    train(recipe, folder / "out")
    return read_config(recipe), folder / "out"


def model_of(config: TrainConfig, out: Path, *, is_published: bool) -> Model:
    """The model as training had it: masters as they are, or as the quantised phase sees them."""
    spec = config.spec()
    as_published = AsPublished(spec)
    whole = load_whole(spec, find_states(out / "states")[0])
    model = build_stage(spec, Layout(), 0, precision="fp32")
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_seen = is_published and parameter.requires_grad
            parameter.copy_(as_published(name, whole[name]) if is_seen else whole[name])
    attach(model, single_context())
    return model


@torch.no_grad()
def logits(model: Model) -> torch.Tensor:
    (pack,) = make_packs(1, token_budget=480)
    return model(token_batch(model, single_context(), pack))


def test_the_audit_finds_nothing_to_complain_about(run: tuple[TrainConfig, Path]) -> None:
    report = audit(run[1] / "model", deep=True)
    assert report.ok, report
    assert [f for f in report.findings if f.severity == "error"] == []


def test_loaded_files_compute_bit_for_bit_what_the_quantised_phase_computed(run: tuple[TrainConfig, Path]) -> None:
    config, out = run
    loaded = load_sharded_weights(out / "model", precision="fp32", device="cpu")
    trained = model_of(config, out, is_published=True)
    parameters = dict(loaded.model.named_parameters())
    for name, parameter in trained.named_parameters():
        assert torch.equal(parameters[name], parameter), name
    assert torch.equal(logits(loaded.model), logits(trained))


def test_the_comparison_tells_rounded_weights_from_masters(run: tuple[TrainConfig, Path]) -> None:
    config, out = run
    published, masters = (logits(model_of(config, out, is_published=x)) for x in (True, False))
    assert not torch.equal(published, masters)
    assert (published - masters).norm() < 0.5 * masters.norm()  # nothing was trained to round well in four steps


def test_experts_kept_in_mxfp4_answer_like_expanded_ones(run: tuple[TrainConfig, Path]) -> None:
    found, expected = (
        logits(load_sharded_weights(run[1] / "model", precision=p, dtype=torch.float32, device="cpu").model)
        for p in ("mxfp4", "fp32")
    )
    assert torch.equal(found, expected)


def test_names_files_and_texts_are_those_of_the_published_form(run: tuple[TrainConfig, Path]) -> None:
    config, out = run
    root = out / "model"
    assert read_spec(root) == config.spec()
    checkpoint = Checkpoint.open(root)
    assert checkpoint.index is not None
    expert = checkpoint.tensor("language_model.model.layers.1.block_sparse_moe.experts.3.w2.weight_packed")
    assert (expert.dtype, expert.shape) == ("U8", (32, 32))
    bias = checkpoint.tensor("language_model.model.layers.1.block_sparse_moe.gate.e_score_correction_bias")
    assert bias.dtype == "F32"
    tokenizer = read_tokenizer(root, config.spec())
    assert tokenizer.decode(tokenizer.encode("a red circle")) == "a red circle"
    generation = json.loads((root / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.markers.end_of_msg
    assert generation["thinking"] is config.thinking is False
    origin = json.loads((root / "origin.json").read_text())
    assert origin["weights"] == "trained"
    assert origin["steps"] == 4
    curve = [json.loads(line) for line in (root / "curve.jsonl").read_text().splitlines()]
    assert [record["step"] for record in curve] == [0, 1, 2, 3]
    assert "trained from scratch" in (root / "README.md").read_text()


def test_an_export_replaces_an_earlier_one_and_nothing_else(run: tuple[TrainConfig, Path], tmp_path: Path) -> None:
    config, out = run
    target = tmp_path / "model"
    export_run(config, out, target)
    (target / "stale.txt").write_text("of the export before")
    export_run(config, out, target)
    assert not (target / "stale.txt").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("precious")
    with pytest.raises(CheckpointError, match="not an earlier export"):
        export_run(config, out, tmp_path / "other")
    with pytest.raises(CheckpointError, match="nothing to export"):
        export_run(config, tmp_path, tmp_path / "model-2")
