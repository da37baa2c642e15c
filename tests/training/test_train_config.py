"""Recipes: the two that ship are sound and within their size, and a wrong key is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_runs import recipe_text, tiny_config, write_recipe

from workbench.base import ConfigError, LayoutError
from workbench.spec import KDASpec, MLASpec, count_model
from workbench.training.config import read_config
from workbench.training.data.tokenizer import VOCAB_SIZE

RECIPES = Path(__file__).resolve().parents[2] / "data" / "train"


@pytest.mark.parametrize(("name", "most_bytes"), [("k3-nano", 16e6), ("k3-nano-draft", 2e6)])
def test_the_shipped_recipes_have_all_of_k3s_structure_within_their_size(name: str, most_bytes: float) -> None:
    config = read_config(RECIPES / f"{name}.toml")
    spec = config.spec()
    assert config.name == name
    assert count_model(spec).weight_bytes < 0.95 * most_bytes  # index and tokenizer come on top
    assert spec.vocab_size == VOCAB_SIZE
    assert [isinstance(layer.mixer, MLASpec) for layer in spec.layers[-2:]] == [True, True]
    assert any(isinstance(layer.mixer, KDASpec) for layer in spec.layers)
    assert spec.vision is not None
    assert spec.residual is not None
    assert spec.residual.block_size < spec.num_layers
    assert config.run.layout.dp == 2


def test_the_main_recipe_has_at_least_sixteen_experts_and_shared_ones() -> None:
    moe = [layer.ffn for layer in read_config(RECIPES / "k3-nano.toml").spec().layers if layer.is_moe]
    assert {(x.num_experts >= 16, x.num_shared >= 1) for x in moe} == {(True, True)}  # type: ignore[union-attr]


def test_both_recipes_share_a_tokenizer() -> None:
    """The draft proposes ids that the model checks: they must mean the same."""
    sizes = [read_config(RECIPES / f"{name}.toml").sizes["vocab_size"] for name in ("k3-nano", "k3-nano-draft")]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("steps = 6", "step = 6", "unknown keys.*step"),
        ("steps = 6", "", "keys are missing.*no steps"),
        ("steps = 6", "steps = 6.5", "steps has the wrong type.*6.5.*int"),
        ("steps = 6", "steps = true", "steps has the wrong type"),
        ("hidden_size = 48", "", "sizes are missing.*no hidden_size"),
        ("hidden_size = 48", 'hidden_size = "48"', "hidden_size has the wrong type"),
        ("num_experts = 8", "num_expert = 8", "num_expert"),
        ("qat_start = 0.5", "qat_start = 1.5", r"qat_start lies in \[0, 1\]"),
        ('layout = "tp1"', 'layout = "xp1"', "not readable"),
        ('layout = "tp1"', 'layout = "dp3"', "same number of micro-batches"),
        ("warmup_steps = 2", "warmup_steps = 6", "warmup_steps"),
        ("adam_lr = 0.002", "adam_lr = 0.0", "adam_lr is positive"),
        ("exam_per_kind = 1", "exam_per_kind = 1\n[mixture]\npicture = 0.9", "do not sum to one"),
        ("seed = 7", "seed = 7\nmodel = 3", "cannot be read|not a table"),
    ],
)
def test_a_wrong_recipe_is_refused_with_the_key_that_is_wrong(
    before: str, after: str, message: str, tmp_path: Path
) -> None:
    text = recipe_text()
    assert before in text
    path = tmp_path / "recipe.toml"
    path.write_text(text.replace(before, after))
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        read_config(path)


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path / "nowhere.toml")


def test_muon_and_tensor_parallelism_do_not_go_together() -> None:
    config = tiny_config(layout="tp2", muon_lr=1e-3)
    with pytest.raises(LayoutError, match="whole matrices"):
        config.spec()
    assert tiny_config(layout="tp2").spec().num_layers == 4


def test_only_what_decides_the_result_is_essence(tmp_path: Path) -> None:
    base = read_config(write_recipe(tmp_path))
    assert read_config(write_recipe(tmp_path, layout="dp2", checkpoint_steps=5)).essence == base.essence
    assert read_config(write_recipe(tmp_path, steps=7)).essence != base.essence
    assert read_config(write_recipe(tmp_path, muon_lr=0.01)).essence != base.essence
    assert base.tokens_per_step == 640
    assert base.qat_first_step == 3
