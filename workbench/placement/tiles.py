"""Quantisation tiles against tensor-parallel slices: what a split would cut, said before anything is loaded.

A scale belongs to a tile of rows and columns (128 x 128 in FP8 checkpoints). A rank whose slice is not a whole number
of tiles would share a scale with its neighbour, and 18,432 rows over 32 ranks are 576, four and a half tiles. Engines
find that out after start-up; here it is a line of a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from workbench.base import Cell, Table
from workbench.placement.layout import Layout
from workbench.spec import SCHEMES, DenseFFNSpec, GQASpec, LayerSpec, MLASpec, ModelSpec

__all__ = ["TileFit", "cut_tiles", "tile_fit", "tile_table", "tile_unit"]

Verdict = Literal["split", "pad", "replicate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TileFit:
    """One dimension of `size` over `degree` ranks in tiles of `tile`.

    `split`: every slice is a whole number of tiles. `pad`: whole tiles can be dealt out, `local` to each rank, if the
    dimension grows to `padded` by zeros. `replicate`: fewer tiles than ranks, every rank keeps all of it.
    """

    size: int
    degree: int
    tile: int
    verdict: Verdict
    local: int
    padded: int

    def __str__(self) -> str:
        if self.verdict == "split":
            return f"{self.local} each"
        if self.verdict == "pad":
            return f"pad to {self.padded:,}, {self.local} each"
        return "replicate"


def tile_fit(size: int, degree: int, tile: int) -> TileFit:
    """How `size` rows or columns lie on `degree` ranks. One rank always holds all, whatever the tile."""
    num_tiles = -(-size // tile)
    if degree == 1 or (size % degree == 0 and (size // degree) % tile == 0):
        return TileFit(size=size, degree=degree, tile=tile, verdict="split", local=size // degree, padded=size)
    if num_tiles < degree:
        return TileFit(size=size, degree=degree, tile=tile, verdict="replicate", local=size, padded=size)
    local = -(-num_tiles // degree) * tile
    return TileFit(size=size, degree=degree, tile=tile, verdict="pad", local=local, padded=local * degree)


def tile_unit(spec: ModelSpec) -> int:
    """Rows and columns that share a scale where the plain matrices of a model are stored in tiles, else 1."""
    if spec.quant is None:
        return 1
    is_tiled = any(SCHEMES[scheme].block == (None, None) for scheme in spec.quant.schemes)
    groups = [group.group_size for group in spec.quant.groups if SCHEMES[group.scheme].block == (None, None)]
    return (groups[0] if groups else spec.quant.group_size) if is_tiled else 1


def cut_tiles(spec: ModelSpec, layout: Layout) -> Iterator[tuple[str, TileFit]]:
    """Every dimension that the layout would cut inside a tile, once for each kind of layer."""
    unit = tile_unit(spec)
    if unit == 1:
        return
    for where, size, degree in _split_dimensions(spec, layout):
        fit = tile_fit(size, degree, unit)
        if fit.verdict != "split":
            yield where, fit


def tile_table(spec: ModelSpec, degrees: Sequence[int] = (2, 4, 8, 16, 32)) -> Table:
    """Every split dimension of a model against tensor-parallel degrees; experts count as split over the same ranks."""
    unit = tile_unit(spec)
    dimensions = dict.fromkeys((where, size) for where, size, _ in _split_dimensions(spec, Layout()))
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (where, size, *(str(tile_fit(size, degree, unit)) for degree in degrees)) for where, size in dimensions
    )
    columns = ("dimension", "size", *(f"tp{degree}" for degree in degrees))
    note = f"tiles of {unit} x {unit}; pad and replicate are what an engine must do there, workbench refuses to load"
    return Table(title="Slices and quantisation tiles", columns=columns, rows=rows, note=note)


def _split_dimensions(spec: ModelSpec, layout: Layout) -> Iterator[tuple[str, int, int]]:
    """(what, size, ranks) of every dimension that tensor parallelism splits, once for each kind of layer."""
    seen: set[tuple[str, int]] = set()
    for layer in spec.layers:
        for what, size, degree in _of_layer(layer, layout):
            if (what, size) not in seen:
                seen.add((what, size))
                yield what, size, degree


def _of_layer(layer: LayerSpec, layout: Layout) -> Iterator[tuple[str, int, int]]:
    mixer, ffn, tp = layer.mixer, layer.ffn, layout.tp
    if isinstance(mixer, GQASpec):
        yield "query rows", mixer.num_heads * mixer.head_dim, tp
        kv_degree = min(tp, mixer.num_kv_heads)
        yield "key rows", mixer.num_kv_heads * mixer.head_dim, kv_degree
        yield "value rows", mixer.num_kv_heads * mixer.v_dim, kv_degree
        yield "attention output columns", mixer.num_heads * mixer.v_dim, tp
    elif isinstance(mixer, MLASpec):
        yield "query rows", mixer.num_heads * mixer.qk_dim, tp
        yield "key and value rows", mixer.num_heads * (mixer.nope_dim + mixer.v_dim), tp
        yield "attention output columns", mixer.num_heads * mixer.v_dim, tp
    if isinstance(ffn, DenseFFNSpec):
        yield "feed-forward width", ffn.width, tp
        return
    if ffn.shared_width:
        yield "shared expert width", ffn.shared_width, tp
    yield "expert width", ffn.width, layout.expert_tp
