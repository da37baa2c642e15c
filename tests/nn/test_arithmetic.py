"""Products of bf16 matrices: the same with and without units for them, and rounded once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.nn import arithmetic
from workbench.nn.arithmetic import attention, linear


@pytest.fixture(params=[True, False], ids=["units", "no units"])
def units(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(arithmetic, "cpu_multiplies_bf16", lambda: request.param)
    return request.param


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64).bfloat16()


def one_rounding(exact: Tensor) -> Tensor:
    """Half a unit in the last place of bf16 (8 bits), and a little for the order of sums."""
    return exact.abs() * 2**-8 + exact.abs().max() * 2**-9


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_rounded_once(units: bool, rows: int, has_bias: bool) -> None:
    x, weight, bias = draw(rows, 48), draw(20, 48), draw(20) if has_bias else None
    found = linear(x, weight, bias)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert found.dtype == torch.bfloat16
    assert ((found.double() - exact).abs() <= one_rounding(exact)).all()


def test_attention_is_that_of_the_exact_values(units: bool) -> None:
    q, k, v = draw(1, 2, 5, 16), draw(1, 2, 5, 16).flip(-1), draw(1, 2, 5, 16).roll(3, -1)
    found = attention(q, k, v, is_causal=True, scale=0.3)
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True, scale=0.3)
    assert found.dtype == torch.bfloat16
    assert ((found.double() - exact).abs() <= 2 * one_rounding(exact)).all()


def test_without_units_no_bf16_product_reaches_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "cpu_multiplies_bf16", lambda: False)
    seen: list[torch.dtype] = []
    real = F.linear
    monkeypatch.setattr(F, "linear", lambda x, w, b=None: seen.append(x.dtype) or real(x, w, b))
    linear(draw(3, 8), draw(4, 8))
    linear(draw(3, 8).float(), draw(4, 8).float())
    assert seen == [torch.float32, torch.float32]


def test_other_types_are_torchs_own(units: bool) -> None:
    x, weight = draw(3, 8).float(), draw(4, 8).float()
    assert torch.equal(linear(x, weight), F.linear(x, weight))
