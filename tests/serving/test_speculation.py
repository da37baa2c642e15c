"""Guesses at the next tokens: answers stay what they are, however good the guesses, and it is told how many held."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import replace

import pytest
import torch
from serving_fakes import EchoRunner, echo_of

from workbench.base import DeploymentError, RequestError
from workbench.serving.engine import Engine
from workbench.serving.requests import GenerationRequest, SamplingParams
from workbench.serving.sampler import candidate_mass, sample_row, sample_steps
from workbench.serving.speculation import DraftAsk, ModelDrafter, PromptLookup, draw_draft
from workbench.serving.steps import Draft, RunnerInfo, SampledToken, SequenceStep
from workbench.serving.verify import verify

pytestmark = pytest.mark.timeout(120)


def request(prompt, max_tokens=4, **options) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=max_tokens, **options)
    return GenerationRequest(token_ids=tuple(prompt), sampling=sampling)


def run_all(engine: Engine, limit: int = 500) -> int:
    for count in range(limit):
        if not engine.step_once():
            return count
        engine.scheduler.check()
    raise AssertionError("still working")


def tokens_of(generation) -> list[int]:
    return [event.token_id for event in generation]


# looking up


@pytest.mark.parametrize(
    ("text", "count", "found"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 4, [9, 1, 2, 3]),
        ([1, 2, 3, 9, 1, 2, 3], 2, [9, 1]),
        ([5, 1, 2, 8, 7, 1, 2, 9, 1, 2], 1, [9]),  # the last of several
        ([4, 1, 2, 8, 1, 2, 7, 4, 1, 2], 1, [8]),  # the longest ending before the last one
        ([7, 7, 7, 7], 4, [7]),
        ([1, 2, 3, 4], 4, []),
        ([3, 1, 2, 4, 2], 4, []),  # one token is too little
        ([2], 4, []),
    ],
)
def test_the_last_tokens_are_looked_up_in_the_text_before(text, count, found):
    assert PromptLookup(max_ngram=3).lookup(array("i", text), count) == found


def test_bytes_that_match_between_two_tokens_are_no_occurrence():
    text = array("i", [0x01000000, 0x02000000, 0x00000100, 0x00000200, 5, 1, 2, 0x01000000, 0x02000000])
    assert PromptLookup(min_ngram=2).lookup(text, 1) == [0x00000100]
    shifted = array("i", [1 << 8, 2 << 8, 9 << 8, 1, 2])  # the bytes of 1, 2 stand here one place later
    assert PromptLookup(min_ngram=2).lookup(shifted, 1) == []


def test_a_lookup_follows_a_growing_text_and_forgets_those_that_are_gone():
    lookup, generated = PromptLookup(2), [1]
    ask = DraftAsk(
        request_id=3, replica=0, slot=0, prompt=(1, 2, 3, 8), generated=generated, sampling=SamplingParams(), room=9
    )
    assert lookup.propose([ask]) == {}
    generated += [2, 3]
    assert lookup.propose([ask]) == {3: (Draft(token_id=8), Draft(token_id=1))}
    lookup.propose([])
    assert lookup._texts == {}
    with pytest.raises(RequestError):
        PromptLookup(0)


# the engine


class GuessingRunner(EchoRunner):
    """Confirms guesses as a model does, and remembers how many tokens each slot really holds."""

    most_tokens = 0  # of one replica in one step

    def step(self, inputs):
        out = []
        for replica, steps in enumerate(inputs):
            row = []
            self.most_tokens = max(self.most_tokens, sum(len(step.token_ids) for step in steps))
            for step in steps:
                assert step.start + len(step.token_ids) <= self.info.max_tokens, "beyond the slot"
                held = self.slots[replica, step.slot]
                certain = step.token_ids[: len(step.token_ids) - len(step.drafts)]
                plain = SequenceStep(
                    slot=step.slot, start=step.start, token_ids=certain, sample=step.sample, step_idx=step.step_idx
                )
                others = [()] * replica
                answered = super().step([*others, (plain,), *[()] * (self.info.dp - replica - 1)])[replica]
                if not answered:
                    continue
                size = self.prompt_sizes[replica, step.slot]
                accepted = []
                for draft in step.drafts:
                    if draft.token_id != held[(step.step_idx + len(accepted)) % size]:
                        break
                    accepted.append(SampledToken(token_id=draft.token_id, logprob=-0.5))
                    held.append(draft.token_id)
                token_id = held[(step.step_idx + len(accepted)) % size]
                row.append(SampledToken(token_id=token_id, logprob=-0.5, accepted=tuple(accepted)))
            out.append(row)
        return out


class Periodic:
    """Knows that answers repeat their prompt; every `wrong`-th guess is another token."""

    def __init__(self, count=4, wrong=0):
        self.count, self.wrong, self.num = count, wrong, 0

    def propose(self, asks):
        drafts = {}
        for ask in asks:
            guesses = []
            for i in range(min(self.count, ask.room)):
                self.num += 1
                right = ask.prompt[(len(ask.generated) + i) % len(ask.prompt)]
                guesses.append(Draft(token_id=8888 if self.wrong and self.num % self.wrong == 0 else right))
            drafts[ask.request_id] = tuple(guesses)
        return drafts

    def begin(self):
        pass

    def close(self):
        pass


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize(("wrong", "least"), [(0, 0.99), (3, 0.1), (1, 0.0)])
def test_answers_are_the_same_with_good_guesses_bad_ones_and_none_right(dp, wrong, least):
    runner = GuessingRunner(dp=dp, num_slots=3)
    engine = Engine(runner, step_tokens=24, drafter=Periodic(wrong=wrong))
    prompts = [[n, n + 1, n + 2, *range(n, n + n % 7)] for n in range(1, 9)]
    generations = [engine.submit(request(prompt, 5 + n)) for n, prompt in enumerate(prompts)]
    steps = run_all(engine)
    for n, (prompt, generation) in enumerate(zip(prompts, generations, strict=True)):
        assert tokens_of(generation) == echo_of(prompt, 5 + n)
        assert generation.finish.num_tokens == 5 + n
    stats = engine.stats()
    assert stats.num_drafted > 0
    assert least <= stats.num_accepted / stats.num_drafted <= 1
    assert stats.num_accepted == sum(generation.num_accepted for generation in generations)
    if wrong == 1:
        assert stats.num_accepted == 0
    if wrong == 0:
        plain = Engine(EchoRunner(dp=dp, num_slots=3), step_tokens=24)
        for n, prompt in enumerate(prompts):
            plain.submit(request(prompt, 5 + n))
        assert steps < 0.6 * run_all(plain)


def test_a_stop_token_among_confirmed_guesses_ends_the_answer_there():
    engine = Engine(GuessingRunner(), step_tokens=30, drafter=Periodic(6))
    generation = engine.submit(request([5, 6, 7, 9999, 8], 40, stop_ids=(9999,)))
    run_all(engine)
    assert tokens_of(generation) == [5, 6, 7]
    assert (generation.finish.reason, generation.finish.num_tokens) == ("stop", 4)


def test_the_longest_answer_is_never_exceeded_and_the_budget_holds():
    runner = GuessingRunner(num_slots=2, max_tokens=12)
    engine = Engine(runner, step_tokens=8, drafter=Periodic(100))
    generations = [engine.submit(request([n] * 5, 8)) for n in (1, 2, 3)]
    run_all(engine)
    assert [len(tokens_of(generation)) for generation in generations] == [8, 8, 8]
    assert 2 < runner.most_tokens <= 8


def test_guesses_take_nothing_from_the_prompts_of_others():
    def steps_to_read(drafter) -> int:
        runner = GuessingRunner(num_slots=2)
        engine = Engine(runner, step_tokens=16, drafter=drafter)
        engine.submit(request([1, 2, 3], 100))
        engine.step_once()
        reader = engine.submit(request([9] * 64, 1))
        count = 0
        while reader._events.empty():
            engine.step_once()
            count += 1
        return count

    assert steps_to_read(Periodic(100)) <= 64 // (16 // 2)


def test_a_drafter_that_raises_is_let_go_and_costs_no_answer():
    class Broken(Periodic):
        def propose(self, asks):
            if self.num > 6:
                raise ZeroDivisionError("no guess")
            return super().propose(asks)

    engine = Engine(GuessingRunner(), step_tokens=24, drafter=Broken())
    generation = engine.submit(request([1, 2, 3], 30))
    run_all(engine)
    assert tokens_of(generation) == echo_of([1, 2, 3], 30)
    assert isinstance(engine.draft_error, ZeroDivisionError)
    assert engine.error is None


def test_a_runner_that_confirms_what_was_not_guessed_is_named():
    class Liar(GuessingRunner):
        def step(self, inputs):
            lie = (SampledToken(token_id=4321, logprob=0.0),)
            return [[replace(token, accepted=lie) for token in row] for row in super().step(inputs)]

    engine = Engine(Liar(), step_tokens=24, drafter=Periodic())
    generation = engine.submit(request([1, 2, 3], 30))
    run_all(engine)
    with pytest.raises(DeploymentError, match="accepted what was not guessed"):
        list(generation)


def test_answers_held_to_a_grammar_are_not_guessed():
    class Free:
        error = None

        def allowed(self):
            return b""

        def accept(self, token_id):
            pass

    engine = Engine(GuessingRunner(), step_tokens=24, drafter=Periodic())
    generation = engine.submit(
        GenerationRequest(token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=9), constraint=Free())
    )
    run_all(engine)
    assert tokens_of(generation) == echo_of([1, 2, 3], 9)
    assert engine.stats().num_drafted == 0


# verifying


def step_of(drafts, params, **options) -> SequenceStep:
    ids = (7, *(draft.token_id for draft in drafts))
    return SequenceStep(slot=0, start=0, token_ids=ids, sample=params, drafts=tuple(drafts), **options)


def ids_of(token: SampledToken) -> list[int]:
    return [*(each.token_id for each in token.accepted), token.token_id]


def test_greedy_guesses_hold_as_far_as_they_are_what_would_have_been_chosen():
    rows = torch.randn(5, 11, generator=torch.Generator().manual_seed(3))
    best = rows.argmax(-1).tolist()
    params = SamplingParams()
    for num_right in range(5):
        guesses = [*best[:num_right], *((token + 1) % 11 for token in best[num_right:4])]
        token = verify(rows, step_of([Draft(token_id=g) for g in guesses], params), params)
        assert ids_of(token) == best[: num_right + 1]
        assert [each.logprob for each in (*token.accepted, token)] == pytest.approx(
            torch.log_softmax(rows, -1).amax(-1)[: num_right + 1].tolist()
        )


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 3}, {"top_p": 0.7}, {"repetition_penalty": 1.6, "presence_penalty": 0.9}]
)
def test_a_guess_that_was_looked_up_changes_no_drawn_token(options):
    """Token for token what the same seed gives without guesses, penalties counting the guesses before a token."""
    generator = torch.Generator().manual_seed(4)
    for seed in range(60):
        rows = torch.randn(4, 6, generator=generator)
        params = SamplingParams(temperature=0.9, seed=seed, **options)
        history = array("i", [1, 2, 2])
        alone = []
        for i, row in enumerate(rows):
            past = array("i", [*history, *alone]).tobytes() if params.needs_history else b""
            alone.append(sample_row(row, params, 1 + i, history=past).token_id)
        guesses = [*alone[: seed % 4], *((token + 1) % 6 for token in alone[seed % 4 : 3])]
        past = history.tobytes() if params.needs_history else b""
        step = step_of([Draft(token_id=g) for g in guesses], params, step_idx=1, history=past)
        assert ids_of(verify(rows, step, params)) == alone[: seed % 4 + 1]


def test_rows_are_dealt_to_the_steps_they_belong_to():
    rows = torch.eye(8)[[3, 1, 2, 5, 6]]
    steps = [
        SequenceStep(slot=0, start=0, token_ids=(9,), sample=SamplingParams()),
        step_of([Draft(token_id=1), Draft(token_id=2)], SamplingParams()),
        SequenceStep(slot=2, start=0, token_ids=(9,), sample=SamplingParams()),
    ]
    assert [ids_of(token) for token in sample_steps(rows, steps)] == [[3], [1, 2, 5], [6]]


P = torch.tensor([[2.0, 1.0, 0.3, -0.5, 0.0], [0.1, 1.4, -1.0, 0.6, 0.2]])
Q = ((0, 0.15), (2, 0.5), (4, 0.35))  # far from P, and without two of its tokens
NUM_DRAWS = 4000
QUANTILES = (18.47, 51.18)  # of chi-square with 4 and 24 degrees of freedom: beyond them once in 1,000 experiments


def pairs(choose, num_draws=NUM_DRAWS) -> Counter:
    """How often each pair of first and second token came."""
    return Counter(choose(seed) for seed in range(num_draws))


def speculated(seed: int) -> tuple[int, int]:
    """Two tokens: the first after a guess drawn from Q, the second by whatever came of it."""
    params = SamplingParams(temperature=1.0, seed=seed)
    top = tuple((token_id, float(torch.tensor(q).log())) for token_id, q in Q)
    guess = draw_draft(SampledToken(token_id=0, logprob=0.0, top=top), params, 0)
    assert dict(guess.support) == pytest.approx(dict(Q))
    token = verify(P, step_of([guess], params), params)
    first, *rest = ids_of(token)
    return first, rest[0] if rest else sample_row(P[1], params, 1).token_id


def chi_square(counts: Counter, params: SamplingParams, num_draws=NUM_DRAWS) -> float:
    """Of the first tokens against the model's own distribution, and of both together; 1 is the limit of chance."""
    p, r = (candidate_mass(row, params, 0) for row in P)
    expected = num_draws * (p / p.sum())[:, None] * (r / r.sum())
    found = torch.zeros(5, 5, dtype=torch.float64)
    for (first, second), count in counts.items():
        found[first, second] = count
    both = ((found - expected) ** 2 / expected).sum()
    first = ((found.sum(1) - expected.sum(1)) ** 2 / expected.sum(1)).sum()
    return max(float(first) / QUANTILES[0], float(both) / QUANTILES[1])


