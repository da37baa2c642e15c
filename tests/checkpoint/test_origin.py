"""What kind of weights a folder holds, said in words and as a fact."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.checkpoint import ORIGIN_NAME, read_origin

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("content", "is_dummy", "note"),
    [
        ('{"weights": "random"}', True, "random weights: its answers are noise"),
        ('{"weights": "trained"}', False, "trained weights"),
        ("{", True, "weights of unknown origin (unreadable origin.json)"),
        ('{"weights": 3}', True, "weights of unknown origin (unreadable origin.json)"),
        (None, False, "weights as published"),
    ],
)
def test_kind_of_weights_is_said_in_words(tmp_path: Path, content: str | None, is_dummy: bool, note: str) -> None:
    if content is not None:
        (tmp_path / ORIGIN_NAME).write_text(content)
    origin = read_origin(tmp_path)
    assert (origin.is_dummy, origin.note) == (is_dummy, note)


def test_embedded_checkpoint_says_that_it_is_random() -> None:
    origin = read_origin(ROOT / "data" / "k3-tiny")
    assert origin.is_dummy
    assert origin.note.startswith("random")
