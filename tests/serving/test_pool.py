"""Pages of a cache dealt out: none lost, none held twice, kept prefixes given up in time. No model involved."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from serving_fakes import PoolRunner, echo_of

from workbench.base import PromptTooLongError
from workbench.serving import scheduler as scheduler_module
from workbench.serving.engine import Engine
from workbench.serving.pool import PagePool
from workbench.serving.replica_cache import ReplicaCache, page_size
from workbench.serving.requests import GenerationRequest, SamplingParams
from workbench.serving.speculation import PromptLookup
from workbench.serving.steps import RunnerInfo

pytestmark = pytest.mark.timeout(120)


def ask(ids, max_tokens=3, **options) -> GenerationRequest:
    return GenerationRequest(token_ids=tuple(ids), sampling=SamplingParams(max_tokens=max_tokens), **options)


def run_all(engine: Engine, limit: int = 3000) -> None:
    for _ in range(limit):
        if not engine.step_once():
            break
        engine.scheduler.check_pages()
    stats = engine.stats()
    assert engine.error is None
    assert (stats.num_running, stats.num_waiting) == (0, 0)


def tokens_of(generation) -> list[int]:
    return [event.token_id for event in generation]


# the pool


@pytest.mark.parametrize("seed", range(20))
def test_random_taking_sharing_and_freeing_loses_no_page_and_gives_none_twice(seed):
    rng = random.Random(seed)
    pool = PagePool(rng.randrange(1, 40))
    held: dict[int, list[int]] = {}
    for number in range(400):
        owners = list(held)
        match rng.randrange(4):
            case 0 if pool.num_free:
                count = rng.randrange(1, pool.num_free + 1)
                held[number] = pool.take(number, count, room=rng.randrange(0, 2 * count + 3))
            case 1 if owners and pool.num_free:
                owner = rng.choice(owners)
                more = pool.take(owner, 1, room=rng.randrange(5), after=held[owner][-1])
                held[owner] = held[owner] + more
            case 2 if owners:
                pages = held[rng.choice(owners)]
                held[number] = pages[: rng.randrange(1, len(pages) + 1)]
                pool.share(held[number])
            case 3 if owners:
                owner = rng.choice(owners)
                pool.free(held.pop(owner))
                pool.forget(owner)
        pool.check(held.values())
    for owner, pages in held.items():
        pool.free(pages)
        pool.forget(owner)
    pool.check([])
    assert pool.num_free == pool.num_pages
    assert pool.take(0, pool.num_pages) == list(range(pool.num_pages)), "one run again"


def test_sequences_that_grow_in_turn_each_get_pages_side_by_side():
    pool = PagePool(30)
    tables = {owner: pool.take(owner, 2, room=10) for owner in range(3)}
    for _ in range(8):
        for owner, table in tables.items():
            table += pool.take(owner, 1, room=10, after=table[-1])
    assert sorted(page for table in tables.values() for page in table) == list(range(30))
    for table in tables.values():
        assert table == list(range(table[0], table[0] + 10))


def test_a_run_is_the_smallest_that_is_long_enough_and_goes_on_right_behind_where_it_can():
    pool = PagePool(20)
    pages = pool.take(0, 20)
    pool.free([*pages[2:5], *pages[8:10], *pages[12:20]])
    assert pool.take(1, 1, room=2) == [8]
    assert pool.take(2, 2, room=3) == [2, 3]
    assert pool.take(3, 2, after=11) == [12, 13]
    assert pool.take(4, 8) == [14, 15, 16, 17, 18, 19, 4, 9], "what was set aside for others goes last"
    with pytest.raises(AssertionError, match="1 pages wanted, 0 free"):
        pool.take(5, 1)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda pool, pages: pool.free([pages[0], pages[0]]), "page 0 is free already"),
        (lambda pool, _: pool.share([5]), "page 5 is free"),
        (lambda pool, pages: pool.check([pages, pages[:1]]), "held by others than those who should"),
        (lambda pool, pages: pool.check([pages[:2]]), "held by others than those who should"),
        (lambda pool, pages: pool.check([pages + pages[:1]]), "a page twice"),
    ],
    ids=["freed twice", "shared while free", "held by one more", "lost", "twice in a table"],
)
def test_planted_faults_of_counting_are_found(fault, words):
    pool = PagePool(6)
    pages = pool.take(0, 3, room=4)
    pool.check([pages])
    with pytest.raises(AssertionError, match=words):
        fault(pool, pages)


# pages and kept prefixes


def test_kept_pages_that_nobody_reads_go_where_a_sequence_needs_theirs_and_others_stay():
    cache = ReplicaCache(6 * 4, 4, prefix_tokens=4, prefix_pages=9)
    hits, first = cache.admit(1, ["a", "b"], 9, room=9)
    assert (hits, len(first)) == ((), 3)
    cache.keep("a", first, 4)
    cache.keep("b", first, 8)
    cache.release(1, first, ())
    assert cache.pool.num_free == 4
    hits, second = cache.admit(2, ["a", "x"], 9, room=9)
    assert (hits, second[0]) == (("a",), first[0])
    assert cache.can_admit(["y"], 12, spare=0)
    assert not cache.can_admit(["y"], 12, spare=1)
    assert cache.can_admit(["a", "b"], 16, spare=0)
    assert not cache.can_admit(["a", "b"], 17, spare=0)
    _, third = cache.admit(3, ["y"], 12, room=12)
    cache.check([second, third])
    assert cache.evict() == ["b"]
    assert cache.grow(2, second, 12, room=12)
    assert not cache.grow(2, second, 13, room=13)
    cache.release(2, second, hits)
    cache.release(3, third, ())
    assert cache.clear() == ["a"]
    cache.check([])


@pytest.mark.parametrize(
    ("slots", "max_tokens", "cache_tokens", "prefix", "expected"),
    [
        (3, 200, 0, 0, 0),  # every slot has its own
        (3, 200, 600, 0, 0),
        (8, 4096, 8192, 0, 64),
        (3, 200, 320, 0, 16),  # the last page of a sequence is half empty
        (2, 100, 100, 0, 4),  # of 8 there would be 12
        (3, 5000, 0, 256, 256),
        (1, 5000, 0, 256, 8),
        (1, 4096, 0, 256, 256),
    ],
)
def test_pages_are_as_large_as_the_longest_sequence_allows(slots, max_tokens, cache_tokens, prefix, expected):
    info = RunnerInfo(
        dp=1, num_slots=slots, max_tokens=max_tokens, vocab_size=9, has_vision=False, cache_tokens=cache_tokens
    )
    size = page_size(info, prefix)
    assert size == expected
    assert not size or info.num_rows // size * size >= max_tokens


# the engine over a pool


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("prefix_pages", [0, 5, 100])
@pytest.mark.parametrize("seed", range(3))
def test_answers_from_a_pool_much_smaller_than_all_slots_are_those_of_each_alone(seed, prefix_pages, dp):
    rng = random.Random(seed)
    runner = PoolRunner(dp=dp, num_slots=5, max_tokens=48, cache_tokens=60)
    engine = Engine(runner, step_tokens=24, prefix_pages=prefix_pages, page_tokens=4)
    stems = [[rng.randrange(1, 90) for _ in range(17)] for _ in range(3)]
    asked = []
    for _ in range(50):
        prompt = [*rng.choice(stems)[: rng.randrange(1, 18)], *(rng.randrange(1, 90) for _ in range(rng.randrange(9)))]
        asked.append((prompt, rng.randrange(1, 49 - len(prompt))))
    generations = [engine.submit(ask(prompt, count, priority=n % 7 == 0)) for n, (prompt, count) in enumerate(asked)]
    for number in (3, 17, 40):
        engine.step_once()
        generations[number].abort()
    run_all(engine)
    for number, ((prompt, count), generation) in enumerate(zip(asked, generations, strict=True)):
        if number not in (3, 17, 40):
            assert tokens_of(generation) == echo_of(prompt, count), number
    stats = engine.stats()
    assert stats.num_preempted > 0
    assert (stats.num_cached_tokens > 0) == (prefix_pages > 0)
    assert stats.num_pages <= prefix_pages * dp
    assert [len(pages) for pages in runner.pages] == [len(cache.index) for cache in engine.scheduler._caches]
    engine.drop_pages()
    assert runner.pages == [{}] * dp
    assert engine.stats().num_free_pool_pages == stats.num_pool_pages == dp * 60 // engine.scheduler.pool_page_tokens


def test_a_prefix_is_shared_and_counts_once():
    runner = PoolRunner(num_slots=3, max_tokens=40, cache_tokens=60)
    engine = Engine(runner, prefix_pages=20, page_tokens=4)
    prompt = list(range(1, 34))
    first = engine.submit(ask(prompt, 2))
    run_all(engine)
    runner.most_pages = 0
    generations = [engine.submit(ask([*prompt, 50 + n], 4)) for n in range(3)]
    run_all(engine)
    assert tokens_of(first) == [1, 2]
    assert [tokens_of(generation) for generation in generations] == [[1, 2, 3, 4]] * 3
    assert [generation.num_cached for generation in generations] == [32] * 3
    assert runner.most_pages == 8 + 3 * 2, "eight pages of the prefix once, and each its own tail"
    assert engine.stats().num_preempted == 0


def test_one_that_cannot_grow_sends_the_last_one_back_and_both_answer():
    engine = Engine(PoolRunner(num_slots=2, max_tokens=32, cache_tokens=48))
    generations = [engine.submit(ask([n, n + 1, n + 2], 28)) for n in (1, 5)]
    run_all(engine)
    assert [tokens_of(generation) for generation in generations] == [echo_of([n, n + 1, n + 2], 28) for n in (1, 5)]
    assert engine.stats().num_preempted == 1
    assert generations[0].finish.time_s < generations[1].finish.time_s


def test_what_can_never_fit_is_refused_at_once():
    engine = Engine(PoolRunner(num_slots=4, max_tokens=30, cache_tokens=30))
    with pytest.raises(PromptTooLongError, match="do not fit into 30"):
        engine.submit(ask([1] * 20, 12))
    just = engine.submit(ask([1] * 20, 11))
    run_all(engine)
    assert tokens_of(just) == [1] * 11


def test_guesses_take_no_page_from_anybody():
    runner = PoolRunner(num_slots=4, max_tokens=60, cache_tokens=96)
    engine = Engine(runner, drafter=PromptLookup(6), step_tokens=40)
    prompts = [[n, n + 1, n, n + 1, n] for n in (1, 11, 21, 31)]
    generations = [engine.submit(ask(prompt, 40)) for prompt in prompts]
    run_all(engine)
    assert [tokens_of(generation) for generation in generations] == [echo_of(prompt, 40) for prompt in prompts]
    assert engine.stats().num_drafted > 0


def test_a_step_that_fails_gives_its_pages_back_and_the_others_answer():
    runner = PoolRunner(num_slots=4, max_tokens=40, cache_tokens=64, is_intact=True, bad_token=666)
    engine = Engine(runner, prefix_pages=6, page_tokens=4, step_tokens=16)
    prompts = [[n] * 9 for n in (1, 2, 3)]
    generations = [engine.submit(ask(prompt, 12)) for prompt in prompts]
    for _ in range(3):
        engine.step_once()
    bad = engine.submit(ask([7] * 5 + [666] * 3, 5))
    run_all(engine)
    assert bad._events.qsize() == 1, "its end"
    assert [tokens_of(generation) for generation in generations] == [echo_of(prompt, 12) for prompt in prompts]


# planted faults


def test_a_page_given_to_two_would_be_noticed(monkeypatch):
    """The second sequence is sent to a page that the first one has."""
    prefill = scheduler_module.prefill_step

    def twice(sequence, *rest):
        return replace(prefill(sequence, *rest), pages=(0,))

    monkeypatch.setattr(scheduler_module, "prefill_step", twice)
    engine = Engine(PoolRunner(num_slots=2, max_tokens=20, cache_tokens=32))
    for n in (1, 5):
        engine.submit(ask([n, n + 1], 4))
    engine.step_once()
    assert "a page that others read is written" in str(engine.error)


def test_a_hit_that_goes_on_inside_the_shared_page_would_be_noticed(monkeypatch):
    """The planted fault reads the last token of a shared page again, into the page that others read."""
    prefill = scheduler_module.prefill_step

    def early(sequence, *rest):
        sequence.num_cached -= 1
        return prefill(sequence, *rest)

    runner = PoolRunner(num_slots=2, max_tokens=40, cache_tokens=64)
    engine = Engine(runner, prefix_pages=9, page_tokens=4)
    engine.submit(ask(range(1, 15), 3))
    run_all(engine)
    monkeypatch.setattr(scheduler_module, "prefill_step", early)
    for n in (70, 80):
        engine.submit(ask([*range(1, 15), n], 3))
    engine.step_once()
    assert "disagree" in str(engine.error) or "others read" in str(engine.error)


def test_a_table_of_which_the_ranks_were_not_told_is_noticed(monkeypatch):
    provide = scheduler_module.Scheduler.provide

    def silent(self, drafts):
        allowed = provide(self, drafts)
        for sequence in self.running[0]:
            sequence.num_sent = len(sequence.pages) if sequence.generated else sequence.num_sent
        return allowed

    monkeypatch.setattr(scheduler_module.Scheduler, "provide", silent)
    engine = Engine(PoolRunner(num_slots=2, max_tokens=40, cache_tokens=48))
    engine.submit(ask([1, 2, 3], 30))
    for _ in range(30):
        engine.step_once()
    assert "pages, not" in str(engine.error)