def test_drawn_guesses_leave_the_distribution_as_it_is():
    assert chi_square(pairs(speculated), SamplingParams(temperature=1.0)) < 1


@pytest.mark.slow
@pytest.mark.timeout(900)  # 200,000 draws are some minutes of work
def test_drawn_guesses_leave_the_distribution_as_it_is_over_200_000_draws():
    assert chi_square(pairs(speculated, 200_000), SamplingParams(temperature=1.0), 200_000) < 1


def test_drawn_directly_the_distribution_is_found_to_be_what_it_is():
    def direct(seed):
        params = SamplingParams(temperature=1.0, seed=seed)
        return tuple(sample_row(row, params, i).token_id for i, row in enumerate(P))

    assert chi_square(pairs(direct), SamplingParams(temperature=1.0)) < 1


@pytest.mark.parametrize("fault", ["takes all", "draws the rest from p", "one number for both"])
def test_a_biased_sampler_is_found(monkeypatch, fault):
    from workbench.serving import verify as module

    if fault == "takes all":
        monkeypatch.setattr(module, "uniform", lambda *_: 0.0)
    elif fault == "draws the rest from p":
        mass = {}
        candidate = module.candidate_mass
        monkeypatch.setattr(module, "candidate_mass", lambda *a, **k: mass.setdefault("p", candidate(*a, **k)))
        draw = module.draw
        monkeypatch.setattr(module, "draw", lambda _rest, seed, idx: draw(mass["p"], seed, idx))
    else:
        uniform = module.uniform
        monkeypatch.setattr(module, "uniform", lambda seed, idx, _stream: uniform(seed, idx))
    assert chi_square(pairs(speculated), SamplingParams(temperature=1.0)) > 2


