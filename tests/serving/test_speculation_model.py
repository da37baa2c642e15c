"""Guesses and the real network: greedy answers as recorded, drawn ones as without guesses, alone and in company."""

from __future__ import annotations

import json

import pytest

from workbench.serving import Engine, GenerationRequest, LocalRunner, ModelDrafter, PromptLookup, SamplingParams
from workbench.serving.invariance import KnownAnswers

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def root(pytestconfig):
    return pytestconfig.getoption("--golden")


@pytest.fixture(scope="module")
def prompts(root):
    return json.loads((root / "golden" / "text.json").read_text())["prompts"]


@pytest.fixture(scope="module")
def runner(root):
    return LocalRunner.load(root, precision="fp32", num_slots=3, max_tokens=200)


def run(runner, requests, drafter=None, step_tokens=64):
    engine = Engine(runner, step_tokens=step_tokens, drafter=drafter)
    generations = [engine.submit(request) for request in requests]
    while engine.step_once():
        engine.scheduler.check()
    assert engine.draft_error is None
    return [[event.token_id for event in generation] for generation in generations], engine.stats()


def requests_of(prompts, **options):
    return [
        GenerationRequest(
            token_ids=tuple(p["token_ids"]), sampling=SamplingParams(max_tokens=len(p["greedy_fp32"]), **options)
        )
        for p in prompts.values()
    ]


@pytest.mark.parametrize("step_tokens", [18, 64])
def test_greedy_answers_are_the_recorded_ones_whatever_holds_of_the_guesses(runner, prompts, step_tokens):
    answers = {tuple(p["token_ids"]): p["greedy_fp32"] for p in prompts.values()}
    tokens, stats = run(runner, requests_of(prompts), KnownAnswers(answers), step_tokens)
    assert tokens == list(answers.values())
    assert 0.2 < stats.num_accepted / stats.num_drafted < 0.95, "some held and some did not"


def test_drawn_answers_are_those_of_their_seeds(runner, prompts):
    asked = requests_of(prompts, temperature=0.8, top_p=0.9, seed=11)
    alone, _ = run(runner, asked)
    answers = {request.token_ids: tokens for request, tokens in zip(asked, alone, strict=True)}
    guessed, stats = run(runner, asked, KnownAnswers(answers))
    assert guessed == alone
    assert stats.num_accepted > 0


def test_a_state_that_took_the_guesses_for_true_would_be_noticed(runner, prompts, monkeypatch):
    """The planted fault of hybrids: a wrong guess stays in the recurrent state."""
    from workbench.serving import runner as module

    build = module.build_batch

    def certain(*args, **options):
        batch = build(*args, **options)
        object.__setattr__(batch, "tentative", ())
        return batch

    answers = {tuple(p["token_ids"]): p["greedy_fp32"] for p in prompts.values()}
    monkeypatch.setattr(module, "build_batch", certain)
    tokens, _ = run(runner, requests_of(prompts), KnownAnswers(answers))
    assert tokens != list(answers.values())


def test_looked_up_guesses_change_nothing(runner, prompts):
    text = max((tuple(p["token_ids"]) for p in prompts.values()), key=len)
    asked = [GenerationRequest(token_ids=text, sampling=SamplingParams(max_tokens=12))]
    alone, plain = run(runner, asked)
    looked_up, stats = run(runner, asked, PromptLookup(4, min_ngram=1))
    assert looked_up == alone
    assert stats.num_drafted > 0
    assert stats.num_steps <= plain.num_steps


def test_the_model_as_its_own_draft_guesses_what_it_says(root, runner, prompts):
    """Every greedy guess holds; drawn ones mostly, and drawn answers are then others of the same distribution."""
    draft = LocalRunner.load(root, precision="fp32", num_slots=3, max_tokens=200)
    expected = [p["greedy_fp32"] for p in prompts.values()]
    tokens, stats = run(runner, requests_of(prompts), ModelDrafter(draft, runner.info, 3))
    assert tokens == expected
    assert stats.num_accepted >= 0.95 * stats.num_drafted > 0
    drawn, stats = run(runner, requests_of(prompts, temperature=0.7, seed=3), ModelDrafter(draft, runner.info, 3))
    assert [len(each) for each in drawn] == [len(each) for each in expected]
    assert 0 < stats.num_accepted <= stats.num_drafted


def test_looking_up_begins_anew_with_another_engine(runner, prompts):
    """Its requests have the numbers of those before: their texts must not be looked up in."""
    drafter, asked = PromptLookup(3, min_ngram=1), requests_of(prompts)
    first, _ = run(runner, asked, drafter)
    again, stats = run(runner, asked[::-1], drafter)
    fresh, expected = run(runner, asked[::-1], PromptLookup(3, min_ngram=1))
    assert again == fresh == first[::-1]
    assert (stats.num_drafted, stats.num_accepted) == (expected.num_drafted, expected.num_accepted)
    assert stats.num_drafted > 0
