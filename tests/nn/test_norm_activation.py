"""Norms and activations: formulas, where rounding happens, and values far out."""

from __future__ import annotations

import pytest
import torch

from workbench.nn.activation import gated_activation
from workbench.nn.norm import GatedRMSNorm, RMSNorm
from workbench.spec import Activation

SITU = Activation(kind="situ", beta=4.0, linear_beta=25.0)


def draw(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scale", [1.0, 1e-2, 3e-3, 1e-10, 1e15])
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_rms_norm_at_any_scale(scale: float, eps: float) -> None:
    norm, x = RMSNorm(48, eps), draw(5, 48) * scale
    norm.weight.data = 1 + draw(48, seed=4) / 5
    exact = norm.weight.double() * x.double() / torch.sqrt((x.double() ** 2).mean(-1, keepdim=True) + eps)
    torch.testing.assert_close(norm(x).double(), exact, rtol=1e-6, atol=0)


def test_rms_norm_rounds_before_the_weight_multiplies() -> None:
    norm, x = RMSNorm(48, 1e-5, torch.bfloat16), draw(50, 48).bfloat16()
    norm.weight.data = (1 + draw(48, seed=4) / 5).bfloat16()
    normalised = x.float() / torch.sqrt((x.float() ** 2).mean(-1, keepdim=True) + 1e-5)
    assert torch.equal(norm(x), norm.weight * normalised.bfloat16())
    assert not torch.equal(norm(x), (norm.weight.float() * normalised).bfloat16())


def test_a_norm_stored_as_a_difference_adds_it_in_float32_and_rounds_once() -> None:
    norm, x = RMSNorm(48, 1e-5, torch.bfloat16, offset=1.0), draw(50, 48).bfloat16()
    norm.weight.data = (draw(48, seed=4) / 50).bfloat16()
    exact = x.double() / torch.sqrt((x.double() ** 2).mean(-1, keepdim=True) + 1e-5) * (1 + norm.weight.double())
    found = norm(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=0)
    early = RMSNorm(48, 1e-5, torch.bfloat16)
    early.weight.data = 1 + norm.weight.data  # what is lost where the sum is stored in 16 bits
    assert not torch.equal(early(x), found)


def test_the_gated_norm_rounds_once_and_its_gate_is_a_sigmoid() -> None:
    norm, x, gate = GatedRMSNorm(16, 1e-5), draw(50, 3, 16), draw(50, 3, 16, seed=5).bfloat16()
    norm.weight.data = 1 + draw(16, seed=4) / 5
    exact = norm.weight.double() * x.double() / torch.sqrt((x.double() ** 2).mean(-1, keepdim=True) + 1e-5)
    exact = exact * torch.sigmoid(gate.double())
    found = norm(x, gate)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=0)
    assert (found == exact.bfloat16()).double().mean() > 0.999  # one rounding, but for ties


def test_situ_over_a_wide_range_equals_float64() -> None:
    points = torch.cat([torch.logspace(-20, 30, 101), torch.tensor([0.0])])
    points = torch.cat([points, -points])
    gate, up = torch.meshgrid(points, points, indexing="ij")
    g, u = gate.double(), up.double()
    exact = 4 * torch.tanh(g / 4) / (1 + torch.exp(-g)) * 25 * torch.tanh(u / 25)
    found = gated_activation(SITU, gate, up)
    assert torch.isfinite(found).all()
    # Far left the sigmoid underflows in float32 (below e^-87) while float64 still counts.
    torch.testing.assert_close(found.double(), exact, rtol=2e-6, atol=1e-36)
    assert found.abs().max() <= 100


def test_situ_is_silu_times_up_near_zero_and_saturates_on_both_branches() -> None:
    small = torch.tensor([1e-3], dtype=torch.float64)
    torch.testing.assert_close(
        gated_activation(SITU, small, small), small * torch.sigmoid(small) * small, rtol=1e-6, atol=0
    )
    far = torch.tensor([1e4])
    assert gated_activation(SITU, far, far).item() == 100.0
    assert gated_activation(SITU, far, -far).item() == -100.0
    assert gated_activation(SITU, torch.tensor([2.0]), far).item() < 50


def test_activations_are_computed_in_float32_and_rounded_once() -> None:
    gate, up = draw(2000).bfloat16() * 3, draw(2000, seed=4).bfloat16() * 9
    for kind in (SITU, Activation(kind="silu")):
        exact = gated_activation(kind, gate.double(), up.double())
        found = gated_activation(kind, gate, up)
        assert found.dtype == torch.bfloat16
        assert (found == exact.bfloat16()).double().mean() > 0.999


def test_silu_is_the_ordinary_gated_unit() -> None:
    gate, up = draw(7).double(), draw(7, seed=4).double()
    torch.testing.assert_close(gated_activation(Activation(kind="silu"), gate, up), gate / (1 + torch.exp(-gate)) * up)
