"""Precision maps: which rule decides, what is refused, and a model held by one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from nn_tiny import tiny_spec

from workbench.base import ConfigError, LoadError
from workbench.nn.model import Model
from workbench.nn.precision import Precision
from workbench.nn.precision_map import PrecisionMap, is_quantisable, read_precision_map


def test_the_last_rule_that_matches_decides() -> None:
    mixed = PrecisionMap(default="fp8", rules=(("layers.*.ffn.*", "int8"), ("layers.3.ffn.experts.*", "bf16")))
    assert mixed.name_of("layers.1.ffn.experts.w1.weight") == "int8"
    assert mixed.name_of("layers.3.ffn.experts.w1.weight") == "bf16"
    assert mixed.name_of("layers.3.mixer.q_proj.weight") == "fp8"
    assert mixed.scheme_of("layers.3.ffn.experts.w1.weight") is None


@pytest.mark.parametrize(
    "param",
    ["embed.weight", "head.weight", "layers.1.ffn.router.weight", "layers.1.ffn.latent_in.weight",
     "layers.0.mixer.kv_b_proj.weight", "layers.0.mixer.f_a_proj.weight", "layers.0.mixer.q_conv.weight"],
)  # fmt: skip
def test_what_must_stay_plain_does(param: str) -> None:
    assert not is_quantisable(param)
    assert PrecisionMap(default="int4").name_of(param) == "bf16"


def test_rules_that_name_nothing_are_told() -> None:
    mixed = PrecisionMap(rules=(("layers.*.mixer.o_proj.weight", "fp8"), ("layer.0.*", "int8"), ("embed.*", "fp8")))
    assert mixed.unused(["layers.0.mixer.o_proj.weight", "embed.weight"]) == ("layer.0.*", "embed.*")


def test_a_map_survives_its_file(tmp_path: Path) -> None:
    mixed = PrecisionMap(default="int8", rules=(("layers.0.*", "fp8"),))
    mixed.save(tmp_path / "map.json")
    assert read_precision_map(tmp_path / "map.json") == mixed


@pytest.mark.parametrize(
    "record",
    [[], {}, {"format": "workbench-precision-map", "version": 2}, {"default": "fp9"}, {"rules": "fp8"}, {"default": 3},
     {"rules": [{"match": "x"}]}, {"rules": [["x", "fp8"]]}, {"rules": [{"match": "x", "scheme": "nf4"}]}],
)  # fmt: skip
def test_what_is_no_map_is_refused(record: object, tmp_path: Path) -> None:
    if isinstance(record, dict) and record and "format" not in record:
        record = {"format": "workbench-precision-map", "version": 1, **record}
    (tmp_path / "map.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError):
        read_precision_map(tmp_path / "map.json")
    with pytest.raises(ConfigError):
        Precision.parse(str(tmp_path / "map.json"))


def test_a_missing_file_and_a_wrong_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Precision.parse(str(tmp_path / "none.json"))
    with pytest.raises(LoadError, match="json map"):
        Precision.parse("int3")


def test_a_model_is_held_as_its_map_says(tmp_path: Path) -> None:
    PrecisionMap(default="fp8", rules=(("layers.0.*", "bf16"),)).save(tmp_path / "map.json")
    with torch.device("meta"):
        model = Model(tiny_spec(), precision=str(tmp_path / "map.json"))
    first, second = model.layers["0"].mixer, model.layers["1"].mixer
    assert first.o_proj.scheme is None
    assert first.o_proj.weight.dtype is torch.bfloat16
    assert second.o_proj.scheme is not None
    assert second.o_proj.scheme.name == "fp8"
    assert second.o_proj.weight_packed.is_meta
    assert "weight" not in dict(second.o_proj.named_parameters())
    assert model.layers["1"].ffn.router.weight.dtype is torch.bfloat16
