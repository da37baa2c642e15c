"""The walk of docs/adding-a-family.md, with the code that stands there: one new file, and the model is known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from workbench.base import UnsupportedModelError
from workbench.checkpoint import audit, inspect_checkpoint, inspect_unknown
from workbench.placement import Layout, owned_shards
from workbench.spec import count_model, families, missing_blocks, parse_config, published_tensors, require_runnable
from workbench.spec.families import known_families

DOC = Path(__file__).resolve().parents[2] / "docs" / "adding-a-family.md"
CONFIG: dict[str, Any] = {
    "architectures": ["ToyMoeForCausalLM"],
    "model_type": "toy_moe",
    "d_model": 48,
    "n_layer": 3,
    "n_head": 4,
    "n_expert": 6,
    "n_expert_used": 2,
    "ffn_width": 40,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "vocab_size": 96,
    "torch_dtype": "float16",
    "toy_temperature": 0.7,
}


def toy_source() -> str:
    text = DOC.read_text()
    begin, end = text.index("<!-- toy family: begin -->"), text.index("<!-- toy family: end -->")
    return text[begin:end].partition("```python\n")[2].rpartition("```")[0]


@pytest.fixture
def toy(tmp_path: Path) -> Iterator[None]:
    """The file of the walk, in a folder that the package of families also looks into."""
    folder = tmp_path / "more_families"
    folder.mkdir()
    (folder / "toy_moe.py").write_text(toy_source())
    families.__path__.append(str(folder))
    yield
    families.__path__.remove(str(folder))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Tensors named as the toy family names them, written without it."""
    d, f, e, v = 48, 40, 6, 96
    rng = np.random.default_rng(5)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (v, d),
        "lm_head.weight": (v, d),
        "model.norm.weight": (d,),
    }
    for i in range(3):
        at = f"model.layers.{i}."
        shapes |= {f"{at}{x}_layernorm.weight": (d,) for x in ("input", "post_attention")}
        shapes |= {f"{at}self_attn.{x}_proj.weight": (d, d) for x in "qkvo"}
        ffns = ["mlp"] if i % 2 == 0 else ["moe.shared", *(f"moe.experts.{k}" for k in range(e))]
        for ffn in ffns:
            shapes |= {f"{at}{ffn}.{x}_proj.weight": (f, d) for x in ("gate", "up")}
            shapes[f"{at}{ffn}.down_proj.weight"] = (d, f)
        if i % 2:
            shapes[f"{at}moe.gate.weight"] = (e, d)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file({n: rng.standard_normal(s).astype(np.float16) for n, s in shapes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_without_the_file_the_model_is_unknown() -> None:
    with pytest.raises(UnsupportedModelError, match=r"no family recognises this config.*toy_moe"):
        parse_config(CONFIG)


def test_with_the_file_the_model_is_known_and_every_room_can_use_it(toy: None, checkpoint: Path) -> None:
    assert "toy_moe" in {family.FAMILY for family in known_families()}
    spec = parse_config(CONFIG)
    assert [layer.kind for layer in spec.layers] == ["GQA+dense", "GQA+MoE", "GQA+dense"]
    assert spec.unknown_keys == (("toy_temperature", 0.7),)
    counts = count_model(spec)
    assert counts.num_params == sum(int(np.prod(t.shape)) for t in published_tensors(spec))
    assert counts.num_params == 2 * 96 * 48 + 48 + 3 * (2 * 48 + 4 * 48 * 48) + (2 + 1 + 6) * 3 * 40 * 48 + 6 * 48
    report = audit(checkpoint)
    assert report.ok, report.render()
    assert inspect_checkpoint(checkpoint).counts == counts
    held = [sum(shard.num_bytes for shard in owned_shards(spec, Layout(tp=2, ep=2), rank)) for rank in range(2)]
    assert held[0] == held[1] < counts.weight_bytes


def test_it_runs_where_its_blocks_exist_and_is_refused_for_one_that_does_not(toy: None, checkpoint: Path) -> None:
    pytest.importorskip("torch")
    from workbench.loading import load_sharded_weights
    from workbench.nn import TokenBatch

    spec = parse_config(CONFIG)
    assert missing_blocks(spec) == ()
    require_runnable(spec)
    model = load_sharded_weights(checkpoint, precision="fp32", device="cpu").model
    logits = model(TokenBatch.whole([[5, 3, 7]], all_logits=True))
    assert logits.shape == (3, 96)
    assert logits.isfinite().all()
    scaled = [replace(layer, mixer=replace(layer.mixer, value_scale=0.7)) for layer in spec.layers]
    with pytest.raises(UnsupportedModelError, match="grouped-query attention: value scale"):
        require_runnable(replace(spec, layers=tuple(scaled)))


def test_before_the_file_is_written_inspect_says_what_it_has_to_say(checkpoint: Path) -> None:
    report = inspect_unknown(checkpoint)
    roles = {kind.name: kind.guess.role for kind in report.kinds}
    assert roles["model.layers.*.moe.experts.*.up_proj.weight"] == "routed expert"
    assert roles["model.layers.*.moe.gate.weight"] == "router"
    assert report.experts_in_names == 6
    assert report.attention == ("multi-head",)
    assert any("spec/families" in line for line in report.missing)
