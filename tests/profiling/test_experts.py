"""Load of experts: closed forms."""

from __future__ import annotations

import math

import pytest

from workbench.profiling.experts import ExpertLoad, LayerLoad, merge_counts


def test_an_even_layer_and_one_that_always_takes_the_same_expert() -> None:
    even, one = LayerLoad(layer=1, counts=(5, 5, 5, 5)), LayerLoad(layer=2, counts=(0, 20, 0, 0))
    assert (even.busiest, even.entropy, even.num_hit) == (1.0, pytest.approx(1.0), 4)
    assert (one.busiest, one.entropy, one.num_hit) == (4.0, 0.0, 1)
    half = LayerLoad(layer=3, counts=(7, 0, 7, 0))
    assert half.entropy == pytest.approx(math.log(2) / math.log(4))
    load = ExpertLoad(layers=(even, one))
    assert load.worst is one
    assert "4.00 times its share, in layer 2" in load.render()
    assert ExpertLoad.from_json(load.to_json()) == load


def test_nothing_routed_is_no_division_by_zero() -> None:
    empty = LayerLoad(layer=1, counts=(0, 0))
    assert (empty.busiest, empty.entropy) == (0.0, 0.0)
    assert ExpertLoad(layers=()).worst is None


def test_ranks_that_saw_other_tokens_or_layers_add_up() -> None:
    load = merge_counts([{1: (1, 2), 3: (0, 4)}, {1: (10, 20)}, {5: (7, 7)}])
    assert [(x.layer, x.counts) for x in load.layers] == [(1, (11, 22)), (3, (0, 4)), (5, (7, 7))]
