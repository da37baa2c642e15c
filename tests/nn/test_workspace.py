"""A long context in bounded memory: groups of heads and blocks of queries have the sums that they have all at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from nn_tiny import MLA, assert_near
from torch import Tensor, nn

from workbench.nn import workspace
from workbench.nn.gqa import attend, attend_chunk, attention_reference
from workbench.nn.indexer import choose_tokens
from workbench.nn.mla import naive_attention
from workbench.operators.recorder import Recorder

# (new, all): a chunk behind a context, a whole text, one token, a block and a bit, several blocks
SIZES = ((96, 700), (300, 300), (1, 650), (65, 1100), (260, 1537))
SMALL = 1 << 15  # less than any of these needs at once
EPS = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 1e-2}
# one MLA layer of Kimi K3 with the heads of one rank of 8
K3 = replace(MLA, num_heads=12, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)
MILLION = 1 << 20


def draw(*shape: int, seed: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(("multiple", "least"), [(1, 1), (64, 192)])
@pytest.mark.parametrize("count", [1, 7, 64, 200, 512])
def test_spans_cover_all_once_and_keep_to_half_of_the_limit_where_they_can(
    count: int, multiple: int, least: int
) -> None:
    for num_bytes in (1, 1000, 300 << 10, 3 << 20, 1 << 30):
        found = workspace.spans(count, num_bytes, multiple=multiple, least=least)
        assert [i for x in found for i in range(x.start, x.stop)] == list(range(count))
        sizes = [x.stop - x.start for x in found]
        assert all(size % multiple == 0 and size >= least for size in sizes[:-1])
        assert max(sizes) <= least or max(sizes) * num_bytes <= workspace.WORKSPACE_BYTES // 2
        more = max(sizes) + multiple
        assert len(found) == 1 or more * num_bytes > workspace.WORKSPACE_BYTES // 2, "no more runs than it takes"


@pytest.mark.parametrize("window", [None, 1, 5, 40, 600])
def test_masks_say_who_is_seen_block_by_block(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    num_new, num_all = 450, 500
    monkeypatch.setattr(workspace, "WORKSPACE_BYTES", SMALL)
    masks = workspace.BlockMasks(num_new, num_all, window=window, like=draw(1, dtype=torch.bfloat16))
    assert [x.stop - x.start for x in masks.blocks] == [192, 192, 66]
    place, key = torch.arange(num_all - num_new, num_all)[:, None], torch.arange(num_all)
    sees = (key <= place) & (key > place - (window or num_all))
    truth = workspace.BlockMasks(num_new, num_all, is_seen=sees, like=draw(1))
    for rows in (*masks.blocks, *reversed(masks.blocks)):
        for found in (masks.of(rows), masks.of(rows), truth.of(rows)):
            assert found is not None
            assert torch.equal(found == 0, sees[rows])
            assert bool(found[~sees[rows]].isneginf().all())
    assert found.dtype is torch.float64
    whole = workspace.BlockMasks(num_new, num_new, window=num_new, like=draw(1))
    assert [whole.of(x) for x in whole.blocks] == [None]


@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("num_all", [512, 1500])
def test_heads_and_blocks_have_the_very_sums_that_all_at_once_have(
    num_all: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit: products of the same shapes in the same order."""
    monkeypatch.setattr(workspace, "WORKSPACE_BYTES", 1 << 60)
    q, k, v = (draw(length, 5, 24, seed=length, dtype=dtype) for length in (512, num_all, num_all))

    def attend_all(masks: workspace.BlockMasks, heads: slice) -> Tensor:
        return workspace.attend_in_blocks(q[:, heads], k[:, heads], v[:, heads], masks, scale=0.3)

    at_once = attend_all(workspace.BlockMasks(512, num_all, like=q), slice(0, 5))
    monkeypatch.setattr(workspace, "WORKSPACE_BYTES", SMALL)
    masks = workspace.BlockMasks(512, num_all, like=q)
    assert len(masks.blocks) == (1 if num_all == 512 else 3)
    # a block of 192 and one of 512 queries take 64 at a time; what is left over of 512 takes other products
    even = [x for x in masks.blocks if x.stop - x.start >= workspace.LEAST_ROWS]
    for heads in (slice(0, 2), slice(2, 5)):
        found = attend_all(masks, heads)
        for rows in even:
            assert torch.equal(found[rows], at_once[rows, heads])
        assert_near(found.double(), at_once[:, heads].double(), EPS[dtype])


