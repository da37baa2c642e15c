"""Every kind of router against the plain-number reference, and stored tiles against theirs."""

from __future__ import annotations

import pytest
import torch

from workbench.nn.quant import FP8Tiles
from workbench.nn.quant.fp8_tiles import decode_fp8_tiles_reference
from workbench.nn.router import Router
from workbench.spec import MoESpec
from workbench.spec.dialect import plain_moe
from workbench.spec.routing import choose_experts

KINDS: dict[str, dict[str, object]] = {
    "sigmoid": {},
    "groups": {"num_groups": 4, "top_groups": 2},
    "not renormalised": {"renormalize": False},
    "softmax": {"scoring": "softmax", "has_correction_bias": False},
    "softmax as it is": {"scoring": "softmax", "has_correction_bias": False, "renormalize": False},
    "softmax of the chosen": {"scoring": "softmax_topk", "has_correction_bias": False, "has_router_bias": True},
}


def moe(**options: object) -> MoESpec:
    sizes = {"num_experts": 12, "top_k": 3, "width": 8, "hidden_size": 10, "norm_eps": 1e-5, "routed_scale": 2.5}
    return plain_moe(**(sizes | options))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_a_router_chooses_and_weighs_as_the_reference(kind: str) -> None:
    spec = moe(**KINDS[kind])
    g = torch.Generator().manual_seed(4)
    router = Router(spec, 10, torch.float32)
    for parameter in router.parameters():
        parameter.data = torch.randn(parameter.shape, generator=g)
    x = torch.randn(40, 10, generator=g)
    ids, weights = router(x)
    logits = x.double() @ router.weight.double().T
    if router.logit_bias is not None:
        logits = logits + router.logit_bias.double()
    for token in range(len(x)):
        correction = None if router.bias is None else router.bias.tolist()
        wanted_ids, wanted = choose_experts(spec, logits[token].tolist(), correction)
        assert tuple(ids[token].tolist()) == wanted_ids
        assert weights[token].tolist() == pytest.approx(wanted, rel=2e-5)


def test_negative_corrections_do_not_let_a_lost_group_in() -> None:
    """All choices below zero: a mask of zeros, which some code has, would choose from the groups that lost."""
    router = Router(moe(num_groups=4, top_groups=2), 10, torch.float32)
    router.weight.data, router.bias.data = torch.randn(12, 10), torch.full((12,), -5.0)
    ids, _ = router(torch.randn(50, 10))
    assert all(len({expert // 3 for expert in row}) <= 2 for row in ids.tolist())


@pytest.mark.parametrize("shape", [(1, 1), (8, 8), (19, 21), (16, 40)])
def test_tiles_decode_as_the_reference(shape: tuple[int, int]) -> None:
    g = torch.Generator().manual_seed(4)
    values = (torch.randn(shape, generator=g) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-shape[0] // 8), -(-shape[1] // 8), generator=g)
    found = FP8Tiles(8).decode({"weight": values, "weight_scale_inv": scale}, torch.float64)
    wanted = decode_fp8_tiles_reference(values, scale, 8)
    assert (found - wanted).abs().max() <= 2.0**-24 * wanted.abs().max()
