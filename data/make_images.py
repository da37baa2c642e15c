"""Draws the example pictures of `data/images`: plain shapes, so that everyone can say what a right answer would be.

    python data/make_images.py [--out data/images]

Sizes are no multiples of the 28-pixel token on purpose, one picture is wider and one taller than a square, and one
has transparent pixels. Shapes are drawn without smoothing, so pixels do not depend on the version of Pillow.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from PIL import Image, ImageDraw

__all__ = ["PICTURES", "draw_pictures"]

WHITE, BLACK, RED, GREEN, BLUE, YELLOW = "#ffffff", "#202020", "#d03030", "#2f8f4e", "#2f5fb8", "#f2c230"


def red_circle() -> Image.Image:
    """A red circle in the middle of a white ground, 160 x 120."""
    picture = Image.new("RGB", (160, 120), WHITE)
    ImageDraw.Draw(picture).ellipse((45, 25, 115, 95), fill=RED)
    return picture


def three_bars() -> Image.Image:
    """Three bars on one line, each taller than the one before, 180 x 150."""
    picture = Image.new("RGB", (180, 150), WHITE)
    pen = ImageDraw.Draw(picture)
    pen.line((15, 130, 165, 130), fill=BLACK, width=2)
    for left, height, colour in ((30, 40, BLUE), (75, 70, GREEN), (120, 105, YELLOW)):
        pen.rectangle((left, 129 - height, left + 29, 128), fill=colour)
    return picture


def house() -> Image.Image:
    """A house with a red roof and a blue door on a green hill, taller than wide, 120 x 170."""
    picture = Image.new("RGB", (120, 170), "#bcdcf2")
    pen = ImageDraw.Draw(picture)
    pen.ellipse((-60, 120, 180, 260), fill=GREEN)
    pen.rectangle((30, 75, 89, 134), fill="#efe6d2")
    pen.polygon([(22, 75), (97, 75), (60, 38)], fill=RED)
    pen.rectangle((52, 102, 67, 134), fill=BLUE)
    pen.ellipse((88, 10, 108, 30), fill=YELLOW)
    return picture


def transparent_triangle() -> Image.Image:
    """A green triangle and a half transparent blue square on nothing at all, RGBA, 130 x 70."""
    picture = Image.new("RGBA", (130, 70), (0, 0, 0, 0))
    pen = ImageDraw.Draw(picture)
    pen.polygon([(12, 60), (62, 60), (37, 10)], fill=GREEN)
    pen.rectangle((75, 15, 119, 59), fill=(0x2F, 0x5F, 0xB8, 128))
    return picture


PICTURES: dict[str, Callable[[], Image.Image]] = {
    "red_circle": red_circle,
    "three_bars": three_bars,
    "house": house,
    "transparent_triangle": transparent_triangle,
}


def draw_pictures(out: Path) -> list[Path]:
    """Writes every picture as `<name>.png` into `out` and returns the paths."""
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, draw in PICTURES.items():
        paths.append(out / f"{name}.png")
        draw().save(paths[-1], optimize=True)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the example pictures.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images")
    for path in draw_pictures(parser.parse_args().out):
        print(f"{path}  {path.stat().st_size} B")


if __name__ == "__main__":
    main()
