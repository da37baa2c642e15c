"""Kept beginnings of prompts: what may be shared, what must not, and what is kept how long. No model involved."""

from __future__ import annotations

import random

import pytest
from serving_fakes import EchoRunner, echo_of, placed_image

from workbench.serving.engine import Engine
from workbench.serving.prefix import PrefixIndex, page_keys
from workbench.serving.requests import GenerationRequest, SamplingParams

PAGE = 4


def ask(ids, *, images=(), max_tokens=3, **options) -> GenerationRequest:
    return GenerationRequest(
        token_ids=tuple(ids), images=tuple(images), sampling=SamplingParams(max_tokens=max_tokens), **options
    )


def engine_of(runner, *, pages=50, **options) -> Engine:
    return Engine(runner, prefix_pages=pages, page_tokens=PAGE, **options)


def answer(engine: Engine, request: GenerationRequest) -> tuple[list[int], int]:
    """Tokens, and how many of the prompt were not read again."""
    generation = engine.submit(request)
    while engine.step_once():
        pass
    return [event.token_id for event in generation], generation.num_cached


# keys


def test_a_key_covers_all_tokens_before_and_in_its_page():
    base = list(range(1, 20))
    keys = page_keys(ask(base), PAGE)
    assert len(keys) == len(set(keys)) == 4
    for place in range(len(base)):
        changed = page_keys(ask([*base[:place], 99, *base[place + 1 :]]), PAGE)
        same = [a == b for a, b in zip(keys, changed, strict=True)]
        assert same == [page < place // PAGE for page in range(4)]


@pytest.mark.parametrize(
    ("length", "pages"), [(1, 0), (3, 0), (4, 0), (5, 1), (7, 1), (8, 1), (9, 2), (12, 2), (13, 3)]
)
def test_pages_of_exact_multiples_leave_one_token_to_read(length, pages):
    assert len(page_keys(ask([7] * length), PAGE)) == pages


def test_pictures_of_equal_size_have_other_pages_and_equal_ones_the_same():
    prompt = [1, 2, 0, 0, 0, 0, 0, 0, 3, 4, 5, 6, 7]

    def keys(name: str, row: int = 2, **options):
        return page_keys(ask(prompt, images=[placed_image(name, row, 6)], **options), PAGE)

    assert keys("a") == keys("a")
    assert keys("a") != keys("b")
    assert not set(keys("a")) & set(keys("b")), "from the first page that holds a row of it"
    assert not set(keys("a")) & set(keys("a", row=1))
    assert not set(keys("a")) & set(page_keys(ask(prompt), PAGE)), "without pictures pad tokens are read otherwise"


def test_nothing_is_shared_between_tenants_or_page_sizes():
    prompt = list(range(1, 30))
    mine, yours = page_keys(ask(prompt, tenant="a"), PAGE), page_keys(ask(prompt, tenant="b"), PAGE)
    assert not set(mine) & set(yours)
    assert not set(mine) & set(page_keys(ask(prompt, tenant="a"), 2 * PAGE))


def test_keys_use_the_whole_content_key_of_a_picture():
    prompt = [0] * 9
    names = {f"{'0' * 60}{i:04x}" for i in range(4096)}
    keys = {page_keys(ask(prompt, images=[placed_image(name, 0, 2)]), PAGE)[-1] for name in names}
    assert len(keys) == 4096


# the index


def test_a_match_ends_at_the_first_page_that_is_missing():
    index = PrefixIndex(10)
    for key in "abd":
        index.add(key)
    assert index.match("abcd") == ["a", "b"]
    assert index.match("xab") == []


def test_pages_unused_for_longest_go_first_and_deep_ones_before_their_beginnings():
    index = PrefixIndex(3)
    for key in ("a1", "a2", "a3", "b1"):
        index.add(key)
    index.unpin(index.match(["a1", "a2", "a3"]))
    assert index.evict() == ["b1"]
    index.add("c1")
    assert index.evict() == ["a3"]
    assert "a1" in index
    assert "a2" in index


def test_a_pinned_page_stays_until_it_is_free():
    index = PrefixIndex(1)
    index.add("a")
    assert index.match(["a"]) == ["a"]
    index.add("b")
    assert index.evict() == ["b"]
    index.add("c")
    index.unpin(["a"])
    assert index.evict() == ["a"]
    assert len(index) == 1


# the engine over a runner that echoes what its slot holds: a wrong page shows in the answer


@pytest.mark.parametrize("step_tokens", [3, 4, 5, 100])
def test_equal_beginnings_are_read_once_and_answers_stay_those_of_the_whole_prompt(step_tokens):
    runner = EchoRunner(num_slots=2)
    engine = engine_of(runner, step_tokens=step_tokens)
    prompt = list(range(1, 15))
    assert answer(engine, ask(prompt, max_tokens=20)) == (echo_of(prompt, 20), 0)
    assert answer(engine, ask(prompt, max_tokens=20)) == (echo_of(prompt, 20), 12)
    longer = [*prompt[:9], 77, 78]
    assert answer(engine, ask(longer, max_tokens=20)) == (echo_of(longer, 20), 8)
    assert engine.stats().num_cached_tokens == 20


@pytest.mark.parametrize("length", [k * PAGE + d for k in (1, 2, 3) for d in (-1, 0, 1)])
def test_lengths_around_a_page_hit_as_far_as_pages_go(length):
    engine = engine_of(EchoRunner())
    prompt = list(range(1, length + 1))
    first, second = (answer(engine, ask(prompt, max_tokens=9)) for _ in range(2))
    assert first == (echo_of(prompt, 9), 0)
    assert second == (echo_of(prompt, 9), (length - 1) // PAGE * PAGE)


def test_another_picture_in_the_same_prompt_is_never_answered_from_pages_of_the_first():
    runner = EchoRunner()
    engine = engine_of(runner)
    prompt = [5, 0, 0, 0, 0, 0, 6, 7, 8, 9]
    cached = []
    for name in ("A", "B", "A"):
        tokens, num_cached = answer(engine, ask(prompt, images=[placed_image(name, 1, 5)], max_tokens=7))
        assert tokens[1:6] == [1000 * runner.numbers[name] + i for i in range(5)]
        cached.append(num_cached)
    assert cached == [0, 0, 8]
    assert runner.features == [{}]


def test_a_picture_inside_kept_pages_is_not_encoded_again_and_one_across_their_end_is():
    runner = EchoRunner()
    engine = engine_of(runner)
    inside, across = placed_image("in", 0, 3), placed_image("ac", 5, 5)
    prompt = [0, 0, 0, 1, 2, 0, 0, 0, 0, 0, 3, 4]
    expected = [1000, 1001, 1002, 1, 2, 2000, 2001, 2002, 2003, 2004, 3, 4]
    for _ in range(2):
        tokens, _ = answer(engine, ask(prompt, images=[inside, across], max_tokens=12))
        assert tokens == expected
    encoded = [call[1][1] for call in runner.calls if call[0] == "encode"]
    assert encoded == ["in", "ac", "ac"]


def test_kept_pages_stay_within_their_bound_and_are_dropped_on_the_ranks():
    runner = EchoRunner(num_slots=2)
    engine = engine_of(runner, pages=5)
    rng = random.Random(1)
    for _ in range(40):
        prompt = [rng.randrange(1, 3) for _ in range(rng.randrange(1, 30))]
        tokens, _ = answer(engine, ask(prompt, max_tokens=8))
        assert tokens == echo_of(prompt, 8)
    engine.step_once()
    assert len(runner.pages[0]) <= 5


def test_many_requests_with_common_beginnings_at_once_each_get_their_own_answer():
    runner = EchoRunner(dp=2, num_slots=3)
    engine = engine_of(runner, pages=6, step_tokens=7)
    rng = random.Random(2)
    stems = [[rng.randrange(1, 90) for _ in range(17)] for _ in range(3)]
    prompts = [[*rng.choice(stems)[: rng.randrange(1, 18)], *(rng.randrange(1, 90) for _ in range(rng.randrange(1, 6)))]
               for _ in range(60)]  # fmt: skip
    generations = [engine.submit(ask(prompt, max_tokens=25)) for prompt in prompts]
    for number in (3, 17, 40):
        generations[number].abort()
    while engine.step_once():
        pass
    for number, (prompt, generation) in enumerate(zip(prompts, generations, strict=True)):
        if number not in (3, 17, 40):
            assert [event.token_id for event in generation] == echo_of(prompt, 25)
    assert engine.stats().num_cached_tokens > 100
    assert all(not cache.index._pins for cache in engine.scheduler._caches), "nothing stays pinned"
    engine.scheduler.check_pages()


def test_a_page_whose_key_left_out_the_picture_would_be_noticed(monkeypatch):
    """The planted fault: keys over token ids alone. The check on answers above must see it."""
    plain = page_keys

    def without_pictures(request, page_tokens):
        return plain(ask(request.token_ids), page_tokens)

    monkeypatch.setattr("workbench.serving.scheduler.page_keys", without_pictures)
    runner = EchoRunner()
    engine = engine_of(runner)
    prompt = [5, 0, 0, 0, 0, 0, 6, 7, 8, 9]
    first, second = (
        answer(engine, ask(prompt, images=[placed_image(name, 1, 5)], max_tokens=7))[0] for name in ("A", "B")
    )
    assert first == second, "the second user was told about the first one's picture"


def test_stopping_an_engine_leaves_no_page_behind():
    runner = EchoRunner()
    engine = engine_of(runner).start()
    list(engine.submit(ask(range(1, 14))))
    assert runner.pages[0]
    engine.stop()
    assert runner.pages == [{}]


# priorities


def test_a_higher_priority_takes_a_slot_and_the_lower_goes_on_where_it_was():
    runner = EchoRunner(num_slots=1)
    engine = Engine(runner, step_tokens=6)
    low = engine.submit(ask([1, 2, 3], max_tokens=12))
    for _ in range(5):
        engine.step_once()
    high = engine.submit(ask([7, 8], max_tokens=4, priority=5))
    while engine.step_once():
        pass
    assert [event.token_id for event in high] == echo_of([7, 8], 4)
    assert [event.token_id for event in low] == echo_of([1, 2, 3], 12)
    assert engine.stats().num_preempted == 1
    times = [high.finish.time_s, low.finish.time_s]
    assert times == sorted(times)


def test_equal_priorities_never_take_a_slot_and_wait_in_order():
    engine = Engine(EchoRunner(num_slots=1))
    first, second, third = (engine.submit(ask([n], max_tokens=3, priority=p)) for n, p in ((1, 0), (2, 0), (3, 1)))
    while engine.step_once():
        pass
    assert [list(g) and g.finish.time_s for g in (third, first, second)] == sorted(
        g.finish.time_s for g in (first, second, third)
    )
    assert engine.stats().num_preempted == 0


@pytest.mark.parametrize("pages", [0, 20])
def test_pauses_at_any_moment_change_no_answer(pages):
    for moment in range(1, 14):
        runner = EchoRunner(num_slots=2)
        engine = engine_of(runner, pages=pages, step_tokens=5)
        image = placed_image("pic", 2, 6)
        prompt = [1, 2, 0, 0, 0, 0, 0, 0, 9]
        low = engine.submit(ask(prompt, images=[image], max_tokens=8))
        other = engine.submit(ask([4, 5], max_tokens=30))
        for _ in range(moment):
            engine.step_once()
        high = [engine.submit(ask([60 + n], max_tokens=3, priority=1)) for n in range(2)]
        while engine.step_once():
            pass
        expected = [1, 2, *(1000 + i for i in range(6))]
        assert [event.token_id for event in low] == expected
        assert [event.token_id for event in other] == echo_of([4, 5], 30)
        assert [[event.token_id for event in generation] for generation in high] == [[60] * 3, [61] * 3]
        assert runner.features == [{}]


def test_a_paused_request_can_be_aborted():
    engine = Engine(EchoRunner(num_slots=1))
    low = engine.submit(ask([1], max_tokens=9))
    engine.step_once()
    high = engine.submit(ask([2], max_tokens=3, priority=1))
    engine.step_once()
    low.abort()
    while engine.step_once():
        pass
    assert [event.token_id for event in high] == [2, 2, 2]
    assert [event.token_id for event in low] == [1]
    assert low.finish.reason == "abort"
    assert engine.stats().num_free_slots == 1
