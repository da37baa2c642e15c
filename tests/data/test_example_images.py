"""The example pictures are what their script draws, and together they reach the special cases of preprocessing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from workbench.serving.inputs import ImageProcessor
from workbench.spec import read_spec

DATA = Path(__file__).resolve().parents[2] / "data"
PATHS = sorted((DATA / "images").glob("*.png"))


def differing(found: Path, expected: Path) -> list[str]:
    names = {path.name for path in [*found.glob("*.png"), *expected.glob("*.png")]}
    return sorted(name for name in names if not same_picture(found / name, expected / name))


def same_picture(a: Path, b: Path) -> bool:
    # Pixels, not bytes: the compressed form depends on the zlib that Pillow was built with.
    if not (a.is_file() and b.is_file()):
        return False
    with Image.open(a) as left, Image.open(b) as right:
        return left.mode == right.mode and np.array_equal(np.asarray(left), np.asarray(right))


def test_script_draws_the_committed_pictures(tmp_path: Path) -> None:
    subprocess.run([sys.executable, DATA / "make_images.py", "--out", tmp_path], check=True, timeout=60)
    assert differing(tmp_path, DATA / "images") == []
    with Image.open(tmp_path / "red_circle.png") as picture:
        picture.putpixel((0, 0), (255, 255, 254))
        picture.save(tmp_path / "red_circle.png")
    (tmp_path / "house.png").unlink()
    assert differing(tmp_path, DATA / "images") == ["house.png", "red_circle.png"]


def test_one_picture_is_transparent_one_tall_and_one_wide() -> None:
    pictures = {path.stem: Image.open(path) for path in PATHS}
    assert len(pictures) == 4
    assert [name for name, picture in pictures.items() if picture.mode == "RGBA"] == ["transparent_triangle"]
    alpha = np.asarray(pictures["transparent_triangle"])[..., 3]
    assert {0, 128, 255} == set(np.unique(alpha).tolist())
    assert any(picture.height > picture.width for picture in pictures.values())
    assert any(picture.width > picture.height for picture in pictures.values())


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_picture_becomes_a_handful_of_tokens(path: Path) -> None:
    image = read_spec(DATA / "k3-tiny").image
    assert image is not None
    assert 10 <= ImageProcessor(image).process(path).num_tokens <= 50
    assert path.stat().st_size < 2000
