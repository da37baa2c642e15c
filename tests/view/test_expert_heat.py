"""The heat map of experts: every pixel is its expert's share, and the drawing asks nobody for anything."""

from __future__ import annotations

import base64
import io
import re
import subprocess
import sys
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from workbench.view import ExpertHeat, draw_expert_heat, expert_heat


def load_of(counts: dict[int, list[int]]) -> dict[str, object]:
    def record(layer: int, of: list[int]) -> dict[str, object]:
        total = sum(of)
        busiest = max(of) * len(of) / total if total else 0.0
        return {"layer": layer, "counts": of, "num_hit": sum(map(bool, of)), "busiest": busiest, "entropy": 0.0}

    return {"layers": [record(layer, of) for layer, of in counts.items()]}


def pixels_of(svg: str) -> np.ndarray:
    (uri,) = re.findall(r'href="data:image/png;base64,([^"]+)"', svg)
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri))))


def test_shares_are_over_the_mean_of_their_layer_and_every_pixel_is_one() -> None:
    chart = expert_heat(load_of({1: [2, 1, 1], 3: [0, 0, 30], 5: [0, 0, 0]}))
    assert chart.layers == (1, 3, 5)
    assert chart.shares == ((1.5, 0.75, 0.75), (0.0, 0.0, 3.0), (0.0, 0.0, 0.0))
    assert chart.title == "busiest: 3.0 times its share, layer 3"
    assert chart.note == "4 of 9 hit by 34 choices"
    alpha = pixels_of(draw_expert_heat(chart))[..., 3] / 255 * 4
    assert alpha == pytest.approx(np.array(chart.shares), abs=0.02)


def test_more_than_full_colour_is_full_colour_and_rows_may_differ_in_length() -> None:
    alpha = pixels_of(draw_expert_heat(expert_heat(load_of({0: [9, 0, 0, 0, 0, 0, 0, 0], 1: [1, 1]}))))[..., 3]
    assert alpha.tolist() == [[255, 0, 0, 0, 0, 0, 0, 0], [63, 63, 0, 0, 0, 0, 0, 0]]


def test_a_drawing_of_k3_is_small_well_formed_and_holds_all_it_needs() -> None:
    rng = np.random.default_rng(4)
    svg = draw_expert_heat(expert_heat(load_of({n: rng.integers(0, 50, 896).tolist() for n in range(1, 93)})))
    assert len(svg) < 250_000
    assert pixels_of(svg).shape == (92, 896, 4)
    tree = ElementTree.fromstring(svg)
    assert tree.tag.endswith("svg")
    assert "<script" not in svg
    links = [value for node in tree.iter() for name, value in node.attrib.items() if name.endswith("href")]
    assert all(link.startswith("data:image/png;base64,") for link in links)
    labels = [node.text for node in tree.iter() if node.tag.endswith("}text")]
    assert {"1", "895", "expert 0"} <= set(labels)


def test_nothing_routed_and_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="no token was routed"):
        expert_heat(load_of({1: [0, 0]}))
    with pytest.raises(ValueError, match="2 layers for 1 rows"):
        ExpertHeat(title="", layers=(1, 2), shares=((1.0,),))


def test_drawing_needs_no_torch() -> None:
    code = "import sys\nfrom workbench.view import expert_heat\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
