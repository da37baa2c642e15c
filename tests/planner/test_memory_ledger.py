"""Ledgers: caches as the cache allocates them, peaks at load and at serving, stages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from planner_samples import given, miniature, published

from workbench.nn.cache import StateCache
from workbench.placement import Layout
from workbench.planner import CacheNeed, Reserve, rank, read_weight_table, stage_ledger
from workbench.planner.memory import cache_need, num_groups, request_floor
from workbench.spec import KV_DTYPES, KV_SCALE_BYTES, kv_bytes_per_token, read_spec, state_bytes_per_sequence

RESERVE = Reserve(other=given(1000, "B"), communicator=given(10, "B"), window_bytes=64)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
@pytest.mark.parametrize("text", ["tp1", "tp2", "pp3xtp2"])
def test_caches_are_as_large_as_the_cache_allocates(text: str, precision: str, dtype: torch.dtype) -> None:
    layout, spec = Layout.parse(text), miniature()
    need = CacheNeed(slots=3, max_tokens=77)
    for layers in layout.stage_layers(spec.num_layers):
        real = StateCache(spec, layers, num_slots=3, max_tokens=77, dtype=dtype, tp_size=layout.tp)
        assert sum(cache_need(spec, layout, layers, need, dtype.itemsize).values()) == real.num_bytes


def test_caches_of_the_published_model_per_token_and_sequence() -> None:
    spec = published()
    sizes = cache_need(spec, Layout(), range(93), CacheNeed(slots=1, max_tokens=1), 2)
    assert sizes["latent"] == kv_bytes_per_token(spec) == 27_648
    assert sizes["state"] + sizes["convolution"] == state_bytes_per_sequence(spec) == 449_372_160
    over_8 = cache_need(spec, Layout(tp=8), range(93), CacheNeed(slots=1, max_tokens=1), 2)
    assert over_8["latent"] == 27_648, "latents are whole on every rank"
    assert over_8["state"] + over_8["convolution"] == 449_372_160 // 8


def test_eight_bit_latents_halve_latents_only() -> None:
    spec = published()
    wide = cache_need(spec, Layout(), range(93), CacheNeed(slots=2, max_tokens=10), 2)
    narrow = cache_need(spec, Layout(), range(93), CacheNeed(slots=2, max_tokens=10, kv_dtype="fp8"), 2)
    assert narrow["latent"] * 2 == wide["latent"]
    assert narrow["state"] == wide["state"]
    scaled = CacheNeed(slots=2, max_tokens=10, kv_dtype="int8", kv_scale_bytes=2)
    assert cache_need(spec, Layout(), range(93), scaled, 2)["latent"] == narrow["latent"] + 2 * 10 * 24 * 2


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_cached_rows_are_counted_as_they_are_allocated(kv_dtype: str) -> None:
    spec, layers = miniature(), range(8)
    cache = StateCache(spec, layers, num_slots=3, max_tokens=10, dtype=torch.bfloat16, kv_dtype=kv_dtype)
    need = CacheNeed(slots=3, max_tokens=10, kv_dtype=kv_dtype, kv_scale_bytes=KV_SCALE_BYTES)
    assert cache.num_bytes == sum(cache_need(spec, Layout(), layers, need, 2).values())


@pytest.mark.parametrize("text", ["tp1", "tp2"])
def test_a_pool_and_places_for_snapshots_are_counted_as_they_are_allocated(text: str) -> None:
    spec, layers, layout = miniature(), range(8), Layout.parse(text)
    sizes = {"num_slots": 3, "max_tokens": 50, "cache_tokens": 64, "num_snapshots": 5}
    cache = StateCache(spec, layers, dtype=torch.bfloat16, tp_size=layout.tp, **sizes)  # type: ignore[arg-type]
    need = CacheNeed(slots=3, max_tokens=50, cache_tokens=64, snapshot_places=5)
    counted = cache_need(spec, layout, layers, need, 2)
    assert sum(counted.values()) == cache.num_bytes
    assert counted["snapshots"] == sum(x.nbytes for x in cache.snapshots.tensors) > 0
    assert request_floor(spec, layout, layers, need, 2) == request_floor(
        spec, layout, layers, CacheNeed(slots=3, max_tokens=50), 2
    )


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", ["kimi_linear", "deepseek_v32", "gpt_oss", "qwen3_5_moe"])
def test_what_a_rank_says_of_its_caches_is_all_that_they_hold_by_the_names_of_the_plan(
    name: str, kv_dtype: str
) -> None:
    """Latents, keys of indexers, keys and values, states; none of them left out, none under another name."""
    spec = read_spec(Path(__file__).resolve().parents[1] / "golden" / "families" / name)
    layers = range(spec.num_layers)
    cache = StateCache(
        spec, layers, num_slots=3, max_tokens=10, dtype=torch.bfloat16, kv_dtype=kv_dtype, num_snapshots=2
    )
    need = CacheNeed(slots=3, max_tokens=10, kv_dtype=kv_dtype, kv_scale_bytes=KV_SCALE_BYTES, snapshot_places=2)
    found = rank._caches(cache)
    assert found.total() == cache.num_bytes
    assert found == {role: size for role, size in cache_need(spec, Layout(), layers, need, 2).items() if size}
    assert ("index keys" in found) == (name == "deepseek_v32")


def test_pages_round_tokens_up_and_snapshots_copy_the_state() -> None:
    spec = miniature()
    plain = cache_need(spec, Layout(), range(8), CacheNeed(slots=1, max_tokens=65), 2)
    paged = cache_need(spec, Layout(), range(8), CacheNeed(slots=1, max_tokens=65, page_tokens=64, snapshots=2), 2)
    assert paged["latent"] * 65 == plain["latent"] * 128
    assert paged["snapshots"] == 2 * (plain["state"] + plain["convolution"])


def ledger(layout: Layout, stage: int = 0, **options: object):  # type: ignore[no-untyped-def]
    table = read_weight_table(miniature(), "bf16")
    need = CacheNeed(slots=2, max_tokens=32)
    return stage_ledger(table, layout, stage, need, RESERVE, **options)  # type: ignore[arg-type]


def test_peaks_count_what_is_there_at_the_same_time() -> None:
    found = ledger(Layout(), activations=given(500, "B"))
    assert found.load_peak == found.weights + 1000 + 64
    assert found.serving_peak == found.weights + found.cache + 1000 + 500
    assert found.peak == found.serving_peak
    wide = Reserve(other=RESERVE.other, communicator=RESERVE.communicator, window_bytes=1 << 40)
    table = read_weight_table(miniature(), "bf16")
    loading = stage_ledger(table, Layout(), 0, CacheNeed(slots=2, max_tokens=32), wide)
    assert loading.peak == loading.load_peak > loading.serving_peak


def test_what_does_not_fit_is_negative_by_the_exact_number_of_bytes() -> None:
    whole = ledger(Layout())
    exact = ledger(Layout(), capacity=given(whole.peak, "B"))
    short = ledger(Layout(), capacity=given(whole.peak - 1, "B"))
    assert (exact.free, exact.fits, short.free, short.fits) == (0, True, -1, False)


def test_the_tower_is_on_the_first_stage_only_and_may_live_elsewhere() -> None:
    first, last = ledger(Layout(pp=2)), ledger(Layout(pp=2), 1)
    roles = {line.role for line in first.lines}
    assert {"vision", "projector", "embedding"} <= roles
    assert not {"vision", "projector", "embedding"} & {line.role for line in last.lines}
    assert "head" in {line.role for line in last.lines}
    apart = ledger(Layout(pp=2), has_vision=False)
    assert first.weights - apart.weights == sum(
        round(line.size.value) for line in first.lines if line.role in ("vision", "projector")
    )


def test_pictures_and_text_share_working_memory() -> None:
    small = ledger(Layout(), activations=given(500, "B"), vision=given(300, "B"))
    large = ledger(Layout(), activations=given(500, "B"), vision=given(800, "B"))
    assert small.of("working", "serving") == 500
    assert large.of("working", "serving") == 800


@pytest.mark.parametrize(
    ("text", "groups"),
    [("tp1", 0), ("tp2", 1), ("pp2xtp2", 2), ("dp2xtp2xep4", 3), ("dp4xtp2xep4", 5), ("tp4xep2", 1)],
)
def test_process_groups_are_those_that_a_rank_joins(text: str, groups: int) -> None:
    from workbench.parallel.mesh import group_members

    layout = Layout.parse(text)
    assert num_groups(layout) == groups
    distinct = {ranks for ranks in group_members(layout, 0).values() if len(ranks) > 1}
    assert len(distinct) == groups


def test_a_request_pins_its_state_however_short_it_is() -> None:
    spec = published()
    need = CacheNeed(slots=64, max_tokens=1 << 20, page_tokens=64)
    floor = request_floor(spec, Layout(tp=8), range(93), need, 2)
    assert floor == 449_372_160 // 8 + 64 * 27_648


def test_tables_and_records_name_every_line_with_its_basis() -> None:
    found = ledger(Layout(tp=2), activations=given(500, "B"), capacity=given(1e9, "B"))
    text = found.render()
    for line in found.lines:
        assert line.role in text
    assert {"exact", "datasheet"} <= {row[4] for row in found.table().rows}
    record = found.to_json()
    assert sum(line["bytes"] for line in record["lines"] if line["phase"] != "load") == record["serving_peak"]
