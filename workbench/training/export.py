"""A trained run as a checkpoint in the published K3 layout: the same names, types and files as the released model.

Needs no processes: pieces of all ranks are joined from the last saved state. Experts are encoded in MXFP4 by the same
rule that training saw, plain weights in bf16, so that a run which ended in its quantised phase exports exactly what it
computed with.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from workbench.base import CheckpointError, human
from workbench.checkpoint import encode_array, preprocessor_config, write_index, write_shard
from workbench.placement import Layout
from workbench.spec import ModelSpec, TensorSpec, count_model, published_tensors
from workbench.training.checkpointing import SavedState, load_rank_state, newest_state
from workbench.training.config import TrainConfig
from workbench.training.metrics import read_metrics
from workbench.training.quantise import encode_expert
from workbench.training.sharding import join_parameters

__all__ = ["export_run", "load_whole", "write_published"]


def export_run(config: TrainConfig, out: Path | str, target: Path | str) -> Path:
    """Export the newest state of the run in `out` into the folder `target`, which is replaced as a whole.

    Raises CheckpointError where the run has no sound state or `target` holds anything but an earlier export.
    """
    out, target = Path(out), Path(target)
    state = newest_state(out / "states", essence=config.essence, layout=None)
    if state is None:
        raise CheckpointError("nothing to export: no saved state", where=out)
    if target.exists() and not (target / "config.json").is_file():
        raise CheckpointError("not an earlier export, and not overwritten", where=target)
    fresh = target.with_name(target.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    write_published(config, load_whole(config.spec(), state), fresh)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(out / "tokenizer" / name, fresh / name)
    _write_origin(config, state, out, fresh)
    if target.exists():
        shutil.rmtree(target)
    os.replace(fresh, target)
    return target


def load_whole(spec: ModelSpec, state: SavedState) -> dict[str, Tensor]:
    """All parameters of a saved state by name, whole and in float32, whatever layout it was trained in."""
    layout = Layout.parse(state.layout)
    pieces = []
    for rank in range(layout.world_size):
        content = load_rank_state(state, rank)
        pieces.append({**content["masters"], **content["biases"]})
    return join_parameters(spec, layout, pieces)


def write_published(config: TrainConfig, parameters: Mapping[str, Tensor], root: Path) -> None:
    """Weights, index and configs into an empty folder; `parameters` are whole, by canonical name."""
    spec = config.spec()
    groups: dict[object, list[TensorSpec]] = {}
    for tensor in published_tensors(spec):
        edge = tensor.role if tensor.role in ("projector", "vision") else "edge"
        groups.setdefault(edge if tensor.layer is None else tensor.layer, []).append(tensor)
    index: dict[str, str] = {}
    total = 0
    for number, group in enumerate(groups.values(), start=1):
        file = f"model-{number:05d}-of-{len(groups):06d}.safetensors"
        data = _Encoder(parameters)
        total += write_shard(root / file, group, data)
        index |= {tensor.name: file for tensor in group}
    write_index(root, index, total)
    generation = {"max_length": spec.max_context, "eos_token_id": spec.tokens.eos, "thinking": config.thinking}
    for name, record in (
        ("config.json", config.model_config()),
        ("preprocessor_config.json", preprocessor_config()),
        ("generation_config.json", generation),
    ):
        (root / name).write_text(json.dumps(record, indent=2) + "\n")


class _Encoder:
    """Bytes of a published tensor from the parameter that it fills; a stack of experts is encoded once."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._encoded: dict[str, dict[str, Tensor]] = {}

    def __call__(self, tensor: TensorSpec) -> bytes:
        values = self._parameters[tensor.param]
        if tensor.part != "weight":
            if tensor.param not in self._encoded:
                self._encoded[tensor.param] = encode_expert(values)
            values = self._encoded[tensor.param][tensor.part]
        if tensor.expert is not None:
            values = values[tensor.expert]
        array = values.detach().cpu().numpy()
        if tensor.used_rows is not None:
            array = np.pad(array, [(0, tensor.shape[0] - tensor.used_rows)] + [(0, 0)] * (array.ndim - 1))
        assert array.shape == tensor.shape, (tensor.name, array.shape, tensor.shape)
        return encode_array(array, tensor.dtype)


def _write_origin(config: TrainConfig, state: SavedState, out: Path, root: Path) -> None:
    """`origin.json` for programs, README.md for people, and the run's recipe and curve."""
    steps = [r for r in read_metrics(out / "metrics.jsonl", "step") if r["step"] < state.step]
    exams = [r for r in read_metrics(out / "metrics.jsonl", "exam") if r["step"] < state.step]
    lesson = [r for r in read_metrics(out / "metrics.jsonl", "tower") if r["step"] < state.step][-1:]
    lesson_seconds = lesson[0]["seconds"] if lesson else 0.0
    record = {
        "weights": "trained",
        "recipe": config.name,
        "seed": config.seed,
        "steps": state.step,
        "tokens": sum(r["tokens"] for r in steps),
        "samples": sum(r["samples"] for r in steps),
        "train_seconds": round(sum(r["seconds"] for r in steps) + lesson_seconds, 1),
        "layout": state.layout,
        "torch": torch.__version__,
    }
    (root / "origin.json").write_text(json.dumps(record) + "\n")
    shutil.copyfile(out / "recipe.toml", root / "recipe.toml")
    with (root / "curve.jsonl").open("w") as file:
        for r in steps[:: max(1, len(steps) // 500)]:
            kept = {key: r[key] for key in ("step", "loss", "lr_share", "phase", "load")}
            file.write(json.dumps(kept) + "\n")
        file.writelines(json.dumps({key: r[key] for key in ("step", "scores")}) + "\n" for r in exams)
    num_bytes = sum(path.stat().st_size for path in root.iterdir())
    counts = count_model(config.spec())
    lesson_text = ""
    if lesson:
        lesson_text = (
            f"Before step {lesson[0]['step']:,} the vision tower took a lesson of {config.tower.steps:,} batches of "
            f"{config.tower.batch} labelled pictures ({lesson_seconds:,.0f} s of those seconds).\n"
        )
    (root / "README.md").write_text(
        f"# {config.name}\n\n"
        "A small Kimi K3, trained from scratch by this repository: the published file layout, names and types, every\n"
        "structural part (KDA and gated MLA layers, latent mixture of experts in MXFP4, block attention residuals,\n"
        "vision tower, projector), other sizes.\n\n"
        f"    workbench train data/train/{config.name}.toml --out out/{config.name}\n\n"
        f"{state.step:,} steps, {record['samples']:,} samples, {record['tokens']:,} tokens, "
        f"{record['train_seconds']:,.0f} s of training on layout {state.layout}; {counts.num_params:,} parameters, "
        f"{human(num_bytes, 'B')} on disk.\n{lesson_text}"
        "`recipe.toml` is the recipe with its seed, `curve.jsonl` the loss, expert balance and held-out answers on the "
        "way.\n\n"
        "It answers questions about small drawn scenes (shapes, colours, counts, places, digits, words, bar charts)\n"
        "and about the vocabulary of this project, in English. It knows nothing else.\n"
    )
