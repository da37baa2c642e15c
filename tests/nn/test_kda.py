"""KDA as a block: against the formulas written out plainly, and the parts that are easy to get wrong."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from nn_tiny import KDA as SPEC
from nn_tiny import assert_near, batch_of, fill, tiny_cache, tiny_model
from torch import Tensor
from torch.nn import functional as F

from workbench.nn import Precision, Segments, TokenBatch
from workbench.nn.kda import KDA, ShortConv

DIM = 40


def block(seed: int = 0) -> KDA:
    mixer = KDA(SPEC, DIM, 0, Precision("fp32", torch.float64))
    fill(mixer, seed)
    return mixer.requires_grad_(False)


def draw(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(m: KDA, x: Tensor) -> Tensor:
    """One sequence, straight from the published formulas, in float64."""
    num_tokens, heads, dim = x.shape[0], SPEC.num_heads, SPEC.head_dim

    def convolved(projection: Tensor, taps: Tensor) -> Tensor:
        padded = F.pad((x @ projection.T).T, (SPEC.conv_size - 1, 0))
        y = F.conv1d(padded[None], taps.double(), groups=taps.shape[0])[0].T
        return (y * torch.sigmoid(y)).view(num_tokens, heads, dim)

    q, k, v = (
        convolved(m.get_parameter(f"{n}_proj.weight"), m.get_parameter(f"{n}_conv.weight")) for n in ("q", "k", "v")
    )
    q = q / torch.sqrt((q * q).sum(-1, keepdim=True) + 1e-6) / dim**0.5
    k = k / torch.sqrt((k * k).sum(-1, keepdim=True) + 1e-6)
    z = (x @ m.f_a_proj.weight.T @ m.f_b_proj.weight.T + m.dt_bias).view(num_tokens, heads, dim)
    alpha = torch.exp(-5.0 / (1 + torch.exp(-torch.exp(m.A_log.double())[:, None] * z)))
    beta = 1 / (1 + torch.exp(-(x @ m.b_proj.weight.T)))
    gate = (1 / (1 + torch.exp(-(x @ m.g_proj.weight.T)))).view(num_tokens, heads, dim)
    rows = []
    for h in range(heads):
        s = torch.zeros(dim, dim, dtype=torch.float64)
        outputs = []
        for t in range(num_tokens):
            s = alpha[t, h][:, None] * s
            s = s + beta[t, h] * torch.outer(k[t, h], v[t, h] - s.T @ k[t, h])
            outputs.append(s.T @ q[t, h])
        o = torch.stack(outputs)
        o = o / torch.sqrt((o * o).mean(-1, keepdim=True) + SPEC.norm_eps)
        rows.append(o * m.o_norm.weight * gate[:, h])
    return torch.cat(rows, -1) @ m.o_proj.weight.T


def test_the_block_is_the_published_formulas() -> None:
    mixer, x = block(), draw(21, DIM)
    segments = Segments(TokenBatch.whole([[0] * 21]))
    assert_near(mixer(x, segments, None), by_hand(mixer, x))


@pytest.mark.parametrize(
    "change",
    [{"l2_eps": 1e-5}, {"decay_bound": -4.0}],
    ids=["another epsilon under the length of q and k", "another decay bound"],
)
def test_a_wrong_constant_is_noticed(change: dict[str, float]) -> None:
    mixer, x = block(), draw(21, DIM)
    segments = Segments(TokenBatch.whole([[0] * 21]))
    right = mixer(x, segments, None)
    mixer.spec = dataclasses.replace(SPEC, **change)
    with pytest.raises(AssertionError, match="max"):
        assert_near(mixer(x, segments, None), right, 1e-7)


def test_the_log_decay_lies_between_the_bound_and_zero_per_head_and_channel() -> None:
    mixer = block()
    z = torch.linspace(-1e4, 1e4, 48 * 9, dtype=torch.float64).view(9, 48)
    g = mixer._log_decay(z)
    assert g.shape == (9, 6, 8)
    assert (g >= -5).all()
    assert (g <= 0).all()
    before = mixer._log_decay(z / 1e4)
    mixer.A_log[2] += 1  # one steepness per head, not per channel
    changed = (before != mixer._log_decay(z / 1e4)).all(-1).any(0)
    assert changed.tolist() == [False, False, True, False, False, False]


def test_the_convolution_sees_its_own_sequence_only_and_the_newest_tap_is_last() -> None:
    conv = ShortConv(3, 4)
    conv.weight.data = torch.tensor([1.0, 10.0, 100.0, 1000.0]).repeat(3, 1, 1)
    segments = Segments(TokenBatch.whole([[0, 0], [0, 0, 0]]))
    before = torch.zeros(2, 3, 3)
    before[0, :, 2] = 5.0  # the last input before the first sequence
    x = torch.tensor([1.0, 2, 3, 4, 6])[:, None].expand(5, 3)
    sums = [1500.0, 2150.0, 3000.0, 4300.0, 6430.0]
    assert_near(conv(x, segments, before)[:, 0], torch.tensor(sums), 1e-6)  # SiLU is the identity this far out
    assert conv.tail(x, segments, before)[:, 0].tolist() == [[5, 1, 2], [3, 4, 6]]
    sums[:2] = [1000.0, 2100.0]  # nothing before the first sequence
    assert_near(conv(x, segments)[:, 0], torch.tensor(sums), 1e-6)


@pytest.mark.parametrize("lengths", [(2, 7, 1, 3), (1,), (2,)])
def test_whole_sequences_are_convolved_as_with_zeros_before_them_gradients_too(lengths: tuple[int, ...]) -> None:
    segments = Segments(TokenBatch.whole([[0] * length for length in lengths]))
    x, taps = draw(sum(lengths), 3).requires_grad_(), draw(3, 1, 4, seed=4).requires_grad_()
    conv = ShortConv(3, 4)
    del conv.weight
    conv.weight = taps  # float64, unlike a parameter of the module
    outputs = conv(x, segments), conv(x, segments, torch.zeros(len(lengths), 3, 3, dtype=torch.float64))
    assert_near(outputs[0], outputs[1], 1e-14)
    weights = draw(sum(lengths), 3, seed=5)
    found, expected = (torch.autograd.grad((y * weights).sum(), (x, taps)) for y in outputs)
    for a, b in zip(found, expected, strict=True):
        assert_near(a, b, 1e-13)


def test_the_cache_keeps_the_last_inputs_and_the_state_of_its_own_slot() -> None:
    model, slots = tiny_model(), (3, 1)
    cache = tiny_cache(model)
    first, second = [1, 2, 3, 4, 5], [6, 7]
    inputs: list[Tensor] = []
    model.layers["0"].mixer.k_proj.register_forward_hook(lambda _, __, output: inputs.append(output))
    model(batch_of([(3, 0, first), (1, 0, second)]), cache=cache)
    conv = cache.conv[0][:, 1]  # k
    assert torch.equal(conv[3], inputs[0][2:5].T)
    assert torch.equal(conv[1], F.pad(inputs[0][5:7].T, (1, 0)))
    for table in (cache.conv[0], cache.state[0]):
        assert {slot for slot in range(4) if table[slot].any()} == set(slots)


def test_the_state_stays_float32_while_activations_are_bf16() -> None:
    mixer = KDA(SPEC, DIM, 0, Precision("bf16", torch.bfloat16))
    fill(mixer)
    seen: list[torch.dtype] = []
    mixer.o_norm.register_forward_pre_hook(lambda _, args: seen.extend(x.dtype for x in args))
    segments = Segments(TokenBatch.whole([[0] * 5]))
    assert mixer(draw(5, DIM).bfloat16(), segments, None).dtype == torch.bfloat16
    assert seen == [torch.bfloat16, torch.bfloat16]
    model = tiny_model(precision="bf16", dtype=None)
    assert {x.dtype for x in tiny_cache(model).state.values()} == {torch.float32}
    assert {x.dtype for x in tiny_cache(model).conv.values()} == {torch.bfloat16}
