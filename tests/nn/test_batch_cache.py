"""Packed batches, their index tables, and cache slots."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from nn_tiny import batch_of, tiny_cache, tiny_model, tiny_spec

from workbench.base import RequestError
from workbench.nn import Segments, StateCache, TokenBatch
from workbench.nn.gather import RowMap


def test_whole_sequences_are_packed_with_the_last_row_of_each_wanted() -> None:
    batch = TokenBatch.whole([[7, 8], [9], [1, 2, 3]])
    assert batch.token_ids.tolist() == [7, 8, 9, 1, 2, 3]
    assert (batch.lengths, batch.starts, batch.slots) == ((2, 1, 3), (0, 0, 0), (0, 1, 2))
    assert batch.logit_rows.tolist() == [1, 2, 5]
    assert TokenBatch.whole([[7, 8], [9]], all_logits=True).logit_rows.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": (2, 1)}, "different sequences"),
        ({"lengths": (2, 1, 2)}, "do not describe 6 tokens"),
        ({"lengths": (6, 1, -1)}, "do not describe 6 tokens"),
        ({"lengths": (3, 0, 3)}, "at least one new token"),
        ({"starts": (0, -1, 0)}, "from \\(0, -1, 0\\)"),
        ({"slots": (4, 1, 4)}, "share a cache slot"),
        ({"image_rows": torch.tensor([0])}, "go together"),
    ],
)
def test_a_batch_whose_parts_disagree_is_refused(change: dict[str, object], message: str) -> None:
    batch = TokenBatch.whole([[7, 8], [9], [1, 2, 3]])
    with pytest.raises(RequestError, match=message):
        dataclasses.replace(batch, **change)


def test_segments_know_slots_positions_and_fresh_sequences() -> None:
    segments = Segments(batch_of([(3, 5, [1, 2]), (0, 0, [3]), (2, 0, [4, 5])]))
    assert segments.token_slots.tolist() == [3, 3, 0, 2, 2]
    assert segments.positions.tolist() == [5, 6, 0, 0, 1]
    assert segments.is_fresh.tolist() == [False, True, True]
    assert segments.rows_of(2) == slice(3, 5)
    assert (segments.singles.tolist(), segments.single_rows.tolist(), segments.longest) == ([1], [2], 2)


def test_windows_point_at_rows_before_and_new_rows_of_the_same_sequence() -> None:
    """Two rows before each of three sequences come first (0..5), then the new rows (6..)."""
    windows, tails = Segments(TokenBatch.whole([[0, 0], [0], [0, 0, 0]])).windows(3)
    assert windows.tolist() == [[0, 1, 6], [1, 6, 7], [2, 3, 8], [4, 5, 9], [5, 9, 10], [9, 10, 11]]
    assert tails.tolist() == [[6, 7], [3, 8], [10, 11]]


def test_chunks_come_wave_by_wave_with_the_longest_sequence_first() -> None:
    table = Segments(TokenBatch.whole([[0] * 3, [0], [0] * 8, [0] * 5])).chunks(4)
    assert table.sequences.tolist() == [2, 3, 0]
    assert table.active == [3, 2]
    padding = -1
    assert table.rows.tolist() == [
        [4, 5, 6, 7],
        [12, 13, 14, 15],
        [0, 1, 2, padding],
        [8, 9, 10, 11],
        [16, padding, padding, padding],
    ]
    assert sorted(row for row in table.rows.flatten().tolist() if row >= 0) == [row for row in range(17) if row != 3]


def test_rows_by_head_come_back_where_they_were_and_padding_is_zero() -> None:
    table = Segments(TokenBatch.whole([[0] * 3, [0], [0] * 8, [0] * 5])).chunks(4)
    x = torch.arange(17 * 2, dtype=torch.float64).view(34, 1) + 1  # token t, head h: 2 t + h + 1
    by_head = table.by_head(2)
    chunks = by_head(x).view(5, 2, 4)
    assert chunks[2].tolist() == [[1, 3, 5, 0], [2, 4, 6, 0]]  # the first sequence: three tokens and padding
    back = by_head.back(chunks.reshape(-1, 1))
    assert back.flatten().tolist() == [0 if row in (6, 7) else row + 1 for row in range(34)]  # token 3 is in no chunk


def test_gradients_of_a_row_map_are_those_of_indexing() -> None:
    index = torch.tensor([4, -1, 0, 2, -1])
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    row_map = RowMap(index, 6)
    assert torch.autograd.gradcheck(row_map, x)
    assert torch.equal(row_map(x)[[0, 2, 3]], x[[4, 0, 2]])
    assert not row_map(x)[[1, 4]].any()
    y = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(row_map.back, y)
    assert torch.equal(row_map.back(y)[[4, 0, 2]], y[[0, 2, 3]])
    assert not row_map.back(y)[[1, 3, 5]].any()


def test_the_tables_of_an_empty_batch_are_empty() -> None:
    segments = Segments(TokenBatch.whole([]))
    assert [x.shape for x in segments.windows(4)] == [(0, 4), (0, 3)]
    assert segments.chunks(16).rows.shape == (0, 16)
    assert segments.longest == 0


def test_resetting_a_slot_clears_it_and_no_other() -> None:
    cache = tiny_cache(tiny_model())
    for values in cache.tensors:
        values.fill_(1)
    cache.reset(2)
    for values in cache.tensors:
        assert not values[2].any()
        assert values[[0, 1, 3]].all()


def test_the_size_of_a_cache_is_what_the_spec_says() -> None:
    spec = tiny_spec()
    for tp_size in (1, 2):
        cache = StateCache(spec, range(1, 5), num_slots=3, max_tokens=70, dtype=torch.bfloat16, tp_size=tp_size)
        conv, state = 3 * 48 * 3 * 2 // tp_size, 6 * 8 * 8 * 4 // tp_size  # two KDA layers of the four
        assert cache.num_bytes == 3 * (2 * (conv + state) + 2 * 70 * 28 * 2)
    assert set(cache.state) == {1, 3}
    assert set(cache.latent) == {2, 4}


def test_a_batch_outside_the_cache_is_refused() -> None:
    cache = tiny_cache(tiny_model(), num_slots=2, max_tokens=10)
    cache.check(batch_of([(1, 8, [1, 2])]))
    with pytest.raises(RequestError, match="no cache slot 2"):
        cache.check(batch_of([(2, 0, [1])]))
    with pytest.raises(RequestError, match="slot 1 grows to 11 tokens"):
        cache.check(batch_of([(0, 0, [1]), (1, 9, [1, 2])]))


def test_a_cache_never_grows_a_graph_of_past_steps() -> None:
    model = tiny_model().requires_grad_(True)
    cache = tiny_cache(model)
    model(batch_of([(0, 0, [1, 2, 3])]), cache=cache)
    model(batch_of([(0, 3, [4])]), cache=cache)
    assert cache.tensors
    assert not any(x.requires_grad for x in cache.tensors)
