"""The one table of who holds what: planner, loader, parallel runtime, training and alignment all read it.

A rule speaks about the logical matrix of a parameter, rows (dim 0) by columns (dim 1). Quantised pieces follow by
arithmetic: a packed byte holds two columns, a scale stands for 32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from workbench.base import LayoutError, num_bytes
from workbench.placement.layout import Layout, RankCoords
from workbench.placement.tiles import cut_tiles, tile_unit
from workbench.spec import (
    SCHEMES,
    CompressedSpec,
    GatedDeltaSpec,
    GQASpec,
    KDASpec,
    LayerSpec,
    MLASpec,
    ModelSpec,
    MoESpec,
    TensorSpec,
    published_tensors,
)

__all__ = [
    "REPLICATED",
    "Rule",
    "Shard",
    "check_layout",
    "local_shape",
    "owned_shards",
    "place",
    "rule_for",
    "vision_is_sharded",
]

Axis = Literal["tp", "expert_tp", "kv"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Split dimension `dim` over `axis` (None: every rank of the stage holds all of it).

    `parts` equal blocks lie one behind another along `dim` and each is split for itself (packed q, k, v); `widths`
    says how long they are where they are not equal. Axis "kv" is tp, except that ranks share key-value heads where
    there are fewer heads than ranks: neighbours then hold the same one.
    """

    dim: int | None = None
    axis: Axis = "tp"
    parts: int = 1
    widths: tuple[int, ...] = ()


REPLICATED = Rule()
ROWS, COLUMNS = Rule(dim=0), Rule(dim=1)

