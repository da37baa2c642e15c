"""The delta rule: one step by its formula, chunks against token by token, values and gradients, any decay."""

from __future__ import annotations

import pytest
import torch
from nn_tiny import assert_near
from torch import Tensor

from workbench.nn.batch import Segments, TokenBatch
from workbench.nn.delta_rule import chunked, decayed_products, delta_rule, recurrent, step

HEADS, KEYS, VALUES = 3, 8, 5
LENGTHS = (2, 15, 16, 17, 63, 64, 65)
DECAYS = {
    "strongest": lambda shape, g: torch.full(shape, -5.0, dtype=torch.float64),
    "tiny": lambda shape, g: torch.full(shape, -1e-4, dtype=torch.float64),
    "none": lambda shape, g: torch.zeros(shape, dtype=torch.float64),
    "mixed": lambda shape, g: -5 * torch.rand(shape, generator=g, dtype=torch.float64),
    "either": lambda shape, g: -5.0 * (torch.rand(shape, generator=g) < 0.3).double(),
}


def segments_of(lengths: tuple[int, ...]) -> Segments:
    return Segments(TokenBatch.whole([[0] * length for length in lengths]))


def inputs(lengths: tuple[int, ...], decay: str, seed: int = 0) -> list[Tensor]:
    """q, k of unit length, v, g, beta for all tokens, and a start state for every sequence; float64."""
    g = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (draw(num_tokens, HEADS, KEYS), draw(num_tokens, HEADS, KEYS)))
    log_decay = DECAYS[decay]((num_tokens, HEADS, KEYS), g)
    state = draw(len(lengths), HEADS, VALUES, KEYS)
    return [q, k, draw(num_tokens, HEADS, VALUES), log_decay, draw(num_tokens, HEADS).sigmoid(), state]


def token_by_token(values: list[Tensor], segments: Segments) -> tuple[Tensor, Tensor]:
    """The reference for a packed batch."""
    *packed, state = values
    results = [recurrent(*(x[segments.rows_of(s)] for x in packed), state[s]) for s in range(segments.num_sequences)]
    return torch.cat([output for output, _ in results]), torch.stack([last for _, last in results])


def test_a_step_is_the_formula() -> None:
    q, k, v, g, beta, state = inputs((1,), "mixed")
    output, after = step(q, k, v, g, beta, state)
    for h in range(HEADS):
        s = state[0, h].T  # (key, value), as the papers write it
        s = torch.diag(g[0, h].exp()) @ s
        s = s + beta[0, h] * torch.outer(k[0, h], v[0, h] - s.T @ k[0, h])
        assert_near(after[0, h].T, s, 1e-14)
        assert_near(output[0, h], s.T @ q[0, h], 1e-14)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("size", [16, 32, 64])
def test_chunks_equal_token_by_token_in_float64(decay: str, size: int) -> None:
    values, segments = inputs(LENGTHS, decay), segments_of(LENGTHS)
    found, expected = chunked(*values, segments, size), token_by_token(values, segments)
    for name, a, b in zip(("output", "state"), found, expected, strict=True):
        assert_near(a, b, 1e-12, name)


@pytest.mark.parametrize("decay", ["strongest", "mixed", "tiny"])
def test_gradients_through_chunks_equal_those_token_by_token(decay: str) -> None:
    lengths = (17, 2, 33)
    gradients = []
    for form in (lambda x, s: chunked(*x, s, 16), token_by_token):
        values = [x.requires_grad_() for x in inputs(lengths, decay)]
        output, state = form(values, segments_of(lengths))
        weights = torch.Generator().manual_seed(1)
        loss = sum((x * torch.randn(x.shape, generator=weights, dtype=torch.float64)).sum() for x in (output, state))
        gradients.append(torch.autograd.grad(loss, values))
    for name, a, b in zip(("q", "k", "v", "g", "beta", "state"), *gradients, strict=True):
        assert torch.isfinite(a).all(), name
        assert_near(a, b, 1e-10, name)


@pytest.mark.parametrize("decay", DECAYS)
def test_chunks_in_float32_are_as_exact_as_token_by_token(decay: str) -> None:
    """With decays of e^-5 per token a chunk decays by e^-320: nothing may overflow, vanish to NaN or lose digits."""
    lengths = (64, 130)
    values, segments = inputs(lengths, decay), segments_of(lengths)
    exact = token_by_token(values, segments)
    single = [x.float() for x in values]
    for size in (16, 32, 64):
        for a, b, e in zip(chunked(*single, segments, size), token_by_token(single, segments), exact, strict=True):
            assert torch.isfinite(a).all()
            own, reference = (((x.double() - e).norm() / e.norm()).item() for x in (a, b))
            assert own < 4 * reference + 2e-6, f"chunk {size}: {own:.1e}, token by token {reference:.1e}"


