"""Scenes: a recipe says all there is to know about a small picture, and drawing it is a pure function.

A recipe is made from a random generator, so a seed is a picture. Its *content* (figures, label, bars; not the canvas,
the background or the small shifts of drawing) decides whether it belongs to the training or to the held-out side: a
held-out arrangement is never drawn in training, not even shifted by a pixel or on another canvas.

    the 3 x 3 places:   top left      top middle      top right
    (row, column)       middle left   centre          middle right
                        bottom left   bottom middle   bottom right
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeVar, get_args

import numpy as np
from PIL import Image, ImageDraw, ImageFont

__all__ = [
    "BACKGROUNDS",
    "CANVASES",
    "COLOURS",
    "LABEL_PLACES",
    "MAX_BAR_HEIGHT",
    "MAX_FIGURES",
    "PLACES",
    "SCENE_KINDS",
    "SHAPES",
    "SIZES",
    "WORDS",
    "Bar",
    "Figure",
    "Label",
    "Scene",
    "SceneKind",
    "Split",
    "blank_scene",
    "draw_scene",
    "letter_centres",
    "make_scene",
    "scene_image",
    "split_of",
]

T = TypeVar("T")
Split = Literal["train", "held_out"]
SceneKind = Literal["figures", "number", "word", "chart", "empty"]
SCENE_KINDS: tuple[SceneKind, ...] = get_args(SceneKind)

SHAPES = ("circle", "square", "triangle", "diamond", "star", "cross")
SIZES = ("small", "large")
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (212, 32, 36), "green": (30, 140, 58), "blue": (28, 84, 204), "yellow": (238, 200, 0),
    "orange": (246, 126, 16), "purple": (124, 44, 168), "pink": (246, 130, 182), "black": (18, 18, 18),
}  # fmt: skip
BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "white": (255, 255, 255), "cream": (250, 244, 226), "grey": (224, 224, 224), "sky": (220, 236, 250),
}  # fmt: skip
PLACES = (
    ("top left", "top middle", "top right"),
    ("middle left", "centre", "middle right"),
    ("bottom left", "bottom middle", "bottom right"),
)
LABEL_PLACES = ("top", "middle", "bottom")
WORDS = tuple(
    """
    ant apple arm bag ball bear bed bee bird boat book box bread bus cake car cat chair clock cloud coat cow cup desk
    dog door duck egg eye farm fish flag fork fox frog gate goat gold hand hat hill horse house ice jar key king kite
    lake lamp leaf lion map milk moon mouse nest net nose nut owl pan pear pen pig pot queen rain ring road rock roof
    rose salt sand sea seed ship shoe shop sky snow soap sock soup spoon sun table tent tiger train tree van wall wind
    wolf wood zoo
    """.split()  # noqa: SIM905 - a list of a hundred literals reads worse
)
MAX_FIGURES, MAX_BAR_HEIGHT = 5, 5
HELD_OUT_ONE_IN = 10
# (width, height) in pixels with its share. 112 x 112 is 8 x 8 patches of 14, merged to 4 x 4 tokens; the others keep
# the model honest about shape, and 98 is not a multiple of 28, so that one is padded.
CANVASES: dict[tuple[int, int], float] = {(112, 112): 0.7, (84, 112): 0.1, (112, 84): 0.1, (140, 98): 0.1}
_KIND_SHARE: dict[SceneKind, float] = {"figures": 0.6, "number": 0.14, "word": 0.14, "chart": 0.11, "empty": 0.01}
_RADIUS = {"small": (7, 8), "large": (12, 13)}  # pixels, both ends included; the smallest cell is 28 pixels wide
_OVERSAMPLE = 4
_TINT = 8  # largest change of a colour channel


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    shape: str
    colour: str
    size: str
    row: int
    column: int

    @property
    def place(self) -> str:
        return PLACES[self.row][self.column]


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """A word or a number, written in capitals across the middle of a row."""

    text: str
    colour: str
    row: int

    @property
    def is_number(self) -> bool:
        return self.text.isdigit()

    @property
    def place(self) -> str:
        return LABEL_PLACES[self.row]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    colour: str
    height: int  # 1 .. MAX_BAR_HEIGHT, in grid lines


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """One picture. `figures` stand in reading order; `bars` from left to right; a chart holds nothing else.

    `jitter` seeds what drawing varies without changing any answer: shifts, tints, radii, letter height.
    """

    canvas: tuple[int, int]  # width, height in pixels
    background: str
    figures: tuple[Figure, ...] = ()
    label: Label | None = None
    bars: tuple[Bar, ...] = ()
    jitter: int = 0

    def __post_init__(self) -> None:
        places = [(figure.row, figure.column) for figure in self.figures]
        assert places == sorted(set(places)), f"figures share a place or are out of reading order: {places}"
        assert not (self.bars and (self.figures or self.label)), "a chart holds nothing else"
        assert self.label is None or all(row != self.label.row for row, _ in places), "a figure lies on the label"

    @property
    def kind(self) -> SceneKind:
        if self.bars:
            return "chart"
        if self.label:
            return "number" if self.label.is_number else "word"
        return "figures" if self.figures else "empty"

    @property
    def content(self) -> str:
        """What the picture shows, as one canonical line; equal for two drawings of the same arrangement."""
        figures = [[f.shape, f.colour, f.size, f.row, f.column] for f in self.figures]
        label = [self.label.text, self.label.colour, self.label.row] if self.label else None
        return json.dumps([figures, label, [[bar.colour, bar.height] for bar in self.bars]], separators=(",", ":"))


def split_of(scene: Scene) -> Split:
    """Side of a scene, from a hash of its content: one arrangement in ten is held out. Empty scenes train."""
    digest = hashlib.sha256(scene.content.encode()).digest()
    is_held_out = int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0 and scene.kind != "empty"
    return "held_out" if is_held_out else "train"


def blank_scene(like: Scene) -> Scene:
    """The empty picture of the same canvas and background: the control that removes what there is to see."""
    return Scene(canvas=like.canvas, background=like.background)


def make_scene(rng: np.random.Generator, *, split: Split = "train", kind: SceneKind | None = None) -> Scene:
    """Draw recipes until one lies on the wanted side. Raises ValueError for a held-out empty scene: there is none."""
    if kind == "empty" and split == "held_out":
        raise ValueError("every empty scene belongs to the training side")
    while True:
        chosen: SceneKind = _pick(rng, _KIND_SHARE) if kind is None else kind
        scene = _MAKERS[chosen](rng, _pick(rng, CANVASES), _one_of(rng, tuple(BACKGROUNDS)))
        if split_of(scene) == split:
            return scene


def _pick(rng: np.random.Generator, share: dict[T, float]) -> T:
    """A key, with probability as its share; the shares sum to one."""
    mark = rng.random()
    for key, part in share.items():
        mark -= part
        if mark < 0:
            return key
    return key


def _one_of(rng: np.random.Generator, choices: tuple[T, ...]) -> T:
    return choices[rng.integers(len(choices))]


def _make_figures(rng: np.random.Generator, canvas: tuple[int, int], background: str) -> Scene:
    """One to five figures. In half of the scenes they are alike, so that counts of a shape or a colour spread out."""
    count = _pick(rng, {1: 0.2, 2: 0.25, 3: 0.25, 4: 0.18, 5: 0.12})
    places = sorted(rng.permutation(9)[:count].tolist())
    same_shape, same_colour = (0.75, 0.5) if rng.random() < 0.5 else (0.0, 0.0)
    figures: list[Figure] = []
    for place in places:
        is_like_shape, is_like_colour = rng.random() < same_shape, rng.random() < same_colour
        figures.append(
            Figure(
                shape=figures[0].shape if figures and is_like_shape else _one_of(rng, SHAPES),
                colour=figures[0].colour if figures and is_like_colour else _one_of(rng, tuple(COLOURS)),
                size=_one_of(rng, SIZES),
                row=place // 3,
                column=place % 3,
            )
        )
    return Scene(canvas=canvas, background=background, figures=tuple(figures), jitter=_jitter(rng))


def _make_number(rng: np.random.Generator, canvas: tuple[int, int], background: str) -> Scene:
    num_digits = _pick(rng, {1: 0.25, 2: 0.4, 3: 0.35})
    low = 0 if num_digits == 1 else 10 ** (num_digits - 1)
    return _make_label(rng, canvas, background, str(rng.integers(low, 10**num_digits)))


def _make_word(rng: np.random.Generator, canvas: tuple[int, int], background: str) -> Scene:
    return _make_label(rng, canvas, background, _one_of(rng, WORDS))


def _make_label(rng: np.random.Generator, canvas: tuple[int, int], background: str, text: str) -> Scene:
    """A label and, in a third of the scenes, one figure in another row."""
    label = Label(text=text, colour=_one_of(rng, tuple(COLOURS)), row=int(rng.integers(3)))
    figures: tuple[Figure, ...] = ()
    if rng.random() < 1 / 3:
        row = int((label.row + rng.integers(1, 3)) % 3)
        figures = (
            Figure(
                shape=_one_of(rng, SHAPES),
                colour=_one_of(rng, tuple(COLOURS)),
                size=_one_of(rng, SIZES),
                row=row,
                column=int(rng.integers(3)),
            ),
        )
    return Scene(canvas=canvas, background=background, label=label, figures=figures, jitter=_jitter(rng))


def _make_chart(rng: np.random.Generator, canvas: tuple[int, int], background: str) -> Scene:
    names = tuple(COLOURS)
    order = rng.permutation(len(names))[: int(rng.integers(2, 5))]
    bars = tuple(Bar(colour=names[idx], height=int(rng.integers(1, MAX_BAR_HEIGHT + 1))) for idx in order)
    return Scene(canvas=canvas, background=background, bars=bars, jitter=_jitter(rng))


def _make_empty(rng: np.random.Generator, canvas: tuple[int, int], background: str) -> Scene:
    return Scene(canvas=canvas, background=background, jitter=_jitter(rng))


def _jitter(rng: np.random.Generator) -> int:
    return int(rng.integers(1 << 31))


_MAKERS = {
    "figures": _make_figures,
    "number": _make_number,
    "word": _make_word,
    "chart": _make_chart,
    "empty": _make_empty,
}


def draw_scene(scene: Scene) -> np.ndarray:
    """The picture as (height, width, 3) uint8. Shapes and letters are smooth-edged masks, cached and blended in."""
    width, height = scene.canvas
    canvas = np.empty((height, width, 3), np.uint8)
    canvas[:] = BACKGROUNDS[scene.background]
    rng = np.random.default_rng(scene.jitter)
    if scene.bars:
        _draw_bars(canvas, scene.bars, rng)
    if scene.label:
        mask, _ = _fitting_text(scene.label.text.upper(), int(rng.integers(24, 37)), width - 6, height // 3 - 4)
        _place(canvas, mask, _tinted(scene.label.colour, rng), scene.label.row, 1, rng)
    for figure in scene.figures:
        low, high = _RADIUS[figure.size]
        mask = _shape_mask(figure.shape, int(rng.integers(low, high + 1)))
        _place(canvas, mask, _tinted(figure.colour, rng), figure.row, figure.column, rng)
    return canvas


def letter_centres(scene: Scene) -> list[tuple[str, float, float]]:
    """Each letter of the label and the pixel (x, y) of its middle, as `draw_scene` draws it."""
    if scene.label is None:
        return []
    (width, height), rng, text = scene.canvas, np.random.default_rng(scene.jitter), scene.label.text.upper()
    mask, size = _fitting_text(text, int(rng.integers(24, 37)), width - 6, height // 3 - 4)
    _tinted(scene.label.colour, rng)  # drawn from the same generator in between
    top, left = _corner((height, width), mask.shape, scene.label.row, 1, rng)
    font = _font(size * _OVERSAMPLE)
    ends = [font.getlength(text[:idx]) / _OVERSAMPLE for idx in range(len(text) + 1)]
    middle = top + mask.shape[0] / 2
    return [
        (letter, left + (start + end) / 2, middle)
        for letter, start, end in zip(scene.label.text, ends[:-1], ends[1:], strict=True)
    ]


def scene_image(scene: Scene) -> Image.Image:
    return Image.fromarray(draw_scene(scene))


def _draw_bars(canvas: np.ndarray, bars: tuple[Bar, ...], rng: np.random.Generator) -> None:
    """Bars on grid lines: the top of a bar of height h meets the h-th line above the base."""
    height, width = canvas.shape[:2]
    left, right, base = 6, width - 6, height - 7
    step = (base - 5) // MAX_BAR_HEIGHT
    for line in range(1, MAX_BAR_HEIGHT + 1):
        canvas[base - line * step, left:right] = (canvas[0, 0] * 0.8).astype(np.uint8)
    canvas[base : base + 2, left:right] = 60
    slot = (right - left) / len(bars)
    bar_width = int(slot * rng.uniform(0.5, 0.7))
    for idx, bar in enumerate(bars):
        start = int(left + slot * idx + (slot - bar_width) / 2)
        canvas[base - bar.height * step : base, start : start + bar_width] = _tinted(bar.colour, rng)


def _tinted(colour: str, rng: np.random.Generator) -> np.ndarray:
    """The named colour, each channel moved a little: (3,) float32."""
    return np.clip(np.asarray(COLOURS[colour], np.float32) + rng.integers(-_TINT, _TINT + 1, 3), 0, 255)


def _place(
    canvas: np.ndarray, mask: np.ndarray, colour: np.ndarray, row: int, column: int, rng: np.random.Generator
) -> None:
    """Blend `mask` (h, w) in 0..1 into the middle of a cell, shifted at random as far as the cell and canvas allow."""
    top, left = _corner(canvas.shape[:2], mask.shape, row, column, rng)
    window = canvas[top : top + mask.shape[0], left : left + mask.shape[1]]
    opacity = mask[:, :, None]
    window[:] = (window + opacity * (colour - window) + 0.5).astype(np.uint8)


def _corner(
    canvas: tuple[int, ...], mask: tuple[int, ...], row: int, column: int, rng: np.random.Generator
) -> tuple[int, int]:
    """(top, left) of a mask in the middle of a cell, shifted at random."""
    (height, width), (mask_height, mask_width) = canvas, mask
    cell_height, cell_width = height / 3, width / 3
    spare_y = min(3, max(0, int((cell_height - mask_height) / 2)))
    spare_x = min(3, max(0, int((cell_width - mask_width) / 2)), (width - mask_width) // 2)
    top = int((row + 0.5) * cell_height - mask_height / 2) + int(rng.integers(-spare_y, spare_y + 1))
    left = int((column + 0.5) * cell_width - mask_width / 2) + int(rng.integers(-spare_x, spare_x + 1))
    return top, left


@lru_cache(maxsize=256)
def _shape_mask(shape: str, radius: int) -> np.ndarray:
    """Smooth-edged mask (2 * radius, 2 * radius) float32 of a shape that fills its square."""
    side = 2 * radius * _OVERSAMPLE
    image = Image.new("L", (side, side))
    pen = ImageDraw.Draw(image)
    if shape == "circle":
        pen.ellipse((0, 0, side - 1, side - 1), fill=255)
    elif shape == "cross":
        arm = side * 0.34
        pen.rectangle(((side - arm) / 2, 0, (side + arm) / 2, side - 1), fill=255)
        pen.rectangle((0, (side - arm) / 2, side - 1, (side + arm) / 2), fill=255)
    else:
        pen.polygon([(x * (side - 1), y * (side - 1)) for x, y in _CORNERS[shape]], fill=255)
    small = image.resize((2 * radius, 2 * radius), Image.Resampling.BOX)
    return np.asarray(small, np.float32) / 255


def _star_corners() -> list[tuple[float, float]]:
    turns = np.arange(10) * np.pi / 5
    reach = np.where(np.arange(10) % 2 == 0, 0.53, 0.22)
    return [(0.5 + r * np.sin(t), 0.53 - r * np.cos(t)) for r, t in zip(reach, turns, strict=True)]


_CORNERS = {  # in units of the side
    "square": [(0.06, 0.06), (0.94, 0.06), (0.94, 0.94), (0.06, 0.94)],
    "triangle": [(0.5, 0.02), (1.0, 0.96), (0.0, 0.96)],
    "diamond": [(0.5, 0.0), (1.0, 0.5), (0.5, 1.0), (0.0, 0.5)],
    "star": _star_corners(),
}


def _fitting_text(text: str, size: int, width: int, height: int) -> tuple[np.ndarray, int]:
    """Mask of the text at the largest size up to `size` that fits, and that size; down to 8 pixels are tried."""
    for candidate in range(size, 7, -1):
        mask = _text_mask(text, candidate)
        if mask.shape[0] <= height and mask.shape[1] <= width:
            return mask, candidate
    raise ValueError(f"{text!r} does not fit into {width} x {height} pixels")


@lru_cache(maxsize=16384)
def _text_mask(text: str, size: int) -> np.ndarray:
    """Mask (h, w) float32 of the text in Pillow's built-in font (Aileron, CC0), a little bolder, cut to the ink."""
    font = _font(size * _OVERSAMPLE)
    left, top, right, bottom = font.getbbox(text, stroke_width=2)
    width, height = (-(-int(extent) // _OVERSAMPLE) for extent in (right - left, bottom - top))
    image = Image.new("L", (width * _OVERSAMPLE, height * _OVERSAMPLE))
    ImageDraw.Draw(image).text((-left, -top), text, fill=255, font=font, stroke_width=2)
    return np.asarray(image.resize((width, height), Image.Resampling.BOX), np.float32) / 255


@lru_cache(maxsize=64)
def _font(size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont), "Pillow was built without FreeType"
    return font
