"""One answer, however it is computed: alone, in company, in chunks, from kept pages, after pauses. Token for token.

The real network in float32 against its recorded answers, text and pictures.
"""

from __future__ import annotations

import json

import pytest

from workbench.serving import Engine, GenerationRequest, ImageProcessor, LocalRunner, PlacedImage, SamplingParams
from workbench.serving.inputs import expand_images

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


@pytest.mark.parametrize("page_tokens", [3, 16])
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


@pytest.mark.parametrize("moment", [2, 6])
@pytest.mark.parametrize("pages", [0, 400])
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

    def late(slot, start, stop):
        page = keep(slot, start, stop)
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


def test_kept_pages_are_copies_that_no_later_step_changes(runner, cases):
    engine = Engine(runner, prefix_pages=400, page_tokens=8)
    case = max(cases.values(), key=lambda each: len(each[0]))
    engine.submit(ask(case))
    finish(engine)
    before = {key: [x.clone() for x in page.state.values()] for key, page in runner.rank.pages.items()}
    assert before
    for other in (case, *cases.values()):
        engine.submit(ask(other))
        finish(engine)
    for key, states in before.items():
        for was, now in zip(states, runner.rank.pages[key].state.values(), strict=True):
            assert bool((was == now).all())
    engine.drop_pages()
