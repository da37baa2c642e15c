"""What the forward pass sees in the quantised phase is bit for bit what the published files hold."""

from __future__ import annotations

import pytest
import torch
from tiny_runs import tiny_config

from workbench.nn.quant import MXFP4
from workbench.training.quantise import AsPublished, encode_expert, round_expert


def draw(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    normal = torch.randn(4, 24, 96, generator=generator)
    return {
        "normal": normal / 10,
        "wide": normal * torch.logspace(-20, 20, 96),
        "tiny": normal * 2.0**-120,
        "ties": torch.randint(-28, 29, (4, 24, 96), generator=generator) / 4.0,
        "zeros": torch.zeros(4, 24, 96),
        "one outlier": torch.cat([normal / 100, normal[..., :32] / 100 + 5 * torch.eye(32)[:24]], -1),
    }[kind]


KINDS = ("normal", "wide", "tiny", "ties", "zeros", "one outlier")


@pytest.mark.parametrize("kind", KINDS)
def test_the_fast_rounding_is_the_decoded_encoding(kind: str) -> None:
    weight = draw(kind)
    decoded = MXFP4().decode(encode_expert(weight), torch.float32)
    assert torch.equal(round_expert(weight), decoded)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_rounded_once_comes_back_exactly(kind: str) -> None:
    once = round_expert(draw(kind))
    assert torch.equal(round_expert(once), once)
    assert torch.equal(MXFP4().decode(encode_expert(once), torch.float32), once)


def test_choosing_scales_loses_less_than_the_usual_ones_in_every_group() -> None:
    weight, scheme = draw("normal"), MXFP4()

    def errors(rounded: torch.Tensor) -> torch.Tensor:
        return (rounded - weight).square().unflatten(-1, (-1, 32)).sum(-1)

    usual = scheme.exponents(weight)
    ours = errors(round_expert(weight))
    for offset in (-1, 0, 1, 2):  # no other power of two nearby would have lost less
        other = errors(scheme.decode(scheme.encode(weight, usual + offset), torch.float32))
        assert (ours <= other * (1 + 1e-6)).all(), offset
    assert ours.sum() < 0.93 * errors(scheme.decode(scheme.encode(weight), torch.float32)).sum()


def test_each_weight_is_rounded_as_it_will_be_stored() -> None:
    as_published = AsPublished(tiny_config().spec())
    weight = draw("normal")
    assert torch.equal(as_published("layers.1.ffn.experts.w1.weight", weight), round_expert(weight))
    assert torch.equal(as_published("layers.1.ffn.shared.up_proj.weight", weight), weight.bfloat16().float())
    for name in ("layers.0.mixer.A_log", "layers.0.mixer.q_conv.weight", "layers.0.mixer.dt_bias"):
        assert as_published(name, weight) is weight
