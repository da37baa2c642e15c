"""Configs that nobody vouches for: whatever stands in them, the answer is a spec or one of our own errors."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workbench.base import ConfigError, WorkbenchError
from workbench.checkpoint import k3_config, preprocessor_config
from workbench.spec import count_model, parse_config, read_json, read_spec

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, 1, -1, 2**31, 2**40, 2**63, 10**30, 10**400]),
    st.floats(),
    st.text(max_size=5),
)
VALUES = st.recursive(SCALARS, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=4), x, max_size=3))


def paths(value: object, here: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """Every place inside a config, from the outermost keys to single list entries."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in items for place in [(*here, key), *paths(inner, (*here, key))]]


def replaced(config: dict[str, object], place: tuple[object, ...], value: object) -> dict[str, object]:
    config = copy.deepcopy(config)
    target: Any = config
    for key in place[:-1]:
        target = target[key]
    if value is ...:
        del target[place[-1]]
    else:
        target[place[-1]] = value
    return config


CONFIG, IMAGE = k3_config(), preprocessor_config()


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(paths(CONFIG)), VALUES | st.just(...))
def test_config_with_any_value_anywhere_parses_or_is_refused(place: tuple[object, ...], value: object) -> None:
    try:
        spec = parse_config(replaced(CONFIG, place, value), IMAGE)
    except WorkbenchError:
        return
    assert spec.num_layers == 8


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(paths(IMAGE)), VALUES | st.just(...))
def test_image_config_with_any_value_anywhere_parses_or_is_refused(place: tuple[object, ...], value: object) -> None:
    try:
        spec = parse_config(CONFIG, replaced(IMAGE, place, value))
    except WorkbenchError:
        return
    assert spec.image is not None


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(["model_type", "architectures", "text_config", "vision_config"]), VALUES))
def test_any_object_is_no_k3_config_or_refused(config: dict[str, object]) -> None:
    with pytest.raises(WorkbenchError):
        parse_config(config)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60) | VALUES.map(lambda v: json.dumps(v).encode()))
def test_any_bytes_as_config_file_are_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "config.json").write_bytes(raw)
    with pytest.raises(WorkbenchError):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_hidden_layers", 2**39), ("num_experts", 2**39), ("num_experts", 2**16), ("num_hidden_layers", 10**30)],
)
def test_sizes_that_would_fill_memory_are_refused_before_any_list_is_made(key: str, value: int) -> None:
    config = replaced(CONFIG, ("text_config", key), value)
    if key == "num_experts" and value == 2**16:  # sound alone, too many with this many layers
        config = replaced(config, ("text_config", "num_hidden_layers"), 17)
        linear = {**config["text_config"]["linear_attn_config"], "kda_layers": [], "full_attn_layers": [*range(1, 18)]}
        config = replaced(config, ("text_config", "linear_attn_config"), linear)
    with pytest.raises(ConfigError, match=r"num_hidden_layers|num_experts|experts"):
        parse_config(config)


def test_huge_but_allowed_widths_are_counted_exactly() -> None:
    config = replaced(CONFIG, ("text_config", "intermediate_size"), 2**40)
    assert count_model(parse_config(config)).params_by_role["dense_ffn"] == 3 * 2**40 * 128


@pytest.mark.parametrize(
    "raw", [b'{"a": 1, "a": 2}', b'{"a": ' + b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}", b"[]"]
)
def test_json_that_is_ambiguous_deep_or_of_another_form_is_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "config.json").write_bytes(raw)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_json(tmp_path / "config.json")


def test_deeply_nested_value_does_not_break_the_message_about_it() -> None:
    deep: object = 1
    for _ in range(900):
        deep = [deep]
    for place in (("text_config", "hidden_size"), ("text_config", "hidden_act"), ("text_config", "vision")):
        config = copy.deepcopy(CONFIG)
        config["text_config"][place[1]] = deep  # type: ignore[index]
        if place[1] == "vision":
            assert parse_config(config).unknown_keys[0][0] == "text_config.vision"
        else:
            with pytest.raises(ConfigError, match=place[1]):
                parse_config(config)


def test_a_pipe_in_place_of_the_config_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="not a regular file"):
        read_spec(tmp_path)
