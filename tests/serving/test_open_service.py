"""What a checkpoint's folder says about how it is served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from workbench.base import ConfigError
from workbench.serving.open import thinks_first


@pytest.mark.parametrize(
    ("content", "expected"), [(None, False), ({}, False), ({"thinking": False}, False), ({"thinking": True}, True)]
)
def test_a_folder_says_whether_its_model_thinks_first(content: object, expected: bool, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert thinks_first(tmp_path) is expected


@pytest.mark.parametrize("text", ['{"thinking": "yes"}', '{"thinking": 1}', "[]", "{"])
def test_anything_else_is_refused_by_name(text: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        thinks_first(tmp_path)
