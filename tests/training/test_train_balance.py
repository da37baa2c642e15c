"""Expert load: counted as routed, and evened out by the bias alone."""

from __future__ import annotations

import pytest
import torch
from tiny_runs import make_packs, tiny_config

from workbench.nn.moe import Router
from workbench.parallel import build_stage, single_context
from workbench.placement import Layout
from workbench.spec import MoESpec
from workbench.training.balance import ExpertLoad, LoadMeter, balanced_bias
from workbench.training.initial import initialise
from workbench.training.step import token_batch

SPEC = tiny_config().spec()


def skewed_router() -> tuple[Router, torch.Tensor]:
    """Tokens with a common direction that a few experts like: without help most choose the same two."""
    moe = SPEC.layers[1].ffn
    assert isinstance(moe, MoESpec)
    generator = torch.Generator().manual_seed(0)
    router = Router(moe, 48, torch.float32).requires_grad_(False)
    router.weight.copy_(torch.randn(8, 48, generator=generator) / 7)
    router.bias.zero_()
    common = 4 * router.weight[2] + 3 * router.weight[5]
    return router, common + torch.randn(600, 48, generator=generator)


def load_of(router: Router, x: torch.Tensor) -> ExpertLoad:
    ids, _ = router(x)
    return ExpertLoad(1, tuple(torch.bincount(ids.flatten(), minlength=8).tolist()))


def test_the_bias_rule_evens_out_a_skewed_router() -> None:
    router, x = skewed_router()
    before = load_of(router, x)
    assert before.max_over_mean > 2.5
    for _ in range(300):
        router.bias.copy_(balanced_bias(router.bias, torch.tensor(load_of(router, x).counts), 0.01))
    after = load_of(router, x)
    assert after.max_over_mean < 1.3, f"{before.counts} became {after.counts}"
    assert not after.dead


def test_a_rate_of_zero_or_no_tokens_leaves_the_bias_alone_and_its_mean_stays_zero() -> None:
    bias, counts = torch.tensor([0.3, -0.1, -0.2]), torch.tensor([5, 1, 0])
    torch.testing.assert_close(balanced_bias(bias, counts, 0.0), bias)
    assert torch.equal(balanced_bias(bias, torch.zeros(3, dtype=torch.int64), 0.1), bias)
    moved = balanced_bias(bias, counts, 0.1)
    assert moved.mean().abs() < 1e-7
    assert moved[0] < bias[0]
    assert moved[2] > bias[2]


def test_load_statistics_name_dead_experts() -> None:
    assert ExpertLoad(3, (4, 4, 4, 4)).max_over_mean == 1.0
    assert ExpertLoad(3, (8, 0, 4, 4)).max_over_mean == 2.0
    assert ExpertLoad(3, (8, 0, 4, 4)).dead == (1,)
    assert ExpertLoad(3, (0, 0)).max_over_mean == 1.0


def test_the_meter_counts_what_the_routers_chose_over_all_passes() -> None:
    model = build_stage(SPEC, Layout(), 0, precision="fp32")
    model.to_empty(device="cpu")
    initialise(model, Layout(), 0, 7)
    meter, ctx = LoadMeter(model), single_context()
    chosen: list[torch.Tensor] = []
    model.layers["2"].ffn.router.register_forward_hook(lambda _m, _a, output: chosen.append(output[0]))
    packs = make_packs(2)
    with torch.no_grad():
        for pack in packs:
            model(token_batch(model, ctx, pack))
    loads = meter.loads()
    assert [load.layer for load in loads] == [1, 2, 3]
    tokens = sum(pack.num_tokens for pack in packs)
    assert {sum(load.counts) for load in loads} == {2 * tokens}
    assert loads[1].counts == tuple(torch.bincount(torch.cat(chosen).flatten(), minlength=8).tolist())
    meter.reset()
    assert {sum(load.counts) for load in meter.loads()} == {0}
    meter.close()
    with torch.no_grad():
        model(token_batch(model, ctx, packs[0]))
    assert {sum(load.counts) for load in meter.loads()} == {0}


def test_a_bias_moved_against_the_load_would_be_noticed() -> None:
    router, x = skewed_router()
    before = load_of(router, x).max_over_mean
    for _ in range(50):
        router.bias.copy_(balanced_bias(router.bias, torch.tensor(load_of(router, x).counts), -0.01))
    assert load_of(router, x).max_over_mean == pytest.approx(4.0, rel=0.05)
    assert load_of(router, x).max_over_mean > before
