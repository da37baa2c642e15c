"""A recipe small enough to train in a test, its tokenizer, and fixed packs of it."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path

from workbench.serving.inputs import Tokenizer
from workbench.serving.inputs.tokenizer_files import read_tokenizer_json
from workbench.training.config import TrainConfig, read_config
from workbench.training.data.domain import read_facts
from workbench.training.data.samples import PackedBatch, SampleStream
from workbench.training.data.tokenizer import corpus_lines, train_tokenizer, write_tokenizer

__all__ = [
    "give_tokenizer",
    "make_packs",
    "recipe_text",
    "tiny_config",
    "tiny_tokenizer",
    "tokenizer_folder",
    "write_recipe",
]

RECIPE = """\
name = "tiny"
seed = 7
steps = {steps}
pack_tokens = 320
micro_batches = 2
qat_start = {qat_start}
balance_rate = 0.01

[model]
num_layers = 4
full_attn_layers = [3, 4]
num_dense_layers = 1
residual_block = 3
hidden_size = 48
vocab_size = 1024
max_context = 512
dense_width = 80
kda_heads = 4
kda_head_dim = 16
conv_size = 4
mla_heads = 4
q_rank = 40
kv_rank = 24
nope_dim = 12
rope_dim = 4
v_dim = 12
num_experts = 8
top_k = 2
expert_width = 64
latent_dim = 32
num_shared = 1
vision_layers = 1
vision_heads = {vision_heads}
vision_width = 24
vision_qkv_width = 48
vision_ffn_width = 56
grid_height = 6
grid_width = 8

[optimiser]
adam_lr = {adam_lr}
muon_lr = {muon_lr}
warmup_steps = 2
eps = 1e-5

[run]
layout = "{layout}"
checkpoint_steps = {checkpoint_steps}
exam_steps = {exam_steps}
exam_tokens = 12
exam_per_kind = 1
"""
DEFAULTS = {
    "steps": 6,
    "qat_start": 0.5,
    "vision_heads": 2,
    "adam_lr": 2e-3,
    "muon_lr": 0.0,
    "layout": "tp1",
    "checkpoint_steps": 2,
    "exam_steps": 0,
}


def recipe_text(**changes: object) -> str:
    return RECIPE.format(**{**DEFAULTS, **changes})


def write_recipe(folder: Path, **changes: object) -> Path:
    path = folder / "recipe-in.toml"
    path.write_text(recipe_text(**changes))
    return path


@lru_cache(maxsize=16)
def _config(text: str) -> TrainConfig:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.toml"
        path.write_text(text)
        return read_config(path)


def tiny_config(**changes: object) -> TrainConfig:
    return _config(recipe_text(**changes))


def give_tokenizer(out: Path) -> None:
    """The tokenizer that a run in `out` would make, without the seconds that takes."""
    out.mkdir(parents=True, exist_ok=True)
    shutil.copytree(tokenizer_folder(), out / "tokenizer")


@lru_cache(maxsize=1)
def tokenizer_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tiny-tokenizer-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_tokenizer(train_tokenizer(corpus_lines(read_facts()), 1024), folder)
    return folder


def tiny_tokenizer() -> Tokenizer:
    return Tokenizer(read_tokenizer_json(tokenizer_folder() / "tokenizer.json"))


def make_packs(number: int, *, token_budget: int = 320) -> list[PackedBatch]:
    stream = SampleStream(tiny_tokenizer(), read_facts(), seed=7)
    return [stream.pack(0, micro, token_budget=token_budget) for micro in range(number)]
