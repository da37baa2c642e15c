"""An architecture nobody knows: what is told of it, with what confidence, and what it is closest to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from workbench.checkpoint import inspect_unknown
from workbench.checkpoint.roles import Sizes, guess_role, read_sizes
from workbench.cli import main

D, V, E, F, HEADS, KV, DIM = 60, 269, 7, 34, 6, 2, 10
CONFIG: dict[str, Any] = {
    "architectures": ["WhirlForCausalLM"],
    "model_type": "whirl",
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": 4,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "num_local_experts": E,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "vocab_size": V,
    "torch_dtype": "float16",
    "whirl_rank": 3,
}


def shapes() -> dict[str, tuple[int, ...]]:
    """Mixtral's names, one unknown tensor in the last layer, and a twist in the first."""
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (V, D),
        "model.norm.weight": (D,),
        "lm_head.weight": (V, D),
    }
    for i in range(4):
        at = f"model.layers.{i}."
        found |= {f"{at}{x}_layernorm.weight": (D,) for x in ("input", "post_attention")}
        rows = {"q": HEADS * DIM, "k": KV * DIM, "v": KV * DIM}
        found |= {f"{at}self_attn.{x}_proj.weight": (n, D) for x, n in rows.items()}
        found[f"{at}self_attn.o_proj.weight"] = (D, HEADS * DIM)
        found[f"{at}block_sparse_moe.gate.weight"] = (E, D)
        for e in range(E):
            found |= {f"{at}block_sparse_moe.experts.{e}.{x}.weight": (F, D) for x in ("w1", "w3")}
            found[f"{at}block_sparse_moe.experts.{e}.w2.weight"] = (D, F)
    found["model.layers.3.self_attn.whirl"] = (3, 5)
    return found


@pytest.fixture
def whirl(tmp_path: Path) -> Path:
    save_file({name: np.zeros(shape, np.float16) for name, shape in shapes().items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_unknown_model_is_described_and_told_apart_from_its_nearest_family(whirl: Path) -> None:
    report = inspect_unknown(whirl)
    assert "no family recognises this config" in report.why
    assert report.num_params == sum(int(np.prod(shape)) for shape in shapes().values())
    assert report.num_bytes == 2 * report.num_params
    assert report.attention == ("grouped-query",)
    assert (report.experts_in_names, report.sizes.num_experts) == (E, E)
    best = report.nearest[0]
    assert best.family == "mixtral"
    assert best.refusal is None
    assert best.only_in_files == ("model.layers.*.self_attn.whirl",)
    assert best.only_in_family == ()
    assert dict(report.unknown_keys) == {"whirl_rank": 3}
    assert any("whirl" in line for line in report.missing)
    assert not any("grouped-query attention" in line for line in report.missing), "that block is there"


def test_layers_that_weigh_the_same_stand_in_one_row(whirl: Path) -> None:
    profile = inspect_unknown(whirl).layer_bytes
    assert [(layers, count) for layers, count, _ in profile] == [("model 0..2", 3), ("model 3..3", 1)]
    assert profile[1][2] - profile[0][2] == 2 * 15  # the unknown tensor


@pytest.mark.parametrize(
    ("name", "shape", "role", "confidence"),
    [
        ("model.embed_tokens.weight", (V, D), "embedding", 0.95),
        ("model.embed_tokens.weight", (D, V), "embedding", 0.3),
        ("model.embed_tokens.weight", None, "embedding", 0.7),
        ("thing.table", (V, D), "embedding or head", 0.5),
        ("thing.row", (D,), "norm", 0.5),
        ("thing.other", (3, 5), "?", 0.0),
        ("model.layers.*.mlp.gate.weight", (E, D), "router", 0.95),
        ("model.layers.*.mlp.gate_proj.weight", (F, D), "feed-forward in", 0.95),
        ("model.layers.*.mlp.gate.weight", (F, D), "router", 0.3),
        ("model.layers.*.mlp.experts.*.down_proj.weight_scale_inv", (1, 1), "scale", 0.7),
        ("model.layers.*.self_attn.kv_a_proj_with_mqa.weight", (36, D), "latent attention", 0.7),
        ("model.layers.*.linear_attn.A_log", (6,), "linear recurrence", 0.7),
        ("model.layers.*.self_attn.sinks", (HEADS,), "attention sinks", 0.95),
        ("model.layers.*.self_attn.q_proj.bias", (60,), "attention q", 0.7),
        ("model.layers.*.self_attn.indexer.wq_b.weight", (9, 9), "indexer", 0.7),
        ("vision_tower.blocks.*.norm0.weight", (D,), "vision tower", 0.7),
        ("mtp.0.enorm.weight", (D,), "draft layer", 0.7),
    ],
)
def test_roles_are_guessed_with_the_confidence_they_deserve(
    name: str, shape: tuple[int, ...] | None, role: str, confidence: float
) -> None:
    guess = guess_role(name, shape, read_sizes(CONFIG))
    assert (guess.role, guess.confidence) == (role, confidence), guess.reason


def test_sizes_are_found_under_other_spellings_and_inside_other_objects() -> None:
    sizes = read_sizes({"vision_config": {"hidden_size": 9}, "text_config": {"d_model": 12, "n_routed_experts": 3}})
    assert sizes == Sizes(hidden_size=12, num_experts=3)


def test_a_bare_config_and_an_index_alone_are_enough(whirl: Path) -> None:
    bare = inspect_unknown(whirl / "config.json")
    assert bare.kinds == ()
    assert bare.nearest[0].family in ("llama", "mixtral")
    (whirl / "model.safetensors").unlink()
    weight_map = dict.fromkeys(shapes(), "model-00001-of-00001.safetensors")
    (whirl / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    report = inspect_unknown(whirl)
    assert report.nearest[0].family == "mixtral"
    assert {kind.guess.confidence for kind in report.kinds} <= {0.7, 0.0}  # no shapes to check
    assert report.experts_in_names == E


def test_a_file_that_cannot_be_read_is_listed_and_does_not_stop_the_report(whirl: Path) -> None:
    (whirl / "other.safetensors").write_bytes(b"\xff" * 20)
    report = inspect_unknown(whirl)
    assert [file for file, _ in report.unreadable] == ["other.safetensors"]
    assert "other.safetensors" in report.render()


def test_command_prints_the_guesses_and_answers_no(whirl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(whirl)]) == 1
    printed = capsys.readouterr().out
    assert "nearest known family: mixtral" in printed
    assert "whirl_rank" in printed
    assert main(["inspect", "--json", str(whirl)]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["known"] is False
    assert record["nearest"][0]["family"] == "mixtral"


def test_a_known_family_with_a_setting_it_cannot_read_is_described_as_well(
    whirl: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = CONFIG | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_act": "gelu"}
    (whirl / "config.json").write_text(json.dumps(config))
    assert main(["inspect", str(whirl)]) == 1
    assert "hidden_act" in capsys.readouterr().out
