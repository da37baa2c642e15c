"""One answer, however it is computed: alone, in company, in chunks, from kept pages, after pauses. Token for token.

The real network in float32 against its recorded answers, text and pictures.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from workbench.serving import Engine, GenerationRequest, ImageProcessor, LocalRunner, PlacedImage, SamplingParams
from workbench.serving import scheduler as scheduler_module
from workbench.serving.inputs import expand_images
from workbench.serving.invariance import KnownAnswers
from workbench.serving.runner import RankRunner
from workbench.spec import ReadingCost

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def root(pytestconfig):
    return pytestconfig.getoption("--golden")


@pytest.fixture(scope="module")
def runner(root):
    return LocalRunner.load(root, precision="fp32", num_slots=3, max_tokens=200)


@pytest.fixture(scope="module")
def cases(root, runner):
    """Prompt ids, images and expected greedy tokens of every recorded prompt."""
    text = json.loads((root / "golden" / "text.json").read_text())["prompts"]
    found = {name: (tuple(p["token_ids"]), (), p["greedy_fp32"]) for name, p in text.items()}
    vision = json.loads((root / "golden" / "vision.json").read_text())
    processor = ImageProcessor(runner.rank.spec.image)
    images = [processor.process(root / vision["images"][n]["file"]) for n in vision["prompt"]["images_in_order"]]
    prompt = expand_images(vision["prompt"]["token_ids"], images, media_pad=runner.rank.spec.tokens.media)
    placed = tuple(
        PlacedImage(key=image.key, patches=image.patches, grid=image.grid, row=span.start, count=span.count)
        for span, image in zip(prompt.image_spans, images, strict=True)
    )
    found["pictures"] = (prompt.token_ids, placed, vision["prompt"]["greedy_fp32"])
    return found


def ask(case, **options) -> GenerationRequest:
    ids, images, expected = case
    sampling = SamplingParams(max_tokens=len(expected))
    return GenerationRequest(token_ids=ids, images=images, sampling=sampling, **options)


def finish(engine: Engine) -> None:
    while engine.step_once():
        pass


def tokens(generation) -> list[int]:
    return [event.token_id for event in generation]


@pytest.mark.parametrize("page_tokens", [7, *(pytest.param(x, marks=pytest.mark.slow) for x in (3, 16))])
def test_from_kept_pages(runner, cases, page_tokens):
    engine = Engine(runner, prefix_pages=400, page_tokens=page_tokens)
    for time in range(2):
        for name, case in cases.items():
            generation = engine.submit(ask(case))
            finish(engine)
            assert tokens(generation) == case[2], f"{name}, time {time}"
            if time:
                assert generation.num_cached == (len(case[0]) - 1) // page_tokens * page_tokens, name
    engine.drop_pages()
    assert runner.rank.pages == {}


def test_from_pages_that_another_prompt_has_left_in_company_and_in_chunks(runner, cases):
    engine = Engine(runner, prefix_pages=400, page_tokens=8, step_tokens=24)
    long = max((case for name, case in cases.items() if name != "pictures"), key=lambda case: len(case[0]))
    other = GenerationRequest(token_ids=(*long[0][:33], 7, 7, 7), sampling=SamplingParams(max_tokens=1))
    engine.submit(other)
    finish(engine)
    generations = [engine.submit(ask(case)) for case in (long, *cases.values())]
    finish(engine)
    assert [tokens(generation) for generation in generations] == [case[2] for case in (long, *cases.values())]
    assert generations[0].num_cached == 32
    engine.drop_pages()


def test_in_chunks_that_become_shorter_with_depth(runner, cases, monkeypatch):
    monkeypatch.setattr(scheduler_module, "FULL_DEPTH", 8)
    cost = ReadingCost(token=1.0, pair=1.0)
    monkeypatch.setattr(runner.rank, "info", replace(runner.info, reading=cost))
    sizes: list[int] = []
    step = runner.rank.step
    monkeypatch.setattr(
        runner.rank, "step", lambda steps: (sizes.extend(len(each.token_ids) for each in steps), step(steps))[1]
    )
    for name, case in cases.items():
        sizes.clear()
        engine = Engine(runner, step_tokens=12)
        generation = engine.submit(ask(case))
        finish(engine)
        assert tokens(generation) == case[2], name
        read = sizes[: len(sizes) - len(case[2]) + 1]
        assert sum(read) == len(case[0])
        assert len(case[0]) < 40 or len(set(read)) > 3, f"{name}: chunks of {set(read)} tokens alone"


@pytest.mark.parametrize(
    ("moment", "pages"),
    [(2, 0), (6, 400), *(pytest.param(*other, marks=pytest.mark.slow) for other in ((2, 400), (6, 0)))],
)
def test_after_a_pause(runner, cases, moment, pages):
    engine = Engine(runner, step_tokens=20, prefix_pages=pages, page_tokens=8)
    low = {name: engine.submit(ask(case)) for name, case in list(cases.items())[-3:]}
    for _ in range(moment):
        engine.step_once()
    high = [engine.submit(ask(case, priority=1)) for case in list(cases.values())[:2]]
    finish(engine)
    assert engine.stats().num_preempted >= 1
    for name, generation in low.items():
        assert tokens(generation) == cases[name][2], name
    for generation, case in zip(high, list(cases.values())[:2], strict=True):
        assert tokens(generation) == case[2]
    engine.drop_pages()


def test_a_state_kept_one_token_late_would_be_noticed(runner, cases, monkeypatch):
    """The planted fault of hybrids: rows of the right tokens with a recurrent state of another moment."""
    keep = runner.rank.cache.keep

    def late(slot):
        page = keep(slot)
        for state in page.state.values():
            state.mul_(0.5)
        return page

    monkeypatch.setattr(runner.rank.cache, "keep", late)
    engine = Engine(runner, prefix_pages=400, page_tokens=8)
    case = max(cases.values(), key=lambda each: len(each[0]))
    first = engine.submit(ask(case))
    finish(engine)
    second = engine.submit(ask(case))
    finish(engine)
    assert tokens(first) == case[2]
    assert tokens(second) != case[2]
    engine.drop_pages()


def test_no_later_step_changes_the_rows_or_states_of_kept_pages(runner, cases):
    engine = Engine(runner, prefix_pages=400, page_tokens=8)
    case = max(cases.values(), key=lambda each: len(each[0]))
    engine.submit(ask(case))
    finish(engine)
    cache, kept = runner.rank.cache, engine.scheduler._caches[0]._kept

    def rows(key) -> list:
        at = [page * 8 + i for page in kept[key] for i in range(8)]
        return [table.dense().flatten(0, 1)[at].clone() for table in cache.latent.values()]

    before = {key: [x.clone() for x in page.state.values()] + rows(key) for key, page in runner.rank.pages.items()}
    assert before
    for other in (case, *cases.values()):
        engine.submit(ask(other))
        finish(engine)
    for key, values in before.items():
        for was, now in zip(values, [*runner.rank.pages[key].state.values(), *rows(key)], strict=True):
            assert bool((was == now).all())
    engine.drop_pages()


@pytest.fixture(scope="module")
def tight(root):
    """Five slots over a pool that two of the longest sequences fill."""
    return LocalRunner.load(root, precision="fp32", num_slots=5, max_tokens=200, cache_tokens=208, num_snapshots=4)


@pytest.mark.parametrize("pages", [pytest.param(0, marks=pytest.mark.slow), 9])
def test_from_a_pool_that_is_too_small_for_all_at_once(tight, cases, pages):
    engine = Engine(tight, step_tokens=40, prefix_pages=pages, page_tokens=8)
    order = [*cases.values(), *reversed(cases.values())]
    generations = [engine.submit(ask(case)) for case in order]
    while engine.step_once():
        engine.scheduler.check_pages()
    assert [tokens(generation) for generation in generations] == [case[2] for case in order]
    stats = engine.stats()
    assert (stats.num_free_slots, stats.num_running) == (5, 0)
    assert stats.num_free_pool_pages + stats.num_pages * 8 // engine.scheduler.pool_page_tokens == stats.num_pool_pages
    engine.drop_pages()
    assert engine.stats().num_free_pool_pages == stats.num_pool_pages
    assert tight.rank.cache.snapshots.num_free == 4, "each place is given back"


@pytest.mark.parametrize(
    "kv_dtype", ["auto", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp8", "int8"))]
)
def test_pauses_for_want_of_pages_change_no_answer(runner, cases, kv_dtype):
    """With kept prefixes and guesses, over a pool of which eight sequences would need three times as much."""

    def over(**sizes) -> LocalRunner:
        rank = runner.rank
        return LocalRunner(RankRunner(rank.model, rank.ctx, num_slots=4, max_tokens=63, kv_dtype=kv_dtype, **sizes))

    asked = [ask(cases[name]) for name in [*["p7"] * 5, *["p1"] * 3]]
    alone = {}
    plain = Engine(over())
    for request in asked:
        generation = plain.submit(request)
        finish(plain)
        alone[request.token_ids] = tokens(generation)
    assert kv_dtype != "auto" or alone[cases["p7"][0]] == cases["p7"][2]
    known = KnownAnswers(alone, num_tokens=2)
    engine = Engine(over(cache_tokens=63), step_tokens=16, prefix_pages=9, page_tokens=3, drafter=known)
    generations = [engine.submit(request) for request in asked]
    while engine.step_once():
        engine.scheduler.check_pages()
    assert [tokens(generation) for generation in generations] == [alone[request.token_ids] for request in asked]
    stats = engine.stats()
    assert stats.num_preempted > 0
    assert stats.num_cached_tokens > 0
    assert 0 < stats.num_accepted < stats.num_drafted


def test_a_prefix_is_read_by_two_at_once_without_a_copy_of_its_rows(tight, cases):
    engine = Engine(tight, prefix_pages=9, page_tokens=8)
    ids = max((case[0] for case in cases.values() if not case[1]), key=len)[:40]
    asked = [GenerationRequest(token_ids=(*ids, n), sampling=SamplingParams(max_tokens=4)) for n in (5, 6)]
    alone = []
    for request in asked:
        alone.append(engine.submit(request))
        finish(engine)
    both = [engine.submit(request) for request in asked]
    engine.step_once()
    first, second = (sequence.pages for sequence in engine.scheduler.running[0])
    assert first[:5] == second[:5]
    assert set(first[5:]).isdisjoint(second[5:])
    assert [tight.rank.cache.pages.table(slot)[:5] for slot in (s.slot for s in engine.scheduler.running[0])] == [
        tuple(first[:5])
    ] * 2
    finish(engine)
    assert [tokens(generation) for generation in both] == [tokens(generation) for generation in alone]
    assert [generation.num_cached for generation in both] == [40, 40]
    engine.drop_pages()
