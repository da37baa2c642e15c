"""The example scenes are what their script draws, held out from training, with the questions written beside them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from workbench.training.data import draw_scene, picture_exam, split_of

DATA = Path(__file__).resolve().parents[2] / "data"
SCENES = DATA / "scenes"


def differing(found: Path, expected: Path) -> list[str]:
    names = {path.name for path in [*found.iterdir(), *expected.iterdir()]}
    return sorted(name for name in names if not same(found / name, expected / name))


def same(a: Path, b: Path) -> bool:
    if not (a.is_file() and b.is_file()):
        return False
    if a.suffix != ".png":
        return a.read_bytes() == b.read_bytes()
    with Image.open(a) as left, Image.open(b) as right:  # the compressed form depends on Pillow's zlib
        return left.mode == right.mode and np.array_equal(np.asarray(left), np.asarray(right))


def test_script_draws_the_committed_scenes_and_writes_their_questions(tmp_path: Path) -> None:
    subprocess.run([sys.executable, DATA / "make_scenes.py", "--out", tmp_path], check=True, timeout=120)
    assert differing(tmp_path, SCENES) == []
    (tmp_path / "questions.json").write_text("[]")
    (tmp_path / "word.png").unlink()
    assert differing(tmp_path, SCENES) == ["questions.json", "word.png"]


def test_every_question_has_its_picture_and_was_never_trained_on() -> None:
    records = json.loads((SCENES / "questions.json").read_text())
    assert {record["picture"] for record in records} == {path.name for path in SCENES.glob("*.png")}
    for record in records:
        with Image.open(SCENES / record["picture"]) as picture:
            pixels = np.asarray(picture)
        items = picture_exam(60, seed=5, kinds=[Path(record["picture"]).stem])  # type: ignore[list-item]
        shown = [item for item in items if item.scene and np.array_equal(draw_scene(item.scene), pixels)]
        assert [item.text for item in shown] == [record["question"]]
        assert [shown[0].answer, *shown[0].accepted] == record["answers"]
        assert shown[0].scene is not None
        assert split_of(shown[0].scene) == "held_out"
