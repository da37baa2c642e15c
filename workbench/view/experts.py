"""Load of experts as a heat map: a row a layer, a column an expert, the darker the more tokens chose it.

Drawn as one SVG element around one small picture that it holds itself, a pixel an expert: K3's 92 layers of 896 experts
are 80,000 cells, as single shapes megabytes of them. No script, no font, no request.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from PIL import Image

__all__ = ["ExpertHeat", "draw_expert_heat", "expert_heat"]

FULL = 4.0  # times its even share at which an expert is drawn in full colour
COLOUR = (47, 111, 222)  # the first of the charts' colours
WIDTH, LEFT, TOP, LINE = 280, 34, 40, 16  # px; labels of layers stand left of LEFT
FONT = 'font-family="system-ui, -apple-system, Segoe UI, Roboto, sans-serif"'


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertHeat:
    """`shares[row][expert]`: tokens over the mean of the layer `layers[row]`; 1 is even, and all are 0 where a layer
    had none."""

    title: str
    layers: tuple[int, ...]
    shares: tuple[tuple[float, ...], ...]
    note: str = ""

    def __post_init__(self) -> None:
        if len(self.layers) != len(self.shares) or not self.layers or not all(self.shares):
            raise ValueError(f"{len(self.layers)} layers for {len(self.shares)} rows of experts")

    def to_json(self) -> dict[str, object]:
        return {"kind": "expert heat", **asdict(self)}


def expert_heat(experts: Mapping[str, Any]) -> ExpertHeat:
    """From the JSON of a `profiling.ExpertLoad`. Raises ValueError where nothing was routed."""
    layers = experts["layers"]
    totals = [sum(layer["counts"]) for layer in layers]
    if not any(totals):
        raise ValueError("no token was routed")
    worst = max(layers, key=lambda layer: layer["busiest"])
    num_experts = sum(len(layer["counts"]) for layer in layers)
    return ExpertHeat(
        title=f"busiest: {worst['busiest']:.1f} times its share, layer {worst['layer']}",
        layers=tuple(layer["layer"] for layer in layers),
        shares=tuple(
            tuple(count * len(layer["counts"]) / total if total else 0.0 for count in layer["counts"])
            for layer, total in zip(layers, totals, strict=True)
        ),
        note=f"{sum(layer['num_hit'] for layer in layers):,} of {num_experts:,} hit by {sum(totals):,} choices",
    )


def draw_expert_heat(chart: ExpertHeat) -> str:
    """One `<svg>` element, as wide as what it stands in up to 280 px."""
    most = max(map(len, chart.shares))
    row = max(2.0, min(14.0, 220 / len(chart.layers)))
    height, right = row * len(chart.layers), WIDTH - 8
    bottom = TOP + height
    label = html.escape(f"{chart.title}; {chart.note}")
    parts = [
        _text(4, 14, chart.title, weight=True),
        _text(4, 14 + LINE, chart.note),
        f'<rect x="{LEFT}" y="{TOP}" width="{right - LEFT}" height="{height:.1f}" fill="none" stroke="currentColor" '
        'stroke-opacity="0.3"/>',
        f'<image x="{LEFT}" y="{TOP}" width="{right - LEFT}" height="{height:.1f}" preserveAspectRatio="none" '
        f'style="image-rendering:pixelated" href="{_picture(chart)}"/>',
        _text(LEFT, bottom + LINE, "expert 0"),
        _text(right, bottom + LINE, str(most - 1), anchor="end"),
        _text(4, bottom + 2 * LINE, f"full colour: {FULL:g} times the even share, or more"),
    ]
    every = -(-len(chart.layers) // max(1, int(height // 12)))  # labels that do not overlap
    parts += [
        _text(LEFT - 4, TOP + row * (n + 0.5) + 4, str(layer), anchor="end")
        for n, layer in enumerate(chart.layers)
        if n % every == 0
    ]
    end = bottom + 2 * LINE + 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {end:.0f}" width="{WIDTH}" height="{end:.0f}" '
        f'role="img" aria-label="{label}" {FONT} font-size="11" style="max-width:100%;height:auto">'
        f"<title>{label}</title>{''.join(parts)}</svg>"
    )


def _picture(chart: ExpertHeat) -> str:
    """A data URI of a PNG, a pixel an expert: one colour, and how much of it is how much it was chosen."""
    pixels = np.zeros((len(chart.layers), max(map(len, chart.shares)), 4), np.uint8)
    pixels[..., :3] = COLOUR
    for row, shares in zip(pixels, chart.shares, strict=True):
        row[: len(shares), 3] = np.clip(np.asarray(shares) / FULL, 0, 1) * 255
    file = io.BytesIO()
    Image.fromarray(pixels, "RGBA").save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: bool = False) -> str:
    style = ' font-weight="600"' if weight else ' fill-opacity="0.75"'
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor"{style}>{html.escape(text)}</text>'
