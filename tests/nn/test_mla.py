"""Latent attention: the two forms against each other and against plain attention, masks, the cache."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from nn_tiny import MLA as SPEC
from nn_tiny import assert_near, batch_of, fill, random_ids, tiny_cache, tiny_model
from torch import Tensor

from workbench.base import UnsupportedModelError
from workbench.nn import Precision, Segments, TokenBatch
from workbench.nn.mla import MLA, absorbed_attention, naive_attention

DIM, HEADS = 40, SPEC.num_heads


def draw(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kv_b() -> Tensor:
    return draw(HEADS * (SPEC.nope_dim + SPEC.v_dim), SPEC.kv_rank, seed=4) / SPEC.kv_rank**0.5


def plain_attention(q: Tensor, latent: Tensor, weight: Tensor) -> Tensor:
    """The last n of L tokens, head by head and token by token."""
    num_new, num_all = q.shape[0], latent.shape[0]
    c, shared = latent[:, : SPEC.kv_rank], latent[:, SPEC.kv_rank :]
    output = q.new_zeros(num_new, HEADS, SPEC.v_dim)
    for h in range(HEADS):
        own = weight[h * (SPEC.nope_dim + SPEC.v_dim) : (h + 1) * (SPEC.nope_dim + SPEC.v_dim)]
        keys = torch.cat([c @ own[: SPEC.nope_dim].T, shared], -1)
        values = c @ own[SPEC.nope_dim :].T
        for i in range(num_new):
            seen = num_all - num_new + i + 1
            scores = keys[:seen] @ q[i, h] / (SPEC.nope_dim + SPEC.rope_dim) ** 0.5
            output[i, h] = torch.softmax(scores, 0) @ values[:seen]
    return output


@pytest.mark.parametrize(("num_new", "num_all"), [(1, 1), (7, 7), (3, 11), (1, 20)])
def test_the_naive_form_is_plain_causal_attention(num_new: int, num_all: int) -> None:
    q, latent = draw(num_new, HEADS, SPEC.qk_dim), draw(num_all, SPEC.cache_dim, seed=5)
    assert_near(naive_attention(q, latent, kv_b(), SPEC), plain_attention(q, latent, kv_b()))


def test_values_wider_than_keys_are_not_padded() -> None:
    spec = dataclasses.replace(SPEC, v_dim=25)
    q, latent, weight = draw(5, HEADS, spec.qk_dim), draw(5, spec.cache_dim), draw(HEADS * 39, spec.kv_rank)
    output = naive_attention(q, latent, weight, spec)
    assert output.shape == (5, HEADS, 25)
    first = latent[0, : spec.kv_rank] @ weight.view(HEADS, 39, -1)[:, 14:].mT  # the first token sees only itself
    assert_near(output[0], first)


def test_the_absorbed_form_equals_the_naive_form_for_every_length_at_once() -> None:
    lengths = (1, 9, 4, 30)
    q, latent = draw(4, HEADS, SPEC.qk_dim), draw(4, 30, SPEC.cache_dim, seed=5)
    for s, length in enumerate(lengths):
        latent[s, length:] = float("nan")  # left behind by whoever had the slot before
    found = absorbed_attention(q, latent, torch.tensor(lengths), kv_b(), SPEC)
    for s, length in enumerate(lengths):
        expected = naive_attention(q[s : s + 1], latent[s, :length], kv_b(), SPEC)
        assert_near(found[s : s + 1], expected, what=f"length {length}")


def test_the_block_is_the_published_formulas() -> None:
    mixer = MLA(SPEC, DIM, 0, Precision("fp32", torch.float64))
    fill(mixer)
    x = draw(13, DIM) / 40  # small, so that the norms' own epsilon of 1e-6 shows

    def norm(v: Tensor, weight: Tensor) -> Tensor:
        return weight * v / torch.sqrt((v * v).mean(-1, keepdim=True) + 1e-6)

    q = (norm(x @ mixer.q_a_proj.weight.T, mixer.q_a_norm.weight) @ mixer.q_b_proj.weight.T).view(13, HEADS, -1)
    down = x @ mixer.kv_a_proj.weight.T
    latent = torch.cat([norm(down[:, : SPEC.kv_rank], mixer.kv_a_norm.weight), down[:, SPEC.kv_rank :]], -1)
    attended = plain_attention(q, latent, mixer.kv_b_proj.weight).reshape(13, -1)
    expected = (attended / (1 + torch.exp(-(x @ mixer.g_proj.weight.T)))) @ mixer.o_proj.weight.T
    segments = Segments(TokenBatch.whole([[0] * 13]))
    assert_near(mixer(x, segments, None), expected)
    mixer.kv_a_norm.eps = 1e-5
    with pytest.raises(AssertionError, match="max"):
        assert_near(mixer(x, segments, None), expected, 1e-4)


def test_the_cache_holds_normed_latent_and_raw_shared_key_at_slot_and_position() -> None:
    model, ids = tiny_model(), random_ids(6)
    cache, outputs = tiny_cache(model), {}
    mixer = model.layers["2"].mixer
    for name in ("kv_a_norm", "kv_a_proj"):
        mixer.get_submodule(name).register_forward_hook(lambda _, __, out, name=name: outputs.update({name: out}))
    model(batch_of([(2, 0, ids[:4])]), cache=cache)
    model(batch_of([(2, 4, ids[4:])]), cache=cache)
    latent = cache.latent[2].dense()
    assert torch.equal(latent[2, 4:6, : SPEC.kv_rank], outputs["kv_a_norm"])
    assert torch.equal(latent[2, 4:6, SPEC.kv_rank :], outputs["kv_a_proj"][:, SPEC.kv_rank :])
    assert latent[2, :6].any(-1).all()
    assert not latent[2, 6:].any()
    assert not latent[[0, 1, 3]].any()


def test_gradients_flow_through_both_forms_alike() -> None:
    q = draw(1, HEADS, SPEC.qk_dim).requires_grad_()
    latent, weight = draw(9, SPEC.cache_dim).requires_grad_(), kv_b().requires_grad_()
    naive = naive_attention(q, latent, weight, SPEC)
    absorbed = absorbed_attention(q, latent[None], torch.tensor([9]), weight, SPEC)
    target = draw(*naive.shape, seed=8)
    for a, b in zip(
        *(torch.autograd.grad((y * target).sum(), (q, latent, weight)) for y in (naive, absorbed)), strict=True
    ):
        assert_near(a, b)


def test_rotary_positions_without_their_settings_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="needs their settings"):
        MLA(dataclasses.replace(SPEC, has_rotary=True), DIM, 0, Precision())
