"""Router and experts: choice by biased score, weight by the score alone, any subset of experts, no tokens at all."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from nn_tiny import MOE as SPEC
from nn_tiny import assert_near, fill
from torch import Tensor

from workbench.base import LoadError
from workbench.nn import Experts, MoE, Precision
from workbench.nn.activation import situ
from workbench.nn.moe import Router, group_by_expert

DIM = 40


def block(**change: object) -> MoE:
    moe = MoE(dataclasses.replace(SPEC, **change), DIM, Precision("fp32", torch.float64))
    fill(moe)
    return moe.requires_grad_(False)


def draw(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(m: MoE, x: Tensor) -> Tensor:
    """Token by token, expert by expert."""
    w1, w2, w3 = (store.weight for store in (m.experts.w1, m.experts.w2, m.experts.w3))
    combined = []
    for token in x:
        score = torch.sigmoid(m.router.weight.double() @ token)
        chosen = sorted(range(10), key=lambda e: -(score[e] + m.router.bias[e].double()))[:3]
        latent = m.latent_in.weight @ token
        total = sum(
            score[e] / sum(score[c] for c in chosen) * 1.25 * (w2[e] @ situ(w1[e] @ latent, w3[e] @ latent, 3.0, 20.0))
            for e in chosen
        )
        combined.append(total)
    y = torch.stack(combined)
    y = m.latent_norm.weight * y / torch.sqrt((y * y).mean(-1, keepdim=True) + 1e-5)
    shared = (
        situ(x @ m.shared.gate_proj.weight.T, x @ m.shared.up_proj.weight.T, 3.0, 20.0) @ m.shared.down_proj.weight.T
    )
    return y @ m.latent_out.weight.T + shared


def test_the_block_is_the_published_formulas() -> None:
    moe, x = block(), draw(17, DIM)
    assert_near(moe(x), by_hand(moe, x))


def test_the_router_chooses_by_biased_score_and_weighs_by_the_score() -> None:
    router = block().router
    x = draw(50, DIM)
    ids, weights = router(x)
    scores = router.scores(x)
    assert ids.dtype == torch.int64
    assert (ids.diff(dim=-1) > 0).all()  # ascending
    biased = scores + router.bias
    left_out = biased.scatter(-1, ids, -torch.inf).amax(-1)
    assert (biased.gather(-1, ids).amin(-1) > left_out).all()
    chosen = scores.gather(-1, ids)
    assert_near(weights, 1.25 * chosen / chosen.sum(-1, keepdim=True))
    assert not torch.equal(ids, scores.topk(3).indices.sort(-1).values)  # the bias does matter here


def test_without_renormalising_the_weights_are_the_scaled_scores() -> None:
    router = block(renormalize=False).router
    x = draw(5, DIM)
    ids, weights = router(x)
    assert_near(weights, 1.25 * router.scores(x).gather(-1, ids))


def test_scores_are_taken_in_float32_from_bf16_inputs() -> None:
    router = Router(SPEC, DIM, torch.bfloat16)
    fill(router)
    x = draw(9, DIM).bfloat16()
    assert_near(router.scores(x).double(), torch.sigmoid(x.double() @ router.weight.double().T), 1e-6)
    assert router(x)[1].dtype == torch.float32


def test_rounding_the_correction_bias_to_bf16_changes_the_chosen_experts() -> None:
    router = block().router
    x = draw(400, DIM)
    right, _ = router(x)
    router.bias.copy_(router.bias.bfloat16())
    assert 0.05 < (router(x)[0] != right).any(-1).double().mean() < 0.9


def test_a_model_cast_as_a_whole_is_refused_because_its_bias_was_rounded() -> None:
    with pytest.raises(LoadError, match="correction bias"):
        block().to(torch.bfloat16)(draw(3, DIM).bfloat16())


def test_experts_held_elsewhere_are_left_out_and_the_parts_add_up() -> None:
    moe, x = block(), draw(23, DIM)
    latent = moe.latent_in(x)
    ids, weights = moe.router(x)
    whole = moe.experts(latent, ids, weights)
    total = torch.zeros_like(whole)
    for first, last in ((0, 3), (3, 10)):
        part = Experts(dataclasses.replace(SPEC, num_experts=last - first), Precision("fp32", torch.float64))
        for own, store in ((part.w1, moe.experts.w1), (part.w2, moe.experts.w2), (part.w3, moe.experts.w3)):
            own.weight.data = store.weight.data[first:last]
        is_here = (ids >= first) & (ids < last)
        total += part(latent, torch.where(is_here, ids - first, -1), weights)
    assert_near(total, whole)


def test_no_token_or_no_expert_here_gives_zeros_of_the_right_shape() -> None:
    moe = block()
    nothing = moe(draw(0, DIM))
    assert nothing.shape == (0, DIM)
    slots, weights = torch.full((4, 3), -1), torch.ones(4, 3)
    found = moe.experts(draw(4, SPEC.latent_dim), slots, weights)
    assert found.shape == (4, SPEC.latent_dim)
    assert not found.any()


def test_dispatch_is_asked_even_without_tokens() -> None:
    moe, calls = block(), []

    def dispatch(latent: Tensor, expert_ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
        calls.append((latent.shape, expert_ids.shape, weights.shape))
        return experts(latent, expert_ids, weights)

    moe.dispatch = dispatch
    moe(draw(0, DIM))
    assert calls == [((0, 32), (0, 3), (0, 3))]


def test_each_expert_runs_once_on_all_its_tokens() -> None:
    moe, x = block(), draw(60, DIM)
    calls: list[tuple[Tensor, int]] = []
    original = moe.experts.one
    moe.experts.one = lambda own, *matrices: calls.append((matrices[0], len(own))) or original(own, *matrices)
    moe(x)
    ids, _ = moe.router(x)
    expected = [(moe.experts.w1.weight[e], int((ids == e).sum())) for e in range(10) if (ids == e).any()]
    assert [count for _, count in calls] == [count for _, count in expected]
    assert all(torch.equal(found, own) for (found, _), (own, _) in zip(calls, expected, strict=True))


def test_gradients_of_stacked_experts_are_those_of_each_alone() -> None:
    moe, x = block(), draw(23, DIM)
    experts = moe.experts.requires_grad_()
    latent = moe.latent_in(x).detach().requires_grad_()
    ids, weights = moe.router(x)
    weights = weights.detach().requires_grad_()
    targets = [latent, weights, experts.w1.weight, experts.w2.weight, experts.w3.weight]
    found = torch.autograd.grad(experts(latent, ids, weights).square().sum(), targets)
    rows = []
    for t in range(23):
        parts = (
            weights[t, i] * experts.one(latent[t], experts.w1.weight[e], experts.w2.weight[e], experts.w3.weight[e])
            for i, e in enumerate(ids[t].tolist())
        )
        rows.append(sum(parts))
    expected = torch.autograd.grad(torch.stack(rows).square().sum(), targets)
    for a, b in zip(found, expected, strict=True):
        assert_near(a, b, 1e-12)


def test_without_tokens_here_the_result_still_carries_a_gradient_back() -> None:
    """Else this rank would stay out of the collectives of the backward pass."""
    experts = block().experts.requires_grad_()
    latent = torch.zeros(2, SPEC.latent_dim, dtype=torch.float64, requires_grad=True)
    nowhere = torch.full((2, SPEC.top_k), -1)
    out = experts(latent, nowhere, torch.ones(2, SPEC.top_k, dtype=torch.float64))
    out.sum().backward()
    assert latent.grad is not None
    assert not latent.grad.any()


def test_grouping_orders_by_expert_and_drops_those_elsewhere() -> None:
    order, counts = group_by_expert(torch.tensor([[2, -1], [0, 2], [-1, 2]]), 4)
    assert order.tolist() == [2, 0, 3, 5]
    assert counts == [1, 0, 3, 0]


def test_the_sum_of_experts_is_float32_and_rounded_once() -> None:
    moe = MoE(SPEC, DIM, Precision())
    fill(moe)
    seen: list[Tensor] = []
    moe.latent_norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    x = draw(6, DIM).bfloat16()
    moe(x)
    ids, weights = moe.router(x)
    total = moe.experts(moe.latent_in(x), ids, weights)
    assert total.dtype == torch.float32
    assert torch.equal(seen[0], total.bfloat16())
    single = [moe.experts(moe.latent_in(x), ids[:, [j]], weights[:, [j]]) for j in range(3)]
    assert_near(total.double(), sum(single).double(), 1e-6)


def test_without_a_latent_norm_the_sum_goes_straight_on() -> None:
    moe, x = block(has_latent_norm=False), draw(4, DIM)
    ids, weights = moe.router(x)
    combined = moe.experts(moe.latent_in(x), ids, weights)
    assert_near(moe(x), moe.latent_out(combined) + moe.shared(x))
