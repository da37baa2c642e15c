"""Rows in pages: what a table leads to, who may write a page, and a model that does not notice where its rows lie."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from nn_tiny import batch_of, random_ids, tiny_cache, tiny_model, tiny_spec

from workbench.base import RequestError
from workbench.nn import native
from workbench.nn.cache import StateCache
from workbench.nn.pages import SlotPages
from workbench.nn.rows import RowTable, row_format
from workbench.spec import ModelSpec, parse_config

P, WIDTH = 4, 5


def tables(**options: int) -> SlotPages:
    pages = SlotPages(**{"num_slots": 3, "max_tokens": 14, "num_rows": 27, **options})
    pages.use(P)
    return pages


def positions(slot: int, count: int, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((count,), slot), torch.arange(start, start + count)


@pytest.mark.parametrize("name", ["auto", "fp8", "int8"])
@pytest.mark.parametrize("pages", [[2, 3, 4], [5, 0, 2], [4, 3, 2], [3]], ids=["run", "apart", "backwards", "one"])
def test_rows_come_back_from_wherever_the_pages_lie(name: str, pages: list[int]) -> None:
    places, other = tables(), RowTable((3, 14, 2, WIDTH), dtype=torch.float32, device="cpu", form=row_format(name))
    table = RowTable((1, 27, 2, WIDTH), dtype=torch.float32, device="cpu", form=row_format(name), pages=places)
    places.extend(1, 0, pages)
    places.extend(0, 0, [1])
    count = min(len(pages) * P - 1, 11)
    rows = torch.randn(count, 2, WIDTH, generator=torch.Generator().manual_seed(3))
    for each in (table, other):
        each.write(*positions(1, count), rows)
        each.write(*positions(0, 2), rows[:2] + 7)
    assert torch.equal(table.of_slot(1, count), other.of_slot(1, count))
    assert torch.equal(table.first(torch.tensor([1]), count), other.first(torch.tensor([1]), count))
    both = table.first(torch.tensor([1, 0]), count)
    assert both.shape == (2, count, 2, WIDTH)
    assert torch.equal(both[0], other.of_slot(1, count))
    assert torch.equal(both[1, :2], other.of_slot(0, 2))
    is_view = table.of_slot(1, count).untyped_storage().data_ptr() == table.parts[0].untyped_storage().data_ptr()
    assert is_view == (name == "auto" and pages in ([2, 3, 4], [3])), "side by side and in order: no copy"


def test_beyond_its_pages_a_slot_reads_its_own_and_never_those_of_others() -> None:
    places = tables()
    table = RowTable((1, 27, WIDTH), dtype=torch.float32, device="cpu", pages=places)
    table.parts[0].fill_(float("nan"))
    places.extend(2, 0, [3])
    places.extend(0, 0, [5, 1, 2])
    for page in (3, 5, 1, 2):
        table.clear(slice(page * P, (page + 1) * P))
    assert table.first(torch.tensor([2, 0]), 11).isfinite().all()


def test_a_pool_without_tables_gives_every_slot_its_own_rows_as_far_as_it_goes() -> None:
    places = SlotPages(num_slots=3, max_tokens=4, num_rows=7)
    table = RowTable((1, 7, WIDTH), dtype=torch.float32, device="cpu", pages=places)
    rows = torch.randn(3, WIDTH)
    table.write(*positions(1, 3), rows)
    assert torch.equal(table.of_slot(1, 3), rows)
    assert torch.equal(table.first(torch.tensor([0, 1]), 3)[1], rows)
    places.check(1, 0, 3)
    with pytest.raises(RequestError, match="no rows of its own for 4 tokens in a pool of 7"):
        places.check(1, 3, 4)


# who may write


def test_a_page_is_written_by_the_slot_it_was_given_to_until_it_is_sealed() -> None:
    places = tables()
    assert places.extend(0, 0, [4, 2]) == [slice(16, 20), slice(8, 12)]
    places.check(0, 0, 8)
    places.seal(0, 0, 4)
    places.check(0, 4, 8)
    with pytest.raises(RequestError, match="slot 0 would write page 4, which others read"):
        places.check(0, 3, 5)
    assert places.extend(1, 0, [4, 0], num_shared=1) == [slice(0, 4)], "what is shared is not cleared"
    places.check(1, 4, 8)
    with pytest.raises(RequestError, match="slot 1 would write page 4"):
        places.check(1, 0, 1)


def test_a_stale_entry_of_a_table_is_found_when_it_is_written() -> None:
    """The page was given to another slot meanwhile, as if the first had not been told."""
    places = tables()
    places.extend(0, 0, [4])
    places.extend(1, 0, [4])
    places.check(1, 0, 1)
    with pytest.raises(RequestError, match="slot 0 would write page 4"):
        places.check(0, 1, 2)


@pytest.mark.parametrize(
    ("first", "pages", "num_shared", "words"),
    [
        (1, [3], 0, "has 2 pages"),
        (3, [3], 0, "has 2 pages"),
        (2, [6], 0, r"pages 0\.\.5"),
        (2, [-1], 0, r"pages 0\.\.5"),
        (2, [3, 4, 0], 0, "at most 4 of them"),
        (2, [1], 0, "a page twice"),
        (2, [3, 3], 0, "a page twice"),
        (2, [0], 1, "which slot 2 may still write"),
    ],
)
def test_pages_that_do_not_continue_a_table_are_refused(
    first: int, pages: list[int], num_shared: int, words: str
) -> None:
    places = tables()
    places.extend(2, 0, [0])
    places.extend(1, 0, [5, 1])
    with pytest.raises(RequestError, match=words):
        places.extend(1, first, pages, num_shared=num_shared)
    assert places.table(1) == (5, 1)


def test_only_whole_pages_can_be_sealed_and_tokens_need_pages() -> None:
    places = tables()
    places.extend(0, 0, [1, 0])
    for start, stop in ((0, 3), (2, 6), (4, 12)):
        with pytest.raises(RequestError, match="no whole pages"):
            places.seal(0, start, stop)
    with pytest.raises(RequestError, match="enough for 9 tokens"):
        places.check(0, 7, 9)


def test_a_new_page_size_begins_anew_and_clears_all_rows() -> None:
    cache = tiny_cache(tiny_model())
    cache.use_pages(P)
    cache.extend(0, 0, [1])
    for table in cache.latent.values():
        table.parts[0].fill_(float("nan"))
    cache.use_pages(P)
    assert cache.pages.table(0) == (1,)
    cache.use_pages(0)
    assert not any(table.parts[0].any() for table in cache.latent.values())


# the model


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_a_model_does_not_notice_where_its_rows_lie(kv_dtype: str) -> None:
    """Two sequences in chunks and step by step, side by side with pages in any order that were full of NaN before."""
    model, ids = tiny_model(), random_ids(40)
    plain = tiny_cache(model, kv_dtype=kv_dtype)
    paged = StateCache(
        model.spec, model.layer_range, num_slots=4, max_tokens=80, dtype=model.dtype, kv_dtype=kv_dtype, cache_tokens=70
    )
    for table in paged.latent.values():
        for part in table.parts if kv_dtype == "auto" else table.parts[1:]:
            part.fill_(float("nan"))
    paged.use_pages(8)
    for table in paged.latent.values():
        for part in table.parts if kv_dtype == "auto" else table.parts[1:]:
            part.fill_(float("nan"))  # what ended sequences may leave
    pools = {1: iter([6, 2, 3, 0]), 2: iter([4, 5, 7, 1])}
    steps = [[(1, 0, ids[:7]), (2, 0, ids[20:31])], [(1, 7, ids[7:13]), (2, 11, ids[31:32])]]
    steps += [[(1, 13 + i, ids[13 + i : 14 + i]), (2, 12 + i, ids[32 + i : 33 + i])] for i in range(6)]
    steps += [[(2, 18, ids[38:40])], [(1, 19, ids[19:20])]]
    for step in steps:
        for slot, start, tokens in step:
            held = len(paged.pages.table(slot))
            missing = -(-(start + len(tokens)) // 8) - held
            paged.extend(slot, held, [next(pools[slot]) for _ in range(missing)])
        assert torch.equal(model(batch_of(step), cache=plain), model(batch_of(step), cache=paged))
    assert paged.num_bytes < plain.num_bytes


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 60,
    "intermediate_size": 36, "max_position_embeddings": 128, "num_attention_heads": 6, "num_hidden_layers": 2,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "vocab_size": 52,
}  # fmt: skip


def of_window(spec: ModelSpec, window: int) -> ModelSpec:
    layers = tuple(replace(layer, mixer=replace(layer.mixer, window=window)) for layer in spec.layers)
    return replace(spec, layers=layers)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize(
    "spec",
    [tiny_spec(), parse_config(LLAMA), of_window(parse_config(LLAMA), 9)],
    ids=["latents", "keys and values", "a window"],
)
def test_kernels_read_pages_where_they_lie_and_decode_the_bits_of_slots(
    monkeypatch: pytest.MonkeyPatch, spec: ModelSpec, kv_dtype: str
) -> None:
    """Three sequences of unlike lengths, their pages backwards and in turns; what is none of theirs is NaN."""
    if native.kernels() is None:
        pytest.skip("no native kernels here: no compiler, or switched off")
    model, ids = tiny_model(spec, dtype=torch.float32), random_ids(60)
    sizes = {"num_slots": 4, "max_tokens": 80, "dtype": model.dtype, "kv_dtype": kv_dtype}
    plain = StateCache(model.spec, model.layer_range, **sizes)
    paged = StateCache(model.spec, model.layer_range, **sizes, cache_tokens=97)
    paged.use_pages(8)
    for cache in (plain, paged):
        for table in (cache.latent, cache.keys, cache.values):
            for rows in table.values():
                for part in rows.parts if kv_dtype == "auto" else rows.parts[1:]:
                    part.fill_(float("nan"))
    gathered: list[str] = []
    with torch.inference_mode():
        for slot, pages in ((3, [11, 4, 6]), (0, [5]), (2, [9, 10, 7])):
            paged.extend(slot, 0, pages)
        prompts = [(3, 0, ids[:19]), (0, 0, ids[19:20]), (2, 0, ids[20:38])]
        assert torch.equal(model(batch_of(prompts), cache=plain), model(batch_of(prompts), cache=paged))
        for name in ("first", "of_slot"):
            original = getattr(RowTable, name)
            spy = lambda self, *args, name=name, original=original: gathered.append(name) or original(self, *args)  # noqa: E731
            monkeypatch.setattr(RowTable, name, spy)
        for step in range(5):
            batch = batch_of([(2, 18 + step, [7]), (3, 19 + step, [step]), (0, 1 + step, [3])])
            found = [model(batch, cache=cache) for cache in (plain, paged)]
            assert found[0].isfinite().all()
            assert torch.equal(*found)
    assert bool(gathered) == (kv_dtype != "auto"), "codes are decoded into a copy, and nothing else is copied"


def test_a_batch_is_refused_that_would_write_a_page_of_others() -> None:
    model, ids = tiny_model(), random_ids(12)
    cache = tiny_cache(model)
    cache.use_pages(4)
    cache.extend(0, 0, [3, 1])
    model(batch_of([(0, 0, ids[:4])]), cache=cache)
    cache.pages.seal(0, 0, 4)
    cache.extend(1, 0, [3, 2], num_shared=1)
    cache.check(batch_of([(0, 4, ids[4:6]), (1, 4, ids[6:8])]))
    with pytest.raises(RequestError, match="slot 1 would write page 3"):
        model(batch_of([(1, 3, ids[6:8])]), cache=cache)


def test_snapshots_have_places_and_memory_of_their_own_beyond_them() -> None:
    model, ids = tiny_model(), random_ids(9)
    cache = StateCache(model.spec, model.layer_range, num_slots=2, max_tokens=9, dtype=model.dtype, num_snapshots=2)
    bare = StateCache(model.spec, model.layer_range, num_slots=2, max_tokens=9, dtype=model.dtype)
    states = sum(x.nbytes for x in (*cache.conv.values(), *cache.state.values()))
    assert cache.num_bytes == bare.num_bytes + states, "two slots, and two places"
    model(batch_of([(1, 0, ids)]), cache=cache)
    snapshots = [cache.keep(1) for _ in range(3)]
    assert [snapshot.place for snapshot in snapshots] == [0, 1, -1]
    was = [x.clone() for x in snapshots[0].state.values()]
    cache.reset(1)
    for snapshot in snapshots:
        cache.restore(0, snapshot)
        assert all(torch.equal(x[0], y) for x, y in zip(cache.state.values(), was, strict=True))
        cache.reset(0)
    cache.snapshots.give_back(snapshots[1])
    with pytest.raises(AssertionError, match="given back before"):
        cache.snapshots.give_back(snapshots[1])
    cache.snapshots.give_back(snapshots[2])
    assert cache.keep(0).place == 1
