"""The placement table against brute force: every element of every tensor lands on exactly the ranks it should."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from workbench.base import LayoutError
from workbench.placement import Layout, check_layout, local_shape, owned_shards, rule_for, vision_is_sharded
from workbench.spec import ModelSpec, published_tensors, read_spec

TINY = Path(__file__).resolve().parents[1] / "golden" / "k3-tiny-a"

LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(tp=4),
    Layout(pp=2),
    Layout(pp=3),
    Layout(tp=2, ep=2),
    Layout(tp=4, ep=2),
    Layout(dp=2, ep=2, dispatch="all_to_all"),
    Layout(dp=2, tp=2, ep=2),
    Layout(dp=2, tp=2, ep=4),
    Layout(pp=2, tp=2, stages=(3, 5)),
]


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return read_spec(TINY)


def with_vision_heads(spec: ModelSpec, num_heads: int) -> ModelSpec:
    assert spec.vision is not None
    vision = dataclasses.replace(spec.vision, num_heads=num_heads, qkv_width=20 * num_heads)
    return dataclasses.replace(spec, vision=vision)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("vision_heads", [3, 4])
def test_every_element_is_held_the_right_number_of_times(spec: ModelSpec, layout: Layout, vision_heads: int) -> None:
    spec = with_vision_heads(spec, vision_heads)
    counts = {
        t.name: np.zeros(t.shape if t.used_rows is None else (t.used_rows,), np.int64) for t in published_tensors(spec)
    }
    for rank in range(layout.world_size):
        for shard in owned_shards(spec, layout, rank):
            index = np.ix_(*[np.concatenate([np.arange(a, b) for a, b in dim]) for dim in shard.ranges])
            counts[shard.tensor.name][index] += 1
    stage_ranks = layout.dp * layout.tp
    for tensor in published_tensors(spec):
        rule = rule_for(spec, layout, tensor.param)
        expected = stage_ranks
        if tensor.expert is not None:
            expected = stage_ranks // (layout.ep * layout.expert_tp)
        elif rule.dim is not None:
            expected = layout.dp
        assert counts[tensor.name].min() == counts[tensor.name].max() == expected, tensor.name


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_local_shape_of_a_parameter_equals_the_shape_of_its_shards(spec: ModelSpec, layout: Layout) -> None:
    assert spec.quant is not None
    plain = dataclasses.replace(spec, quant=None)  # logical shapes, no packing
    for rank in range(layout.world_size):
        for shard in owned_shards(plain, layout, rank):
            tensor = shard.tensor
            whole = tensor.shape if tensor.used_rows is None else (tensor.used_rows,)
            if tensor.expert is None:
                assert local_shape(plain, layout, tensor.param, whole) == shard.shape
            else:
                stacked = local_shape(plain, layout, tensor.param, (8, *whole), is_expert=True)
                assert stacked == (8 // layout.ep, *shard.shape)
                assert shard.slot is not None
                assert 0 <= shard.slot < stacked[0]


def test_packed_qkv_is_split_inside_each_of_its_three_parts(spec: ModelSpec) -> None:
    spec = with_vision_heads(spec, 4)
    layout = Layout(tp=2)
    assert vision_is_sharded(spec, layout)
    shards = {s.tensor.param: s for s in owned_shards(spec, layout, 1)}
    assert shards["vision.blocks.0.wqkv.weight"].ranges[0] == ((40, 80), (120, 160), (200, 240))


def test_vision_heads_that_do_not_divide_keep_the_tower_whole(spec: ModelSpec) -> None:
    assert not vision_is_sharded(spec, Layout(tp=2))  # three heads
    assert rule_for(spec, Layout(tp=2), "vision.blocks.0.wqkv.weight").dim is None


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(tp=3), "vocabulary"),
        (Layout(tp=8), "attention heads"),
        (Layout(dp=16, ep=16), "experts"),
        (Layout(pp=9), "empty stages"),
    ],
    ids=str,
)
def test_layout_that_does_not_divide_is_refused_by_name(spec: ModelSpec, layout: Layout, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        check_layout(spec, layout)


def test_expert_slice_that_would_cut_a_quantisation_group_is_refused(spec: ModelSpec) -> None:
    wide = dataclasses.replace(
        spec,
        layers=tuple(
            dataclasses.replace(x, ffn=dataclasses.replace(x.ffn, width=96)) if x.is_moe else x for x in spec.layers
        ),
    )
    check_layout(wide, Layout(tp=4, ep=4))
    with pytest.raises(LayoutError, match="whole number of quantisation groups"):
        check_layout(wide, Layout(tp=2))  # 48 columns: a group and a half


def test_unknown_parameter_is_refused_not_guessed(spec: ModelSpec) -> None:
    with pytest.raises(LayoutError, match="no placement rule"):
        rule_for(spec, Layout(), "layers.0.mixer.mystery.weight")


def test_bytes_of_one_rank_equal_routed_over_ep_plus_rest_over_tp() -> None:
    spec = read_spec(TINY)
    layout = Layout(tp=2, dp=2, ep=4)
    tensors = list(published_tensors(spec))
    routed = sum(t.num_bytes for t in tensors if t.role == "routed_expert")
    split = sum(
        t.num_bytes for t in tensors if t.role != "routed_expert" and rule_for(spec, layout, t.param).dim is not None
    )
    whole = sum(
        t.num_bytes for t in tensors if t.role != "routed_expert" and rule_for(spec, layout, t.param).dim is None
    )
    padding = sum(4 * (math.prod(t.shape) - t.used_rows) for t in tensors if t.used_rows is not None)
    for rank in range(4):
        held = sum(s.num_bytes for s in owned_shards(spec, layout, rank))
        assert held == routed // 4 + (split - padding) // 2 + whole
