"""Block attention residuals: the mix by its formula, what is saved when, and the payload between stages."""

from __future__ import annotations

import torch
from nn_tiny import assert_near, fill
from torch import Tensor

from workbench.nn.residual import ResidualMix, ResidualStream


def draw(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mixer() -> ResidualMix:
    mix = ResidualMix(11, 1e-5, torch.float64)
    fill(mix)
    return mix.requires_grad_(False)


def test_the_mix_weighs_raw_sources_by_scores_of_normalised_ones() -> None:
    mix, sources = mixer(), tuple(draw(5, 11, seed=s) * 3**s for s in range(4))
    found = mix(sources)
    for t in range(5):
        scores = []
        for v in sources:
            normed = v[t] / torch.sqrt((v[t] ** 2).mean() + 1e-5)
            scores.append((normed * mix.norm.weight * mix.proj.weight[0]).sum())
        weights = torch.softmax(torch.stack(scores), 0)
        assert_near(found[t], sum(w * v[t] for w, v in zip(weights, sources, strict=True)))


def test_one_source_is_passed_through() -> None:
    v = draw(5, 11)
    assert_near(mixer()((v,)), v)


def test_the_mix_is_done_in_float32_and_rounded_once() -> None:
    mix = ResidualMix(11, 1e-5, torch.bfloat16)
    fill(mix)
    sources = tuple(draw(50, 11, seed=s).bfloat16() for s in range(3))
    wide = ResidualMix(11, 1e-5, torch.float64)
    wide.norm.weight.data, wide.proj.weight.data = mix.norm.weight.data.double(), mix.proj.weight.data.double()
    exact = wide(tuple(v.double() for v in sources))
    found = mix(sources)
    assert found.dtype == torch.bfloat16
    assert (found == exact.bfloat16()).double().mean() > 0.995


def test_a_stream_reads_its_running_sum_until_something_is_saved() -> None:
    x, mix = draw(5, 11), mixer()
    stream = ResidualStream((), x)
    assert stream.mix(mix) is x
    stream = stream.save()
    assert stream.running is None
    assert_near(stream.mix(mix), x)
    y = draw(5, 11, seed=4)
    stream = stream.add(y)
    assert stream.running is y  # it begins anew: nothing of x is in it
    assert_near(stream.mix(mix), mix((x, y)))
    assert_near(stream.add(y).running, 2 * y)
    assert ResidualStream((x,), y).mix(None) is y


def test_streams_are_values_and_adding_makes_a_new_one() -> None:
    x = draw(5, 11)
    kept = x.clone()
    stream = ResidualStream((), x).save().add(x)
    stream.add(draw(5, 11, seed=4))
    assert torch.equal(stream.saved[0], kept)
    assert torch.equal(stream.running, kept)


def test_the_payload_carries_saved_sums_in_order_and_then_the_running_sum() -> None:
    parts = [draw(5, 11, seed=s) for s in range(4)]
    stream = ResidualStream(tuple(parts[:3]), parts[3])
    payload = stream.payload()
    assert torch.equal(payload, torch.stack(parts))
    back = ResidualStream.from_payload(payload)
    assert all(torch.equal(a, b) for a, b in zip((*back.saved, back.running), parts, strict=True))
    rows = stream.rows(torch.tensor([4, 0]))
    assert all(torch.equal(a, b[[4, 0]]) for a, b in zip((*rows.saved, rows.running), parts, strict=True))
