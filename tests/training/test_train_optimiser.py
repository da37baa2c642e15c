"""The schedule, AdamW and Muon over regions, clipping, and bf16 models with float32 masters."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from tiny_runs import make_packs, tiny_config
from torch import Tensor

from workbench.nn.moe import Router
from workbench.parallel import Group, attach, build_stage, single_context
from workbench.placement import Layout
from workbench.spec import MoESpec
from workbench.training.config import OptimiserConfig
from workbench.training.initial import initialise
from workbench.training.masters import Masters, rule_of
from workbench.training.muon import Matrix, Muon, orthogonalise
from workbench.training.optimiser import Optimiser, learning_rate_share
from workbench.training.step import compute_gradients

CONFIG = tiny_config()


def make_masters(dtype: torch.dtype = torch.float32) -> Masters:
    ctx = single_context()
    precision = "fp32" if dtype == torch.float32 else "bf16"
    model = build_stage(CONFIG.spec(), Layout(), 0, precision=precision, dtype=dtype)
    model.to_empty(device="cpu")
    initialise(model, Layout(), 0, 7)
    attach(model, ctx)
    masters = Masters(model, ctx)
    masters.model = model  # type: ignore[attr-defined]  # for the tests
    masters.take_from_model()
    return masters


def test_the_schedule_rises_then_falls_along_a_cosine() -> None:
    config = OptimiserConfig(adam_lr=1.0, warmup_steps=10, final_share=0.1)
    shares = [learning_rate_share(step, 111, config) for step in range(111)]
    assert shares[0] == pytest.approx(0.1)
    assert shares[9] == shares[10] == pytest.approx(1.0)
    assert shares[60] == pytest.approx(0.55)
    assert shares[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in pairwise(shares[10:]))


def test_regions_sort_parameters_by_how_they_are_stepped() -> None:
    masters = make_masters()
    rules = {name: region.rule for region in masters.regions for name in region.views}
    assert {name for name, rule in rules.items() if rule == "matrix"} == {
        "embed.weight",
        "head.weight",
        "vision.patch_embed.weight",
        "vision.pos_embed.weight",
        *(f"layers.{i}.ffn.router.weight" for i in (1, 2, 3)),
    }
    vectors = ("norm.weight", "norm0.weight", "norm1.weight", "A_log", "dt_bias", "_conv.weight", "_res.proj.weight")
    assert all((rule == "vector") == name.endswith(vectors) for name, rule in rules.items())
    assert rules["layers.1.ffn.experts.w2.weight"] == "hidden"
    assert rule_of("head.weight", torch.empty(4, 3)) == "matrix"


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (32, 32)])
def test_muon_equals_torchs_own(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(3, *shape, generator=generator)
    singles = [torch.nn.Parameter(v.clone()) for v in values]
    theirs = torch.optim.Muon(singles, lr=0.02, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    grad = torch.empty_like(values)
    ours = Muon({"stack": Matrix(values, grad, Group("dp"))}, momentum=0.9, weight_decay=0.1)
    before = values.clone()
    for _ in range(3):
        grad.copy_(torch.randn(values.shape, generator=generator))
        for single, own in zip(singles, grad, strict=True):
            single.grad = own.clone()
        theirs.step()
        ours.step(0.02)
    moved = (values - before).norm()
    assert (values - torch.stack([s.detach() for s in singles])).norm() < 0.01 * moved  # both iterate in bf16


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    matrices = torch.randn(2, 20, 50, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices).float())
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_a_step_of_adam_is_torchs_and_vectors_do_not_decay() -> None:
    masters = make_masters()
    config = OptimiserConfig(adam_lr=0.01, weight_decay=0.5, clip_norm=1e9, warmup_steps=0)
    before = {name: value.clone() for name, value in masters.views.items()}
    for region in masters.regions:
        region.grad.copy_(torch.randn(region.grad.shape, generator=torch.Generator().manual_seed(3)))
    grads = {name: g.clone() for region in masters.regions for name, g in region.grad_views.items()}
    Optimiser(masters, config).step(0.5)
    for name, decay in (("head.weight", 0.5), ("layers.0.mixer.q_proj.weight", 0.5), ("final_norm.weight", 0.0)):
        parameter = torch.nn.Parameter(before[name].clone())
        parameter.grad = grads[name]
        torch.optim.AdamW(
            [parameter], lr=0.005, betas=(config.beta1, config.beta2), eps=config.eps, weight_decay=decay
        ).step()
        torch.testing.assert_close(masters.views[name], parameter.detach(), msg=name)


def test_gradients_are_clipped_to_the_norm_of_the_whole_model() -> None:
    masters = make_masters()
    for region in masters.regions:
        region.grad.normal_(generator=torch.Generator().manual_seed(3))
    expected = math.sqrt(sum(float(region.grad.double().square().sum()) for region in masters.regions))
    config = OptimiserConfig(adam_lr=1e-9, clip_norm=2.0)
    assert Optimiser(masters, config).step(1.0) == pytest.approx(expected, rel=1e-6)
    assert masters.grad_norm() == pytest.approx(2.0, rel=1e-5)


def test_a_bf16_model_gets_float32_gradients_near_those_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the experts that float32 chose: a token in seventy is near enough to a border for rounding to flip it, and
    another expert's gradient is no rounding error."""
    packs, ctx, grads = make_packs(2), single_context(), []
    chosen: list[Tensor] = []
    choose = Router.forward

    def remember(router: Router, x: Tensor) -> tuple[Tensor, Tensor]:
        ids, weights = choose(router, x)
        chosen.append(ids)
        return ids, weights

    def repeat(router: Router, x: Tensor) -> tuple[Tensor, Tensor]:
        ids = chosen.pop(0)
        weights = router.scores(x).gather(-1, ids)
        return ids, weights / weights.sum(-1, keepdim=True) * router.spec.routed_scale

    assert all(layer.ffn.renormalize for layer in CONFIG.spec().layers if isinstance(layer.ffn, MoESpec))
    for dtype, forward in ((torch.float32, remember), (torch.bfloat16, repeat)):
        monkeypatch.setattr(Router, "forward", forward)
        masters = make_masters(dtype)
        compute_gradients(masters.model, masters, ctx, packs)  # type: ignore[attr-defined]
        assert all(region.grad.dtype == torch.float32 for region in masters.regions)
        grads.append(torch.cat([region.grad for region in masters.regions]))
    assert not chosen, "both passes route alike"
    assert torch.nn.functional.cosine_similarity(grads[0], grads[1], dim=0) > 0.999


def test_steps_smaller_than_bf16_can_hold_add_up_in_the_masters() -> None:
    masters = make_masters(torch.bfloat16)
    name = "layers.0.mixer.q_proj.weight"
    view, seen = masters.views[name], masters.parameters[name]
    start = seen.detach().clone()
    for _ in range(64):
        view.mul_(1 + 2.0**-12)  # a sixteenth of what bf16 can tell apart
        masters.publish()
    assert not torch.equal(seen, start)
    ratio = (seen.detach().float() / start.float())[start != 0]
    assert float(ratio.median()) == pytest.approx((1 + 2.0**-12) ** 64, rel=0.01)