# the draft model


class Reader(EchoRunner):
    """Guesses that each text goes on with its last token plus one, and checks what it is given to read."""

    def step(self, inputs):
        (steps,) = inputs
        tokens = []
        for step in steps:
            held = self.slots[0, step.slot]
            assert step.start == len(held), "the certain tokens it holds"
            new = [*held, *step.token_ids]
            if not step.is_tentative:
                held.extend(step.token_ids)
            if step.sample is not None:
                top = ((new[-1] + 1, -0.1), (3, -2.5))
                tokens.append(SampledToken(token_id=new[-1] + 1, logprob=-0.1, top=top))
        self.steps.append(inputs)
        return [tokens]


def ask(prompt, generated, room=4, request_id=1, slot=0, replica=0, **options) -> DraftAsk:
    return DraftAsk(
        request_id=request_id, replica=replica, slot=slot, prompt=tuple(prompt), generated=generated, room=room,
        sampling=SamplingParams(**options),
    )  # fmt: skip


TARGET = RunnerInfo(dp=2, num_slots=2, max_tokens=100, vocab_size=10_000, has_vision=False)


def guessed(drafts, request_id=1) -> list[int]:
    return [draft.token_id for draft in drafts.get(request_id, ())]


def test_a_draft_model_goes_ahead_and_only_ever_keeps_what_is_certain():
    runner = Reader(num_slots=4, max_tokens=60)
    drafter, generated = ModelDrafter(runner, TARGET, 3), [30]
    assert guessed(drafter.propose([ask([10, 20], generated, slot=1, replica=1)])) == [31, 32, 33]
    assert runner.slots[0, 3] == [10, 20, 30]
    generated += [31, 99]  # one held, then another token came
    assert guessed(drafter.propose([ask([10, 20], generated, slot=1, replica=1)])) == [100, 101, 102]
    assert runner.slots[0, 3] == [10, 20, 30, 31, 99]
    assert [sum(len(s.token_ids) for s in inputs[0]) for inputs in runner.steps] == [3, 1, 2, 2, 1, 2]
    assert guessed(drafter.propose([ask([5], [6], request_id=2, slot=1, replica=1)]), 2) == [7, 8, 9]
    assert runner.slots[0, 3] == [5, 6], "another request begins with an empty slot"


