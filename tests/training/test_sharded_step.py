"""One training step under every kind of layout equals that of one rank: loss, gradients, stepped weights, biases."""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1] / "parallel"))

import step_tasks
from ranks import shared_ranks
from tiny_runs import make_packs, tiny_config

from workbench.placement import Layout
from workbench.training.data.samples import PackedBatch
from workbench.training.sharding import join_parameters

pytestmark = pytest.mark.ranks

LAYOUTS = [  # the last two hold nothing that the others do not hold, in another mix
    "tp2",
    "tp2xep2",
    "tp2xep2:all_to_all",
    "dp2",
    "dp2xep2",
    "dp2xep2:all_to_all",
    "pp2",
    "dp2xtp2",
    "dp2xtp2xep4",
    "pp2xdp2xep2",
    pytest.param("dp2xtp2xep2", marks=pytest.mark.slow),
    pytest.param("pp2xtp2", marks=pytest.mark.slow),
]
NOISE = 2e-5  # of the largest gradient of a parameter: sums of float32 in another order


@lru_cache(maxsize=2)
def packs() -> list[PackedBatch]:
    return make_packs(4)


@lru_cache(maxsize=4)
def on_one_rank(**changes: Any) -> dict[str, Any]:
    return step_tasks.one_step(tiny_config(**changes), Layout(), packs())


def worst(found: dict[str, Tensor], expected: dict[str, Tensor], scale: float | None = None) -> tuple[float, str]:
    """Largest difference of any parameter, as a share of its largest value (or of `scale`)."""
    errors = [
        (float((found[n] - e).abs().max() / (scale or e.abs().max().clamp(min=1e-12))), n) for n, e in expected.items()
    ]
    return max(errors)


def run(layout: Layout, vision_heads: int = 2, fault: str | None = None) -> list[dict[str, Any]]:
    config = tiny_config(vision_heads=vision_heads)
    return shared_ranks().run(step_tasks.one_step, config, layout, packs(), fault, world_size=layout.world_size)


@pytest.mark.parametrize("text", LAYOUTS)
def test_a_step_equals_that_of_one_rank(text: str) -> None:
    layout, one = Layout.parse(text), on_one_rank()
    ranks = run(layout)
    check(layout, one, ranks)


def test_images_shared_out_where_the_tower_does_not_split() -> None:
    """Three heads on two ranks: each rank encodes some of the pictures, and their gradients are summed."""
    check(Layout(tp=2), on_one_rank(vision_heads=3), run(Layout(tp=2), 3), vision_heads=3)


def check(layout: Layout, one: dict[str, Any], ranks: list[dict[str, Any]], vision_heads: int = 2) -> None:
    config = tiny_config(vision_heads=vision_heads)
    for rank in ranks:
        assert rank["sums"].num_learnt == one["sums"].num_learnt
        assert rank["sums"].loss == pytest.approx(one["sums"].loss, rel=1e-6)
        assert rank["norm"] == pytest.approx(one["norm"], rel=1e-5)
    by_stage = {load.layer: load for rank in ranks for load in rank["loads"]}
    assert [by_stage[load.layer].counts for load in one["loads"]] == [load.counts for load in one["loads"]]

    spec = config.spec()
    grads = join_parameters(spec, layout, [rank["grads"] for rank in ranks])
    error, name = worst(grads, one["grads"])
    assert error < NOISE, f"gradient of {name}: {error:.1e} of its largest value"
    stepped = join_parameters(spec, layout, [rank["masters"] for rank in ranks])
    error, name = worst(stepped, one["masters"], scale=config.optimiser.adam_lr)
    assert error < 5e-3, f"step of {name}: {error:.1e} of the learning rate"


def test_copies_of_a_parameter_stay_bitwise_equal_on_all_ranks() -> None:
    layout = Layout(dp=2, tp=2)
    ranks = run(layout)
    for name in ("layers.1.ffn.router.weight", "layers.1.ffn.latent_norm.weight", "layers.0.mixer.o_norm.weight"):
        assert all(torch.equal(rank["masters"][name], ranks[0]["masters"][name]) for rank in ranks), name


@pytest.mark.parametrize("text", ["dp2", "dp2xep2", "pp2xdp2"])
def test_replicas_that_share_the_work_of_muon_step_as_one_rank_alone(text: str) -> None:
    layout, config = Layout.parse(text), tiny_config(muon_lr=1e-2)
    start, one = (on_one_rank(**changes)["masters"] for changes in ({"adam_lr": 1e-30}, {"muon_lr": 1e-2}))
    ranks = shared_ranks().run(step_tasks.one_step, config, layout, packs(), world_size=layout.world_size)
    many = join_parameters(config.spec(), layout, [rank["masters"] for rank in ranks])
    for name in ("layers.0.mixer.q_proj.weight", "layers.2.ffn.experts.w2.weight", "vision.blocks.0.fc0.weight"):
        step = one[name] - start[name]
        assert step.abs().mean() > 1e-4
        assert (many[name] - one[name]).norm() < 0.05 * step.norm(), name  # the iteration runs in bf16
    twin = ranks[layout.rank_at(dp=1)]["masters"]
    for name in ("layers.0.mixer.q_proj.weight", "embed.weight"):
        assert torch.equal(ranks[0]["masters"][name], twin[name]), name


@pytest.mark.parametrize(
    ("layout", "fault"), list(zip((Layout(tp=2), Layout(dp=2), Layout(dp=2)), step_tasks.FAULTS, strict=True))
)
def test_a_planted_fault_is_noticed(layout: Layout, fault: str) -> None:
    ranks = run(layout, fault=fault)
    with pytest.raises(AssertionError):
        check(layout, on_one_rank(), ranks)
