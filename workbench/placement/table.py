"""The one table of who holds what: planner, loader, parallel runtime, training and alignment all read it.

A rule speaks about the logical matrix of a parameter, rows (dim 0) by columns (dim 1). Quantised pieces follow by
arithmetic: a packed byte holds two columns, a scale stands for 32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from workbench.base import LayoutError, num_bytes
from workbench.placement.layout import Layout, RankCoords
from workbench.spec import KDASpec, MLASpec, ModelSpec, MoESpec, TensorSpec, published_tensors

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

Axis = Literal["tp", "expert_tp"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Split dimension `dim` over `axis` (None: every rank of the stage holds all of it).

    `parts` equal blocks lie one behind another along `dim` and each is split for itself (packed q, k, v).
    """

    dim: int | None = None
    axis: Axis = "tp"
    parts: int = 1


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
    # dense feed-forward
    "ffn.gate_proj.weight": ROWS,
    "ffn.up_proj.weight": ROWS,
    "ffn.down_proj.weight": COLUMNS,
    # MoE. latent_out follows the norm of the summed experts, which every rank has whole: each takes its columns and
    # the partial result joins the shared experts' reduction.
    "ffn.router.weight": REPLICATED,
    "ffn.router.bias": REPLICATED,
    "ffn.latent_in.weight": REPLICATED,
    "ffn.latent_norm.weight": REPLICATED,
    "ffn.latent_out.weight": COLUMNS,
    "ffn.shared.gate_proj.weight": ROWS,
    "ffn.shared.up_proj.weight": ROWS,
    "ffn.shared.down_proj.weight": COLUMNS,
    "ffn.experts.w1.weight": Rule(dim=0, axis="expert_tp"),
    "ffn.experts.w3.weight": Rule(dim=0, axis="expert_tp"),
    "ffn.experts.w2.weight": Rule(dim=1, axis="expert_tp"),
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
_LAST_STAGE = ("head.", "final_norm.", "final_res.")


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
    return vision is not None and layout.tp > 1 and not (vision.num_heads % layout.tp or vision.ffn_width % layout.tp)


def rule_for(spec: ModelSpec, layout: Layout, param: str) -> Rule:
    """Rule of a canonical parameter name. Raises LayoutError for a name the table does not know."""
    key = _NUMBERED.sub("", param)
    if key.startswith("vision.") and not vision_is_sharded(spec, layout) and key in _TABLE:
        return REPLICATED
    try:
        return _TABLE[key]
    except KeyError:
        raise LayoutError(
            f"no placement rule for parameter {param!r}", next_step="Add it to workbench/placement/table.py"
        ) from None


def check_layout(spec: ModelSpec, layout: Layout) -> None:
    """Raises LayoutError naming the first quantity that the layout does not divide."""
    layout.stage_layers(spec.num_layers)
    _divides("tp", layout.tp, "vocabulary", spec.vocab_size)
    for layer in spec.layers:
        where = f"layer {layer.layer_idx}"
        if isinstance(layer.mixer, (KDASpec, MLASpec)):
            _divides("tp", layout.tp, f"{where}: attention heads", layer.mixer.num_heads)
        if not isinstance(layer.ffn, MoESpec):
            _divides("tp", layout.tp, f"{where}: feed-forward width", layer.ffn.width)
            continue
        _divides("ep", layout.ep, f"{where}: experts", layer.ffn.num_experts)
        _divides("tp", layout.tp, f"{where}: shared expert width", layer.ffn.shared_width)
        _divides("tp", layout.tp, f"{where}: expert latent width", layer.ffn.latent_dim)
        unit = spec.quant.group_size if spec.quant else 1
        if layer.ffn.width % (layout.expert_tp * unit):
            raise LayoutError(
                f"{where}: expert width {layer.ffn.width} over {layout.expert_tp} ranks is not a whole number of "
                f"quantisation groups of {unit}",
                next_step=f"Raise ep (now {layout.ep}) so that fewer ranks share an expert",
            )


def _divides(axis: str, degree: int, what: str, size: int) -> None:
    if size % degree:
        raise LayoutError(f"{axis}={degree} does not divide {what} ({size})")


def place(spec: ModelSpec, layout: Layout, coords: RankCoords, tensor: TensorSpec) -> Shard | None:
    """The piece of `tensor` that the rank at `coords` holds, or None where it belongs to other ranks."""
    if not _on_stage(spec, layout, coords, tensor):
        return None
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
    # One scale for a whole row, and a shape written down, are everyone's.
    is_whole = tensor.part == "weight_shape" or (tensor.part == "weight_scale" and rule.dim == 1 and shape[1:] == [1])
    if rule.dim is not None and not is_whole:
        degree, index = (layout.tp, coords.tp) if rule.axis == "tp" else (layout.expert_tp, coords.expert_tp)
        block = shape[rule.dim] // rule.parts
        if shape[rule.dim] % (rule.parts * degree):
            raise LayoutError(f"{tensor.name}: dimension {rule.dim} of {shape} does not split over {degree} ranks")
        step = block // degree
        ranges[rule.dim] = tuple((p * block + index * step, p * block + (index + 1) * step) for p in range(rule.parts))
    return Shard(tensor=tensor, ranges=tuple(ranges), slot=slot)


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
        local[first + rule.dim] //= layout.tp if rule.axis == "tp" else layout.expert_tp
    assert math.prod(local) > 0
    return tuple(local)


def _on_stage(spec: ModelSpec, layout: Layout, coords: RankCoords, tensor: TensorSpec) -> bool:
    if tensor.layer is not None:
        return tensor.layer in layout.stage_layers(spec.num_layers)[coords.pp]
    if tensor.param.startswith(_FIRST_STAGE):
        return coords.pp == 0
    assert tensor.param.startswith(_LAST_STAGE), tensor.param
    return coords.pp == layout.pp - 1