# Parameter names without "layers.N." or "vision.blocks.N."; a name that is not here is refused, never guessed.
_TABLE: dict[str, Rule] = {
    # vocabulary
    "embed.weight": ROWS,
    "head.weight": ROWS,
    # KDA: by heads; the low-rank decay input and the norm shared by all heads stay whole
    "mixer.q_proj.weight": ROWS,
    "mixer.k_proj.weight": ROWS,
    "mixer.v_proj.weight": ROWS,
    "mixer.q_conv.weight": ROWS,
    "mixer.k_conv.weight": ROWS,
    "mixer.v_conv.weight": ROWS,
    "mixer.f_a_proj.weight": REPLICATED,
    "mixer.f_b_proj.weight": ROWS,
    "mixer.b_proj.weight": ROWS,
    "mixer.A_log": ROWS,
    "mixer.dt_bias": ROWS,
    "mixer.o_norm.weight": REPLICATED,
    # both mixers
    "mixer.g_proj.weight": ROWS,
    "mixer.o_proj.weight": COLUMNS,
    # MLA: by heads; latents are computed and cached by every rank
    "mixer.q_a_proj.weight": REPLICATED,
    "mixer.q_a_norm.weight": REPLICATED,
    "mixer.q_b_proj.weight": ROWS,
    "mixer.kv_a_proj.weight": REPLICATED,
    "mixer.kv_a_norm.weight": REPLICATED,
    "mixer.kv_b_proj.weight": ROWS,
    "mixer.indexer.q_b_proj.weight": REPLICATED,
    "mixer.indexer.k_proj.weight": REPLICATED,
    "mixer.indexer.k_norm.weight": REPLICATED,
    "mixer.indexer.k_norm.bias": REPLICATED,
    "mixer.indexer.weights_proj.weight": REPLICATED,
    # KDA with a low-rank gate
    "mixer.g_a_proj.weight": REPLICATED,
    "mixer.g_b_proj.weight": ROWS,
    # grouped-query attention: by heads; k, v and their norms follow the key-value heads, see rule_for
    "mixer.q_proj.bias": ROWS,
    "mixer.k_proj.bias": ROWS,
    "mixer.v_proj.bias": ROWS,
    "mixer.o_proj.bias": REPLICATED,  # added once, by whoever reduces
    "mixer.sinks": ROWS,
    "mixer.index_q_proj.weight": REPLICATED,
    "mixer.index_k_proj.weight": REPLICATED,
    "mixer.index_q_norm.weight": REPLICATED,
    "mixer.index_k_norm.weight": REPLICATED,
    # delta net: by heads; q, k and v lie packed, see rule_for
    "mixer.z_proj.weight": ROWS,
    "mixer.a_proj.weight": ROWS,
    # compressed attention: queries and output by heads, the one key-value head and its compressors on every rank
    "mixer.kv_proj.weight": REPLICATED,
    "mixer.kv_norm.weight": REPLICATED,
    "mixer.o_a_proj.weight": ROWS,
    "mixer.o_b_proj.weight": COLUMNS,
    **{
        f"mixer.{place}compressor.{leaf}": REPLICATED
        for place in ("", "indexer.")
        for leaf in ("kv_proj.weight", "gate_proj.weight", "place_bias", "norm.weight")
    },
    # dense feed-forward
    "ffn.gate_proj.weight": ROWS,
    "ffn.up_proj.weight": ROWS,
    "ffn.down_proj.weight": COLUMNS,
    # MoE. latent_out follows the norm of the summed experts, which every rank has whole: each takes its columns and
    # the partial result joins the shared experts' reduction.
    "ffn.router.weight": REPLICATED,
    "ffn.router.bias": REPLICATED,
    "ffn.router.logit_bias": REPLICATED,
    "ffn.router.table": REPLICATED,
    "ffn.shared_gate.weight": REPLICATED,
    "ffn.latent_in.weight": REPLICATED,
    "ffn.latent_norm.weight": REPLICATED,
    "ffn.latent_out.weight": COLUMNS,
    "ffn.shared.gate_proj.weight": ROWS,
    "ffn.shared.up_proj.weight": ROWS,
    "ffn.shared.down_proj.weight": COLUMNS,
    "ffn.experts.w1.weight": Rule(dim=0, axis="expert_tp"),
    "ffn.experts.w3.weight": Rule(dim=0, axis="expert_tp"),
    "ffn.experts.w2.weight": Rule(dim=1, axis="expert_tp"),
    "ffn.experts.w1.bias": Rule(dim=0, axis="expert_tp"),
    "ffn.experts.w3.bias": Rule(dim=0, axis="expert_tp"),
    "ffn.experts.w2.bias": REPLICATED,
    # norms and residual mixing
    "mixer_norm.weight": REPLICATED,
    "ffn_norm.weight": REPLICATED,
    "mixer_res.norm.weight": REPLICATED,
    "mixer_res.proj.weight": REPLICATED,
    "ffn_res.norm.weight": REPLICATED,
    "ffn_res.proj.weight": REPLICATED,
    "final_res.norm.weight": REPLICATED,
    "final_res.proj.weight": REPLICATED,
    "final_norm.weight": REPLICATED,
    **{
        f"{place}_streams.{leaf}": REPLICATED for place in ("mixer", "ffn", "final") for leaf in ("fn", "base", "scale")
    },
    # vision: by heads where they divide, else whole on every rank and images are shared out (see vision_is_sharded)
    "vision.patch_embed.weight": REPLICATED,
    "vision.pos_embed.weight": REPLICATED,
    "vision.final_norm.weight": REPLICATED,
    "vision.norm0.weight": REPLICATED,
    "vision.norm1.weight": REPLICATED,
    "vision.wqkv.weight": Rule(dim=0, parts=3),
    "vision.wo.weight": COLUMNS,
    "vision.fc0.weight": ROWS,
    "vision.fc1.weight": COLUMNS,
    "projector.fc0.weight": REPLICATED,
    "projector.fc1.weight": REPLICATED,
    "projector.norm.weight": REPLICATED,
}
_NUMBERED = re.compile(r"^layers\.\d+\.|(?<=^vision\.)blocks\.\d+\.")
_FIRST_STAGE = ("embed.", "vision.", "projector.")
_LAST_STAGE = ("head.", "final_norm.", "final_res.", "final_streams.")
_OF_LAYER = re.compile(r"^layers\.(\d+)\.")
_KV = frozenset({"mixer.k_proj.weight", "mixer.v_proj.weight", "mixer.k_proj.bias", "mixer.v_proj.bias"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """The piece of one published tensor that one rank holds.

    `ranges[d]` lists the (start, stop) ranges of dimension d of the stored tensor; nearly always one range.
    `slot` is the row of the stacked local parameter that a routed expert fills, None for other tensors.
    """

    tensor: TensorSpec
    ranges: tuple[tuple[tuple[int, int], ...], ...]
    slot: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(sum(stop - start for start, stop in dim) for dim in self.ranges)

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.tensor.dtype, self.shape)


def vision_is_sharded(spec: ModelSpec, layout: Layout) -> bool:
    """Whether the vision tower runs tensor-parallel; otherwise images are shared out over the tp ranks."""
    vision = spec.vision
    if vision is None or vision.kind != "moonvit_k3":  # no other tower is split here
        return False
    return layout.tp > 1 and not (vision.num_heads % layout.tp or vision.ffn_width % layout.tp)


def rule_for(spec: ModelSpec, layout: Layout, param: str) -> Rule:
    """Rule of a canonical parameter name. Raises LayoutError for a name the table does not know."""
    key = _NUMBERED.sub("", param)
    if key.startswith("vision.") and not vision_is_sharded(spec, layout) and key in _TABLE:
        return REPLICATED
    if key.startswith(("vision.", "projector.")) and spec.vision is not None and spec.vision.kind != "moonvit_k3":
        return REPLICATED
    if (own := _rule_of_mixer(spec, param, key)) is not None:
        return own
    try:
        return _TABLE[key]
    except KeyError:
        raise LayoutError(
            f"no placement rule for parameter {param!r}", next_step="Add it to workbench/placement/table.py"
        ) from None


def _rule_of_mixer(spec: ModelSpec, param: str, key: str) -> Rule | None:
    """The rule of a parameter whose name means something else in this kind of mixer, None for all others."""
    place = _OF_LAYER.match(param)
    if place is None or int(place[1]) >= spec.num_layers:
        return None
    mixer = spec.layers[int(place[1])].mixer
    if isinstance(mixer, GQASpec):
        if key in _KV:
            return Rule(dim=0, axis="kv")
        if key in ("mixer.q_norm.weight", "mixer.k_norm.weight"):  # across heads: cut like the heads themselves
            axis: Axis = "tp" if key == "mixer.q_norm.weight" else "kv"
            return Rule(dim=0, axis=axis) if mixer.qk_norm == "full" else REPLICATED
    if isinstance(mixer, GatedDeltaSpec) and key in ("mixer.qkv_proj.weight", "mixer.conv.weight"):
        return Rule(dim=0, widths=(mixer.key_width, mixer.key_width, mixer.value_width))
    return None


def _degree(spec: ModelSpec, layout: Layout, axis: Axis, param: str) -> int:
    """Ranks that hold different pieces along `axis`; on "kv" at most one for each key-value head."""
    if axis != "kv":
        return layout.tp if axis == "tp" else layout.expert_tp
    place = _OF_LAYER.match(param)
    assert place is not None
    mixer = spec.layers[int(place[1])].mixer
    assert isinstance(mixer, GQASpec)
    return min(layout.tp, mixer.num_kv_heads)


def check_layout(spec: ModelSpec, layout: Layout) -> None:
    """Raises LayoutError naming the first quantity that the layout does not divide."""
    first_stage = layout.stage_layers(spec.num_layers)[0]
    if spec.vision is not None and len(spec.vision.deepstack) > len(first_stage):
        raise LayoutError(
            f"pp={layout.pp}: images join the outputs of the first {len(spec.vision.deepstack)} layers, "
            f"and the stage with the tower has {len(first_stage)}",
            next_step="Take fewer stages, or give the first one more layers",
        )
    _divides("tp", layout.tp, "vocabulary", spec.vocab_size)
    for layer in spec.layers:
        where = f"layer {layer.layer_idx}"
        _check_mixer(layer, layout, where)
        if not isinstance(layer.ffn, MoESpec):
            _divides("tp", layout.tp, f"{where}: feed-forward width", layer.ffn.width)
            continue
        _divides("ep", layout.ep, f"{where}: experts", layer.ffn.num_experts)
        _divides("tp", layout.tp, f"{where}: shared expert width", layer.ffn.shared_width)
        if layer.ffn.has_latent:
            _divides("tp", layout.tp, f"{where}: expert latent width", layer.ffn.latent_dim)
        # Tiles are checked below, rows and columns of every matrix.
        unit = spec.quant.group_size if spec.quant and tile_unit(spec) == 1 else 1
        if layer.ffn.width % (layout.expert_tp * unit):
            raise LayoutError(
                f"{where}: expert width {layer.ffn.width} over {layout.expert_tp} ranks is not a whole number of "
                f"quantisation groups of {unit}",
                next_step=f"Raise ep (now {layout.ep}) so that fewer ranks share an expert",
            )
    for what, fit in cut_tiles(spec, layout):
        raise LayoutError(
            f"{what} {fit.size:,} over {fit.degree} ranks cuts a quantisation tile of {fit.tile}",
            found=f"{fit.size / fit.degree / fit.tile:g} tiles each",
            expected=f"whole tiles; an engine would have to {fit}",
            next_step="Take fewer tensor-parallel ranks, or raise ep where it is the experts",
        )


def _check_mixer(layer: LayerSpec, layout: Layout, where: str) -> None:
    mixer = layer.mixer
    if isinstance(mixer, (KDASpec, MLASpec, GQASpec, CompressedSpec)):
        _divides("tp", layout.tp, f"{where}: attention heads", mixer.num_heads)
    if isinstance(mixer, GQASpec) and mixer.num_kv_heads % layout.tp and layout.tp % mixer.num_kv_heads:
        raise LayoutError(
            f"{where}: {mixer.num_kv_heads} key-value heads lie unevenly on tp={layout.tp}",
            expected="a divisor of the heads, or a multiple of them: neighbours then share a head",
        )
    if isinstance(mixer, GatedDeltaSpec):
        _divides("tp", layout.tp, f"{where}: key heads", mixer.num_key_heads)
        _divides("tp", layout.tp, f"{where}: value heads", mixer.num_value_heads)
    if isinstance(mixer, CompressedSpec):
        _divides("tp", layout.tp, f"{where}: output groups", mixer.num_output_groups)


def _divides(axis: str, degree: int, what: str, size: int) -> None:
    if size % degree:
        raise LayoutError(f"{axis}={degree} does not divide {what} ({size})")


def place(spec: ModelSpec, layout: Layout, coords: RankCoords, tensor: TensorSpec) -> Shard | None:
    """The piece of `tensor` that the rank at `coords` holds, or None where it belongs to other ranks.

    The embedding of a model with a tied head belongs to both ends of a pipeline: on the last stage it is "head.weight".
    """
    if not _on_stage(spec, layout, coords, tensor):
        return None
    if spec.is_tied and tensor.param == "embed.weight" and coords.pp > 0:
        tensor = replace(tensor, param="head.weight")  # the last stage keeps a copy of the matrix, as its head
    slot = None
    if tensor.expert is not None:
        assert tensor.layer is not None
        ffn = spec.layers[tensor.layer].ffn
        assert isinstance(ffn, MoESpec)
        per_group = ffn.num_experts // layout.ep
        if tensor.expert // per_group != coords.ep:
            return None
        slot = tensor.expert % per_group
    rule = rule_for(spec, layout, tensor.param)
    shape = list(tensor.shape)
    if tensor.used_rows is not None:
        shape[0] = tensor.used_rows
    ranges: list[tuple[tuple[int, int], ...]] = [((0, size),) for size in shape]
    is_whole = _is_whole(tensor, shape, rule)
    if tensor.num_stacked is not None:  # all experts of a layer in one tensor: whole experts, each cut like one
        per_group = tensor.num_stacked // layout.ep
        ranges[0] = ((coords.ep * per_group, (coords.ep + 1) * per_group),)
    if rule.dim is not None and not is_whole:
        dim = _stored_dim(tensor, rule.dim)
        degree = _degree(spec, layout, rule.axis, tensor.param)
        # Ranks beyond the key-value heads share one with their neighbours.
        index = coords.expert_tp if rule.axis == "expert_tp" else coords.tp * degree // layout.tp
        parts = rule.parts
        if rule.dim == 0 and tensor.also_fills and not tensor.is_interleaved:
            parts = 1 + len(tensor.also_fills)
        widths = rule.widths or (shape[dim] // parts,) * parts
        if sum(widths) != shape[dim] or any(width % degree for width in widths):
            raise LayoutError(f"{tensor.name}: dimension {dim} of {shape} does not split over {degree} ranks")
        starts = [sum(widths[:part]) for part in range(len(widths))]
        ranges[dim] = tuple(
            (start + index * (width // degree), start + (index + 1) * (width // degree))
            for start, width in zip(starts, widths, strict=True)
        )
        _check_scales(tensor, rule.dim, ranges[dim], degree)
        if tensor.part == "g_idx" and degree > 1 and spec.quant is not None and spec.quant.has_column_order:
            raise LayoutError(
                f"{tensor.name}: columns are grouped in an order of their own (desc_act), so that a slice of them "
                "needs scales of every group",
                next_step="Take tp=1 (with pp or ep), or a checkpoint with desc_act false",
            )
    return Shard(tensor=tensor, ranges=tuple(ranges), slot=slot)


def _is_whole(tensor: TensorSpec, shape: list[int], rule: Rule) -> bool:
    """Whether a piece of a quantised matrix goes to every rank: a shape written down, one scale for a whole row or the
    whole matrix, and, where rows are split, which group each column is in."""
    if tensor.part == "g_idx":
        return rule.dim == 0
    is_of_rows = tensor.part == "weight_scale" and rule.dim == 1 and shape[1:] == [1]
    return tensor.part == "weight_shape" or is_of_rows or (tensor.scheme is not None and math.prod(shape) == 1)


def _check_scales(tensor: TensorSpec, dim: int, ranges: tuple[tuple[int, int], ...], degree: int) -> None:
    """LayoutError where a slice would begin inside a group of rows or columns that share a scale."""
    if degree == 1 or tensor.scheme is None or not tensor.weights or tensor.part == "blocks":
        return
    scheme = SCHEMES[tensor.scheme]
    unit, per_item = scheme.unit(dim, tensor.group_size), scheme.per_item[dim]
    if any((stop - start) * per_item % unit for start, stop in ranges):
        raise LayoutError(
            f"{tensor.name}: {' and '.join(str((stop - start) * per_item) for start, stop in ranges)} "
            f"{('rows', 'columns')[dim]} on each of {degree} ranks are not a whole number of groups of {unit} that "
            f"share a scale ({tensor.scheme})",
            next_step="Take fewer tensor-parallel ranks, or raise ep where it is the experts",
        )


def _stored_dim(tensor: TensorSpec, dim: int) -> int:
    """Where dimension `dim` of the logical matrix lies in the stored tensor."""
    if tensor.param.endswith("A_log"):  # a vector, stored by some with dimensions of one around it
        return max(range(len(tensor.shape)), key=lambda d: tensor.shape[d])
    if tensor.part == "g_idx":  # one number for each column
        return 0
    first = 0 if tensor.num_stacked is None else 1
    return first + (1 - dim if tensor.is_transposed else dim)


def owned_shards(spec: ModelSpec, layout: Layout, rank: int) -> Iterator[Shard]:
    """Every piece that a rank holds, in published order. Raises LayoutError where the layout does not fit the model."""
    check_layout(spec, layout)
    coords = layout.coords(rank)
    for tensor in published_tensors(spec):
        shard = place(spec, layout, coords, tensor)
        if shard is not None:
            yield shard


def local_shape(
    spec: ModelSpec, layout: Layout, param: str, shape: tuple[int, ...], *, is_expert: bool = False
) -> tuple[int, ...]:
    """Shape of a parameter on one rank, from its whole `shape`; stacked experts are (experts, rows, columns)."""
    rule = rule_for(spec, layout, param)
    local = list(shape)
    first = 1 if is_expert else 0
    if is_expert:
        local[0] //= layout.ep
    if rule.dim is not None:
        local[first + rule.dim] //= _degree(spec, layout, rule.axis, param)
    assert math.prod(local) > 0
    return tuple(local)


def _on_stage(spec: ModelSpec, layout: Layout, coords: RankCoords, tensor: TensorSpec) -> bool:
    if tensor.layer is not None:
        return tensor.layer in layout.stage_layers(spec.num_layers)[coords.pp]
    if spec.is_tied and tensor.param == "embed.weight":
        return coords.pp in (0, layout.pp - 1)
    if tensor.param.startswith(_FIRST_STAGE):
        return coords.pp == 0
    assert tensor.param.startswith(_LAST_STAGE), tensor.param
    return coords.pp == layout.pp - 1