@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize(("num_new", "num_all"), SIZES)
@pytest.mark.parametrize("is_chosen", [False, True])
def test_latents_in_groups_are_attended_to_as_all_at_once(
    num_new: int, num_all: int, dtype: torch.dtype, is_chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = draw(MLA.num_heads * (MLA.nope_dim + MLA.v_dim), MLA.kv_rank, seed=4, dtype=dtype) / MLA.kv_rank**0.5
    q = draw(num_new, MLA.num_heads, MLA.qk_dim, dtype=dtype)
    latent = draw(num_all, MLA.cache_dim, seed=5, dtype=dtype)
    chosen = None
    if is_chosen:
        chosen = draw(num_new, num_all, seed=6).gt(0.5).tril(num_all - num_new)
        chosen[:, 0] = True
    at_once = naive_attention(q, latent, weight, MLA, is_seen=chosen)
    monkeypatch.setattr(workspace, "WORKSPACE_BYTES", SMALL)
    calls = count_attention(lambda: naive_attention(q, latent, weight, MLA, is_seen=chosen))
    assert calls > 1, "it was divided"
    in_groups = naive_attention(q, latent, weight, MLA, is_seen=chosen)
    assert_near(in_groups.double(), at_once.double(), EPS[dtype])


@pytest.mark.parametrize(("num_new", "num_all"), SIZES)
@pytest.mark.parametrize("options", [{}, {"window": 50}, {"chunk": 64}, {"window": 30, "chunk": 40}], ids=str)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_shared_keys_are_attended_to_head_by_head_as_the_reference_says(
    num_new: int, num_all: int, options: dict[str, int], has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    v_dim = {96: 10, 65: 13}.get(num_new, 7)
    q, k, v = draw(num_new, 6, 10), draw(num_all, 2, 10, seed=4), draw(num_all, 2, v_dim, seed=5)
    sinks, starts = draw(6, seed=9) if has_sinks else None, torch.tensor([num_all - num_new])
    at_once = attend_chunk(q, k, v, starts=starts, sinks=sinks, **options)
    assert torch.equal(at_once, attend(q[None], k[None], v[None], starts=starts, sinks=sinks, **options)[0])
    monkeypatch.setattr(workspace, "WORKSPACE_BYTES", SMALL)
    in_blocks = attend_chunk(q, k, v, starts=starts, sinks=sinks, **options)
    assert_near(in_blocks, at_once, 1e-13)
    last = slice(num_new - min(3, num_new), num_new)
    wanted = attention_reference(q[last], k, v, start=num_all - min(3, num_new), sinks=sinks, **options)
    assert_near(in_blocks[last], wanted, 1e-12)


def test_tokens_are_chosen_in_blocks_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    q, weights, keys = draw(40, 3, 8), draw(40, 3, seed=4), draw(150, 8, seed=5)
    at_once = choose_tokens(q, weights, keys, 12)
    assert at_once.sum(-1).unique().tolist() == [12]
    monkeypatch.setattr(workspace, "WORKSPACE_BYTES", SMALL)
    assert torch.equal(choose_tokens(q, weights, keys, 12), at_once)
    assert torch.equal(choose_tokens(q, weights, keys, 150), torch.ones(40, 150).bool().tril(110))


def count_attention(run: object) -> int:
    with torch.inference_mode(), Recorder(nn.Module()) as recorder:
        run()  # type: ignore[operator]
    return sum(use.count for use in recorder.operators() if "scaled_dot_product_attention" in use.name)


def peak_of_k3(num_all: int, num_new: int = 512) -> int:
    """Most bytes beside latents and weights at one time while one layer reads a chunk, on tensors without contents."""
    with torch.device("meta"):
        q = torch.empty(num_new, K3.num_heads, K3.qk_dim, dtype=torch.bfloat16)
        latent = torch.empty(num_all, K3.cache_dim, dtype=torch.bfloat16)
        weight = torch.empty(K3.num_heads * (K3.nope_dim + K3.v_dim), K3.kv_rank, dtype=torch.bfloat16)
    with torch.inference_mode(), Recorder(nn.Module()) as recorder:
        naive_attention(q, latent, weight, K3)
    return recorder.peak


def test_a_layer_of_k3_takes_one_heads_keys_and_values_and_a_block_of_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    results = 2 * 512 * K3.num_heads * K3.qk_dim * 2  # of all heads, and of those before they stand side by side
    for num_all in (4096, 32_768, 131_072):
        assert peak_of_k3(num_all) <= workspace.WORKSPACE_BYTES + results, num_all
    head, block = MILLION * (192 + 192 + 128) * 2, 192 * MILLION * 2
    assert peak_of_k3(MILLION) <= head + block + results
    monkeypatch.setattr(workspace, "WORKSPACE_BYTES", 1 << 60)
    assert peak_of_k3(MILLION) > 14 * head, "all at once it would be every head's, and more"


def test_shared_keys_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 heads over 8 of keys and values, of 64 columns, behind 128k tokens: blocks of masks and scores alone."""
    with torch.device("meta"):
        q = torch.empty(512, 64, 64, dtype=torch.bfloat16)
        k, v = (torch.empty(131_072, 8, 64, dtype=torch.bfloat16) for _ in range(2))
        sinks = torch.empty(64)
    for options in ({}, {"sinks": sinks}, {"window": 128}):
        with torch.inference_mode(), Recorder(nn.Module()) as recorder:
            attend_chunk(q, k, v, starts=torch.tensor([131_072 - 512]), **options)  # type: ignore[arg-type]
        assert recorder.peak <= workspace.WORKSPACE_BYTES, options
