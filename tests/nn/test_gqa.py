"""Grouped-query attention, its rotation and its norms, against plain float64 references."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from nn_tiny import assert_near, batch_of
from torch import Tensor

from workbench.base import RequestError
from workbench.nn import Precision, Segments
from workbench.nn.gqa import GQA, attend, attention_reference
from workbench.nn.norm import AcrossHeadsRMSNorm
from workbench.nn.rotary import image_positions, rotary_table, rotate, rotate_reference
from workbench.spec import GQASpec, LlamaScaling, RopeSpec, YarnSpec

HEADS, KV_HEADS, WIDTH, V_WIDTH = 6, 2, 10, 7
YARN = YarnSpec(factor=4.0, original_context=16, beta_fast=4.0)
LLAMA = LlamaScaling(factor=8.0, original_context=48, low_freq_factor=1.0, high_freq_factor=4.0)


def draw(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("v_dim", [V_WIDTH, WIDTH, 13])
@pytest.mark.parametrize("window", [None, 1, 4, 30])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention_of_whole_and_continued_sequences_equals_the_reference(
    v_dim: int, window: int | None, has_sinks: bool
) -> None:
    sinks = draw(HEADS, seed=9) if has_sinks else None
    for start, num_new in ((0, 11), (5, 4), (10, 1)):
        q, k = draw(2, num_new, HEADS, WIDTH), draw(2, start + num_new, KV_HEADS, WIDTH, seed=4)
        v = draw(2, start + num_new, KV_HEADS, v_dim, seed=5)
        starts = torch.tensor([start, start]) if start else None
        found = attend(q, k, v, starts=starts, window=window, sinks=sinks)
        for s in range(2):
            wanted = attention_reference(q[s], k[s], v[s], start=start, window=window, sinks=sinks)
            assert_near(found[s], wanted, what=f"from {start}")


@pytest.mark.parametrize("chunk", [1, 4, 30])
def test_attention_within_chunks_of_positions_equals_the_reference(chunk: int) -> None:
    for start, num_new in ((0, 11), (5, 4), (10, 1), (12, 1)):
        q, k = draw(1, num_new, HEADS, WIDTH), draw(1, start + num_new, KV_HEADS, WIDTH, seed=4)
        v = draw(1, start + num_new, KV_HEADS, V_WIDTH, seed=5)
        found = attend(q, k, v, starts=torch.tensor([start]) if start else None, chunk=chunk)
        assert_near(found[0], attention_reference(q[0], k[0], v[0], start=start, chunk=chunk), what=f"from {start}")


def test_a_sink_takes_its_share_and_adds_nothing() -> None:
    q, k, v = draw(1, 5, HEADS, WIDTH), draw(1, 5, KV_HEADS, WIDTH), draw(1, 5, KV_HEADS, V_WIDTH)
    without = attend(q, k, v, starts=None)
    assert_near(attend(q, k, v, starts=None, sinks=torch.full((HEADS,), -1e4).double()), without)
    assert attend(q, k, v, starts=None, sinks=torch.full((HEADS,), 1e4).double()).abs().max() == 0


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("scaling", [{}, {"yarn": YARN}, {"llama": LLAMA}], ids=["plain", "yarn", "llama3"])
@pytest.mark.parametrize("dim", [WIDTH, 6])
def test_rotation_equals_the_reference_and_leaves_other_columns(
    is_interleaved: bool, scaling: dict[str, object], dim: int
) -> None:
    rope = RopeSpec(theta=500.0, dim=dim, is_interleaved=is_interleaved, **scaling)  # type: ignore[arg-type]
    segments = Segments(batch_of([(0, 3, [5, 6, 7]), (1, 0, [8, 9])]))
    x = draw(5, HEADS, WIDTH)
    found = rotate(x, rotary_table(rope, segments), is_interleaved=is_interleaved)
    for head in range(HEADS):
        wanted = rotate_reference(x[:, head], segments.positions, rope)
        assert (found[:, head] - wanted).abs().max() < 4e-6  # angles are float32
    assert torch.equal(found[..., dim:], x[..., dim:])
    assert rotary_table(rope, segments) is rotary_table(rope, segments)


@pytest.mark.parametrize(
    ("takes_turns", "axes"), [(True, (0, 1, 2, 0, 1, 0)), (False, (0, 0, 0, 1, 1, 2))], ids=["in turns", "in blocks"]
)
def test_rotation_over_several_axes_turns_each_pair_by_its_own(takes_turns: bool, axes: tuple[int, ...]) -> None:
    rope = RopeSpec(theta=50.0, dim=12, sections=(3, 2, 1), has_interleaved_sections=takes_turns)
    assert rope.axes == axes
    batch = batch_of([(0, 0, [5, 6, 7])])
    places = torch.tensor([[0, 1, 1], [0, 4, 9], [0, 2, 7]])
    x = draw(3, HEADS, 12)
    plain = rotate(x, rotary_table(rope, Segments(batch)), is_interleaved=False)
    alone = RopeSpec(theta=50.0, dim=12)
    assert_near(plain, rotate(x, rotary_table(alone, Segments(batch)), is_interleaved=False))  # text: one axis
    found = rotate(x, rotary_table(rope, Segments(replace(batch, rope_positions=places))), is_interleaved=False)
    by_axis = [rotate_reference(x[:, 2], places[axis], alone) for axis in range(3)]
    for pair, axis in enumerate(axes):
        for column in (pair, pair + 6):
            assert (found[:, 2, column] - by_axis[axis][:, column]).abs().max() < 4e-6  # angles are float32
    with pytest.raises(RequestError, match="three for each token"):
        replace(batch, rope_positions=places[:2])


def test_images_stand_on_a_plane_and_text_goes_on_behind_their_longer_side() -> None:
    is_image = [False, *[True] * 6, False, *[True] * 2, False]
    assert image_positions(is_image, [(2, 3), (2, 1)]).tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 4, 5, 5, 7],
        [0, 1, 1, 1, 2, 2, 2, 4, 5, 6, 7],
        [0, 1, 2, 3, 1, 2, 3, 4, 5, 5, 7],
    ]
    assert image_positions([False] * 3, []).tolist() == [[0, 1, 2]] * 3
    for grids in ([], [(2, 3)], [(2, 3), (2, 2)], [(2, 3), (2, 1), (1, 1)]):
        with pytest.raises(RequestError, match="differ in number"):
            image_positions(is_image, grids)


def test_an_output_gate_lies_behind_the_query_of_each_head_and_scales_what_the_head_gives() -> None:
    spec = GQASpec(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=WIDTH, v_dim=WIDTH, rope=None, has_output_gate=True)
    block = GQA(spec, 16, 0, Precision("fp32", torch.float64)).requires_grad_(False)
    for i, parameter in enumerate(block.parameters()):
        parameter.data = draw(*parameter.shape, seed=i) / 4
    x = draw(7, 16)
    both = (x @ block.q_proj.weight.T).view(7, HEADS, 2 * WIDTH)
    k, v = ((x @ y.weight.T).view(7, KV_HEADS, WIDTH) for y in (block.k_proj, block.v_proj))
    wanted = attention_reference(both[..., :WIDTH], k, v) * both[..., WIDTH:].sigmoid()
    assert_near(block(x, Segments(batch_of([(0, 0, [0] * 7)])), None), wanted.flatten(1) @ block.o_proj.weight.T)


def test_the_norm_across_heads_counts_heads_that_two_ranks_share_once() -> None:
    class TwoRanks:
        """Two ranks with the same head: a sum over them is twice the own part."""

        size, rank = 2, 0

        def enter(self, x: Tensor) -> Tensor:
            return x

        def reduce(self, x: Tensor) -> Tensor:
            return 2 * x

    x = draw(4, 1, WIDTH)
    alone, shared = (AcrossHeadsRMSNorm(1, WIDTH, 1e-5, torch.float64) for _ in range(2))
    for norm in (alone, shared):
        norm.weight.data.copy_(draw(WIDTH, seed=8))
    shared.tp = TwoRanks()  # type: ignore[assignment]
    assert_near(shared(x), alone(x))


def test_pages_share_keys_and_values() -> None:
    from workbench.nn import StateCache
    from workbench.spec import parse_config

    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 12,
        "intermediate_size": 20, "max_position_embeddings": 64, "num_attention_heads": 2, "num_hidden_layers": 2,
        "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "vocab_size": 30,
    }  # fmt: skip
    cache = StateCache(parse_config(config), range(2), num_slots=2, max_tokens=9, dtype=torch.float64)
    slots, positions = torch.tensor([0] * 5), torch.arange(5)
    keys, values = draw(5, 1, 6), draw(5, 1, 6, seed=4)
    cache.use_pages(3)
    cache.extend(0, 0, [4, 1])
    for layer in range(2):
        cache.append_kv(layer, slots, positions, keys + layer, values)
    cache.pages.seal(0, 0, 6)
    cache.extend(1, 0, [4, 1, 5], num_shared=2)
    assert torch.equal(cache.kv_view(1, 1, 5)[0], keys + 1)
    assert torch.equal(cache.kv(0, torch.tensor([1, 0]), 5)[1], torch.stack([values, values]))
    cache.reset(0)
    assert torch.equal(cache.kv_view(1, 1, 5)[0], keys + 1)
    cache.use_pages(0)
    assert not cache.kv_view(0, 0, 9)[0].any()
    assert cache.num_bytes == 2 * 2 * 9 * (6 + 6) * 8


def test_head_counts_follow_from_the_weights() -> None:
    spec = GQASpec(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=WIDTH, v_dim=WIDTH, rope=None, has_bias=True)
    block = GQA(spec, 16, 0, Precision("fp32", torch.float64))
    half = GQA(spec, 16, 0, Precision("fp32", torch.float64))
    for module in (block, half):
        for i, parameter in enumerate(module.parameters()):
            parameter.data = draw(*parameter.shape, seed=i) / 4
    half.q_proj.narrow_((30, 16))
    half.k_proj.narrow_((10, 16))
    half.v_proj.narrow_((10, 16))
    half.o_proj.narrow_((16, 30))
    x, segments, total = draw(7, 16), Segments(batch_of([(0, 0, list(range(7)))])), torch.zeros(7, 16).double()
    for r in range(2):
        for name, rows in (("q_proj", 30), ("k_proj", 10), ("v_proj", 10)):
            mine, whole = getattr(half, name), getattr(block, name)
            mine.weight.data = whole.weight.data[r * rows : (r + 1) * rows]
            mine.bias.data = whole.bias.data[r * rows : (r + 1) * rows]
        half.o_proj.weight.data = block.o_proj.weight.data[:, r * 30 : (r + 1) * 30]
        total += half(x, segments, None)
    assert_near(total, block(x, segments, None))
