"""Labels of pictures: what the tower's lesson is marked against says what was really drawn, where it was drawn."""

from __future__ import annotations

import numpy as np
import pytest

from workbench.training.data.labels import (
    LETTER_CLASSES,
    PICTURE_CLASSES,
    PLACE_CLASSES,
    letter_labels,
    picture_labels,
    place_labels,
    place_tokens,
)
from workbench.training.data.scenes import (
    BACKGROUNDS,
    CANVASES,
    COLOURS,
    SHAPES,
    SIZES,
    Bar,
    Figure,
    Label,
    Scene,
    draw_scene,
    letter_centres,
    make_scene,
)


def scene_of(**changes: object) -> Scene:
    return Scene(**{"canvas": (112, 84), "background": "white", "jitter": 5, **changes})  # type: ignore[arg-type]


def test_places_name_figures_in_reading_order() -> None:
    scene = scene_of(
        figures=(
            Figure(shape="star", colour="pink", size="small", row=0, column=2),
            Figure(shape="circle", colour="red", size="large", row=2, column=1),
        )
    )
    expected = np.zeros((9, 3), np.int64)
    expected[2] = [SHAPES.index("star") + 1, list(COLOURS).index("pink") + 1, SIZES.index("small") + 1]
    expected[7] = [SHAPES.index("circle") + 1, list(COLOURS).index("red") + 1, SIZES.index("large") + 1]
    assert (place_labels(scene) == expected).all()
    assert picture_labels(scene)[-1] == 2


def test_a_picture_label_spells_the_word_and_measures_the_bars() -> None:
    word = picture_labels(scene_of(label=Label(text="cat", colour="blue", row=1)))
    assert word[:5].tolist() == [13, 11, 30, 0, 0], "0 is nothing, then ten digits, then letters"
    assert word[5:7].tolist() == [3, 2]
    bars = picture_labels(scene_of(bars=(Bar(colour="green", height=4), Bar(colour="red", height=1))))
    assert bars[7:15].tolist() == [2, 4, 1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("canvas", CANVASES)
def test_the_token_of_a_place_covers_its_middle(canvas: tuple[int, int]) -> None:
    width, height = canvas
    rows, columns = -(-height // 28), -(-width // 28)
    for place, token in enumerate(place_tokens(scene_of(canvas=canvas), (rows, columns), 28)):
        row, column = divmod(int(token), columns)
        x, y = (place % 3 + 0.5) * width / 3, (place // 3 + 0.5) * height / 3
        assert column * 28 <= x < column * 28 + 28
        assert row * 28 <= y < row * 28 + 28


@pytest.mark.parametrize("seed", range(12))
def test_each_letter_is_drawn_around_the_centre_that_is_told(seed: int) -> None:
    scene = make_scene(np.random.default_rng(seed), kind=("word", "number")[seed % 2])
    assert scene.label is not None
    centres = letter_centres(scene)
    assert "".join(letter for letter, _, _ in centres) == scene.label.text
    bare = Scene(canvas=scene.canvas, background=scene.background, label=scene.label, jitter=scene.jitter)
    ink = np.abs(draw_scene(bare).astype(int) - np.array(BACKGROUNDS[scene.background])).sum(-1) > 60
    columns = np.flatnonzero(ink.any(0))
    rows = np.flatnonzero(ink.any(1))
    xs = [x for _, x, _ in centres]
    assert xs == sorted(xs)
    assert columns[0] < xs[0] <= xs[-1] < columns[-1], "the first and the last letter end the ink"
    assert abs(np.mean([columns[0], columns[-1]]) - np.mean([xs[0], xs[-1]])) < 7
    assert abs(rows.mean() - centres[0][2]) < 2


def test_letters_are_labelled_at_the_half_token_that_holds_their_centre() -> None:
    scene = scene_of(label=Label(text="zoo", colour="black", row=1))
    labels = letter_labels(scene, (3, 4), 28)
    found = {(token, half): labels[token, half] for token, half in zip(*np.nonzero(labels), strict=True)}
    expected = {(int(y // 28) * 4 + int(x // 28), int(x % 28 >= 14)): letter for letter, x, y in letter_centres(scene)}
    assert found.keys() == expected.keys()
    assert all(found[key] == 11 + "abcdefghijklmnopqrstuvwxyz".index(letter) for key, letter in expected.items())


def test_labels_stay_within_their_classes() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        scene = make_scene(rng)
        assert (place_labels(scene) < np.array(PLACE_CLASSES)).all()
        assert (picture_labels(scene) < np.array(PICTURE_CLASSES)).all()
        width, height = scene.canvas
        assert (letter_labels(scene, (-(-height // 28), -(-width // 28)), 28) < LETTER_CLASSES[0]).all()
