"""What a picture holds, place by place, as class numbers: what the vision tower is taught before it meets words.

Class 0 is "nothing". The labels of a picture are

    places    9 x (shape, colour, size), in reading order; read where the middle of the place is
    letters   for each token, the letters whose middles lie in its left and in its right half
    picture   MAX_TEXT letters, the label's colour and row; 4 x (colour, height) of bars; number of figures
"""

from __future__ import annotations

import string

import numpy as np
from numpy.typing import NDArray

from workbench.training.data.scenes import (
    COLOURS,
    MAX_BAR_HEIGHT,
    MAX_FIGURES,
    SHAPES,
    SIZES,
    WORDS,
    Scene,
    letter_centres,
)

__all__ = [
    "LETTER_CLASSES",
    "MAX_BARS",
    "MAX_TEXT",
    "PICTURE_CLASSES",
    "PLACE_CLASSES",
    "PLACE_WORDS",
    "letter_labels",
    "picture_labels",
    "place_labels",
    "place_tokens",
]

MAX_TEXT, MAX_BARS = max(map(len, WORDS)), 4
CHARACTERS = string.digits + string.ascii_lowercase
_COLOURS = tuple(COLOURS)
PLACE_WORDS = (SHAPES, _COLOURS, SIZES)  # what each label of a place says; class k is word k - 1
PLACE_CLASSES = tuple(len(words) + 1 for words in PLACE_WORDS)
LETTER_CLASSES = (len(CHARACTERS) + 1,) * 2
PICTURE_CLASSES = (
    *LETTER_CLASSES[:1] * MAX_TEXT,
    len(COLOURS) + 1,
    3 + 1,
    *(len(COLOURS) + 1, MAX_BAR_HEIGHT + 1) * MAX_BARS,
    MAX_FIGURES + 1,
)


def place_labels(scene: Scene) -> NDArray[np.int64]:
    """(9, 3): shape, colour and size at each of the nine places."""
    labels = np.zeros((9, len(PLACE_CLASSES)), np.int64)
    for figure in scene.figures:
        labels[3 * figure.row + figure.column] = (
            SHAPES.index(figure.shape) + 1,
            _COLOURS.index(figure.colour) + 1,
            SIZES.index(figure.size) + 1,
        )
    return labels


def picture_labels(scene: Scene) -> NDArray[np.int64]:
    """(len(PICTURE_CLASSES),): text, its colour and row, bars, number of figures."""
    text = [CHARACTERS.index(letter) + 1 for letter in scene.label.text] if scene.label else []
    where = [_COLOURS.index(scene.label.colour) + 1, scene.label.row + 1] if scene.label else [0, 0]
    bars = [value for bar in scene.bars for value in (_COLOURS.index(bar.colour) + 1, bar.height)]
    bars += [0] * (2 * MAX_BARS - len(bars))
    return np.asarray([*text, *[0] * (MAX_TEXT - len(text)), *where, *bars, len(scene.figures)], np.int64)


def letter_labels(scene: Scene, token_grid: tuple[int, int], token_pixels: int) -> NDArray[np.int64]:
    """(rows * columns, 2) of the picture's tokens. Two letters in one half are rare; the later one counts."""
    rows, columns = token_grid
    labels = np.zeros((rows * columns, 2), np.int64)
    for letter, x, y in letter_centres(scene):
        half = int(2 * x / token_pixels)
        labels[int(y / token_pixels) * columns + half // 2, half % 2] = CHARACTERS.index(letter) + 1
    return labels


def place_tokens(scene: Scene, token_grid: tuple[int, int], token_pixels: int) -> NDArray[np.int64]:
    """(9,): index among the picture's tokens of the one that holds the centre of each place."""
    width, height = scene.canvas
    _, columns = token_grid
    middles = (0.5, 1.5, 2.5)
    rows = [int(m * height / 3) // token_pixels for m in middles]
    places = [int(m * width / 3) // token_pixels for m in middles]
    return np.asarray([row * columns + column for row in rows for column in places], np.int64)