@pytest.mark.parametrize("decay", DECAYS)
def test_one_decay_of_a_head_is_the_same_decay_of_all_its_channels(decay: str) -> None:
    q, k, v, g, beta, state = inputs(LENGTHS, decay)
    own, segments = g[..., :1].contiguous(), segments_of(LENGTHS)
    expected = token_by_token([q, k, v, own.expand_as(g), beta, state], segments)
    for size in (16, 32, 64):
        for name, a, b in zip(
            ("output", "state"), chunked(q, k, v, own, beta, state, segments, size), expected, strict=True
        ):
            assert_near(a, b, 1e-12, name)
    for a, b in zip(token_by_token([q, k, v, own, beta, state], segments), expected, strict=True):
        assert_near(a, b, 1e-12)


@pytest.mark.parametrize("strength", [1.0, 30.0, 400.0])
def test_a_decay_of_a_head_has_no_bound_in_float32(strength: float) -> None:
    """Forgetting e^-400 at one token and nothing at the next: sums over a chunk reach thousands, their parts count."""
    lengths = (64, 130)
    values, segments = inputs(lengths, "either"), segments_of(lengths)
    values[3] = values[3][..., :1] * strength
    exact, single = token_by_token(values, segments), [x.float() for x in values]
    for a, b, e in zip(chunked(*single, segments, 32), token_by_token(single, segments), exact, strict=True):
        own, plain = (((x.double() - e).norm() / e.norm()).item() for x in (a, b))
        assert own < 4 * plain + 2e-6, f"{own:.1e}, token by token {plain:.1e}"
    leaves = [x.requires_grad_() for x in single]
    output, state = chunked(*leaves, segments, 32)
    assert all(torch.isfinite(x).all() for x in torch.autograd.grad(output.sum() + state.sum(), leaves))


def test_gradients_in_float32_stay_finite_at_the_strongest_decay() -> None:
    values = [x.float().requires_grad_() for x in inputs((64,), "strongest")]
    output, state = chunked(*values, segments_of((64,)), 64)
    for gradient in torch.autograd.grad(output.sum() + state.sum(), values):
        assert torch.isfinite(gradient).all()


def test_equal_keys_written_at_full_strength_do_not_cancel() -> None:
    """The worst case of the triangular system: powers of its matrix grow to 10^17, its inverse stays small."""
    q, k, v, g, beta, state = inputs((64,), "none")
    values = [q, k[:1].expand_as(k).contiguous(), v, g, torch.ones_like(beta), state]
    expected, _ = token_by_token(values, segments_of((64,)))
    found, _ = chunked(*(x.float() for x in values), segments_of((64,)), 64)
    assert_near(found.double(), expected, 1e-5)


@pytest.mark.parametrize("lengths", [(1,), (1, 1, 1), (1, 2, 15, 16, 17, 63, 64, 65), (40, 1, 1, 3), (5,), ()])
def test_any_mix_of_lengths_equals_each_sequence_alone(lengths: tuple[int, ...]) -> None:
    values, segments = inputs(lengths, "mixed"), segments_of(lengths)
    output, state = delta_rule(*values, segments)
    assert output.shape == (sum(lengths), HEADS, VALUES)
    assert state.shape == (len(lengths), HEADS, VALUES, KEYS)
    if lengths:
        expected_output, expected_state = token_by_token(values, segments)
        assert_near(output, expected_output, 1e-12)
        assert_near(state, expected_state, 1e-12)


def test_a_sequence_going_on_in_pieces_equals_it_in_one_piece() -> None:
    *packed, state = inputs((50,), "mixed")
    expected, last = recurrent(*packed, state[0])
    outputs, start = [], 0
    for length in (16, 1, 20, 13):
        piece = [x[start : start + length] for x in packed]
        output, state = delta_rule(*piece, state, segments_of((length,)))
        outputs.append(output)
        start += length
    assert_near(torch.cat(outputs), expected, 1e-12)
    assert_near(state[0], last, 1e-12)


def test_decayed_products_are_the_sum_of_differences() -> None:
    q, k, _, g, _, _ = inputs((48,), "mixed")
    q, k, g = q.transpose(0, 1), k.transpose(0, 1), g.transpose(0, 1)
    total = g.cumsum(-2)
    differences = total[:, :, None] - total[:, None]  # (H, i, j, d)
    expected = torch.einsum("hid,hjd,hijd->hij", q, k, differences.clamp(max=0).exp()).tril()
    assert_near(decayed_products(q, k, g).tril(), expected, 1e-12)


def test_dividing_by_a_decay_that_underflowed_would_be_noticed() -> None:
    """The shortcut q e^G times k e^-G, which the blocks avoid, is not finite in float32 after 18 strong tokens."""
    q, k, _, g, _, _ = (x.float() for x in inputs((48,), "strongest"))
    q, k, g = q.transpose(0, 1), k.transpose(0, 1), g.transpose(0, 1)
    total = g.cumsum(-2)
    shortcut = (q * total.exp()) @ (k * (-total).exp()).mT
    assert not torch.isfinite(shortcut.tril()).all()
    assert torch.isfinite(decayed_products(q, k, g).tril()).all()
