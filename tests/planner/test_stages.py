"""Pipeline cuts: complete, disjoint, ordered, and no heavier than they must be."""

from __future__ import annotations

import itertools
import random

import pytest

from workbench.base import LayoutError
from workbench.planner import cut_stages


def heaviest(loads: list[float], sizes: tuple[int, ...], first: float = 0, last: float = 0) -> float:
    ends = list(itertools.accumulate(sizes))
    sums = [sum(loads[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
    sums[0] += first
    sums[-1] += last
    return max(sums)


@pytest.mark.parametrize("num_stages", range(1, 17))
def test_every_layer_is_in_exactly_one_stage_and_none_is_empty(num_stages: int) -> None:
    for num_layers in range(num_stages, 101, 7):
        sizes = cut_stages([1.0] * num_layers, num_stages)
        assert len(sizes) == num_stages
        assert sum(sizes) == num_layers
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1, "equal layers are spread evenly"


def test_the_heaviest_stage_is_as_light_as_any_cut_can_make_it() -> None:
    random.seed(3)
    for _ in range(40):
        loads = [random.uniform(0.1, 4) for _ in range(random.randint(4, 9))]
        num_stages = random.randint(1, 4)
        first, last = random.uniform(0, 3), random.uniform(0, 3)
        found = cut_stages(loads, num_stages, first=first, last=last)
        cuts = itertools.combinations(range(1, len(loads)), num_stages - 1)
        best = min(
            heaviest(loads, tuple(b - a for a, b in itertools.pairwise([0, *cut, len(loads)])), first, last)
            for cut in cuts
        )
        assert heaviest(loads, found, first, last) == pytest.approx(best)


def test_what_the_outer_stages_carry_moves_the_cuts() -> None:
    assert cut_stages([1.0] * 12, 3) == (4, 4, 4)
    assert cut_stages([1.0] * 12, 3, first=3.0) == (2, 5, 5)
    assert cut_stages([1.0] * 12, 3, last=3.0)[-1] == 2


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(LayoutError, match="empty stages"):
        cut_stages([1.0] * 3, 4)