def test_a_draft_model_reads_a_long_prompt_bit_by_bit_and_holds_up_nobody():
    drafter = ModelDrafter(Reader(num_slots=4, max_tokens=60), TARGET, 2, step_tokens=10)
    asks = [ask(range(25), [1]), ask([7], [8], request_id=2, slot=1)]
    found = [drafter.propose(asks) for _ in range(4)]
    assert guessed(found[0], 2) == [9, 10]
    assert [guessed(drafts) for drafts in found] == [[], [], [2, 3], []], "8, 10 and 8 tokens; then nothing new"


def test_a_draft_model_begins_anew_with_another_engine():
    """Its requests have the numbers of those before: nothing that was read for them may count."""
    runner = Reader(num_slots=4, max_tokens=60)
    drafter = ModelDrafter(runner, TARGET, 2)
    drafter.propose([ask([10, 20, 30], [40])])
    Engine(GuessingRunner(), drafter=drafter)
    assert guessed(drafter.propose([ask([5], [6])])) == [7, 8]
    assert runner.slots[0, 0] == [5, 6]


def test_a_draft_model_keeps_to_the_room_that_there_is_and_to_its_own_cache():
    drafter = ModelDrafter(Reader(num_slots=4, max_tokens=12), TARGET, 5)
    assert guessed(drafter.propose([ask([1], [2], room=2)])) == [3, 4]
    assert len(guessed(drafter.propose([ask(range(9), [2], request_id=2, slot=1)]), 2)) == 3
    assert drafter.propose([ask(range(40), [2], request_id=3, slot=1)]) == {}


def test_a_draft_model_that_does_not_fit_is_refused():
    for options in ({"num_slots": 3}, {"num_slots": 4, "dp": 2}):
        with pytest.raises(RequestError, match="does not fit"):
            ModelDrafter(Reader(**options), TARGET)
    other = RunnerInfo(dp=1, num_slots=1, max_tokens=9, vocab_size=7, has_vision=False)
    with pytest.raises(RequestError, match="does not fit"):
        ModelDrafter(Reader(), other)
    with pytest.raises(RequestError, match="at least 1"):
        ModelDrafter(Reader(num_slots=4), TARGET, 0)
