"""Is the answer to a request its own? The same requests alone and in every kind of company, compared token by token.

Nothing that a server does for speed may change an answer: who else is in the step, in which chunks a prompt is read,
whether its beginning was kept from another one, whether it gave its slot away in the middle. What does change it is
rounding, for sums are taken in another order; so log probabilities are compared within a tolerance, and a token may
differ only where the two were as likely as each other within it. Anything beyond is cross-talk.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from workbench.base import Cell, RequestError, Table
from workbench.serving.engine import Engine
from workbench.serving.generation import Generation, TokenEvent
from workbench.serving.inputs import ImageProcessor, expand_images
from workbench.serving.owner import driving
from workbench.serving.requests import MAX_LOGPROBS, GenerationRequest, PlacedImage, SamplingParams
from workbench.serving.speculation import DraftAsk, Drafter
from workbench.serving.steps import Draft, Runner, RunnerInfo
from workbench.spec import ModelSpec

__all__ = [
    "ConditionResult",
    "InvarianceReport",
    "KnownAnswers",
    "check_invariance",
    "invariance_requests",
    "tolerance_of",
]

PAGE_TOKENS = 8
SHARED_TOKENS = 2 * PAGE_TOKENS + 3  # what the first two prompts have in common
LENGTHS = (SHARED_TOKENS + 2, SHARED_TOKENS + 17, 1, 7, 64, 30)
MAX_STEPS = 1_000_000

Answers = list[list[TokenEvent]]
Condition = Callable[[], tuple[Answers, str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConditionResult:
    """One condition against the requests alone. `max_difference` is the largest |Δ log p| of any token told of.

    `num_ties` differ where the reference had both tokens within the tolerance, `num_wrong` where it had not; what
    follows a token that differs is another text and is not compared. `missing` says why the condition did not come
    about, such as a prefix cache without a hit: then nothing is proven.
    """

    name: str
    num_requests: int
    num_tokens: int
    num_ties: int
    num_wrong: int
    max_difference: float
    missing: str = ""
    first_wrong: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class InvarianceReport:
    """What was compared, by condition; `tolerance` is on |Δ log p|, in nats."""

    place: str
    tolerance: float
    results: tuple[ConditionResult, ...]

    @property
    def ok(self) -> bool:
        return all(self.verdict(result) == "same" for result in self.results)

    def verdict(self, result: ConditionResult) -> str:
        if result.missing:
            return "not shown"
        is_wrong = result.num_wrong or not result.max_difference <= self.tolerance  # also where it is not a number
        return "CROSS-TALK" if is_wrong else "same"

    def render(self) -> str:
        rows: list[tuple[Cell, ...]] = [
            (
                result.name,
                result.num_requests,
                result.num_tokens,
                result.num_ties,
                result.num_wrong,
                f"{result.max_difference:.1e}",
                self.verdict(result),
            )
            for result in self.results
        ]
        notes = [f"{r.name}: {r.missing or r.first_wrong}" for r in self.results if r.missing or r.first_wrong]
        return Table(
            columns=("condition", "requests", "tokens", "ties", "wrong", "max |Δ log p|", "verdict"),
            rows=tuple(rows),
            title=f"Answers alone and in company, {self.place}; tolerance {self.tolerance:g}",
            note="\n".join(notes),
        ).render()

    def to_json(self) -> dict[str, object]:
        results = [
            {**{name: getattr(r, name) for name in r.__dataclass_fields__}, "verdict": self.verdict(r)}
            for r in self.results
        ]
        return {"place": self.place, "tolerance": self.tolerance, "ok": self.ok, "results": results}


def tolerance_of(precision: str) -> float:
    """What rounding may do to a log probability, in nats: float32 activations, else bfloat16 ones."""
    return 1e-3 if precision == "fp32" else 0.25


def invariance_requests(
    spec: ModelSpec, info: RunnerInfo, *, num_requests: int = 6, max_tokens: int = 12, seed: int = 0
) -> list[GenerationRequest]:
    """Prompts of drawn ids and unequal lengths, the first two with a common beginning; for a model with a vision tower
    the last one has a picture. Raises RequestError where the cache of a slot is too short for them.
    """
    rng = random.Random(seed)
    pad = {spec.tokens.media, spec.tokens.pad}

    def drawn(count: int) -> list[int]:
        ids: list[int] = []
        while len(ids) < count:
            if (token_id := rng.randrange(spec.vocab_size)) not in pad:
                ids.append(token_id)
        return ids

    room = info.max_tokens - max_tokens + 1
    if room <= SHARED_TOKENS + 2 or num_requests < 2:
        raise RequestError(
            f"{num_requests} requests, {info.max_tokens} tokens in a slot",
            expected=f"at least 2 requests, and {SHARED_TOKENS + max_tokens + 2} tokens",
        )
    sampling = SamplingParams(max_tokens=max_tokens, num_logprobs=min(MAX_LOGPROBS, spec.vocab_size))
    common = drawn(SHARED_TOKENS)
    prompts = [drawn(min(LENGTHS[n % len(LENGTHS)] + n // len(LENGTHS), room)) for n in range(num_requests)]
    for n in (0, 1):
        prompts[n] = [*common, *prompts[n][SHARED_TOKENS:]]
    requests = [GenerationRequest(token_ids=tuple(ids), sampling=sampling) for ids in prompts]
    if info.has_vision and spec.image is not None and spec.tokens.media is not None:
        pixels = np.random.default_rng(seed).integers(0, 256, (40, 70, 3), np.uint8)
        image = ImageProcessor(spec.image).process(Image.fromarray(pixels))
        prompt = expand_images([*drawn(4), spec.tokens.media, *drawn(3)], [image], media_pad=spec.tokens.media)
        if len(prompt.token_ids) <= room:
            (span,) = prompt.image_spans
            placed = PlacedImage(
                key=image.key, patches=image.patches, grid=image.grid, row=span.start, count=span.count
            )
            requests[-1] = GenerationRequest(token_ids=prompt.token_ids, images=(placed,), sampling=sampling)
    return requests


def check_invariance(
    runner: Runner,
    requests: Sequence[GenerationRequest],
    *,
    tolerance: float,
    place: str = "one process",
    conditions: Collection[str] | None = None,
) -> InvarianceReport:
    """Greedy answers of `requests` alone, against the same under every other condition, or those named.

    The runner must be free and is left with empty slots. Raises RequestError for one with a single slot, where there
    is no company, for requests that do not tell log probabilities and for unknown names; and the runner's own errors.
    """
    if runner.info.num_slots < 2 or len(requests) < 2:
        raise RequestError("there is no company", found=f"{runner.info.num_slots} slots", expected="at least 2")
    if any(not request.sampling.num_logprobs or request.sampling.temperature for request in requests):
        raise RequestError("requests must be greedy and tell log probabilities", next_step="Set num_logprobs")
    bench = _Bench(runner, requests, tolerance)
    known = bench.conditions()
    if unknown := set(conditions or ()) - known.keys():
        raise RequestError(f"no condition {sorted(unknown)}", expected=", ".join(known))
    with driving(runner, "the invariance check"):
        results = bench.run({name: known[name] for name in known if conditions is None or name in conditions})
    return InvarianceReport(place=place, tolerance=tolerance, results=tuple(results))


class KnownAnswers:
    """A drafter that knows answers, by prompt, and gets every `wrong`-th guess wrong: so guesses hold in part."""

    def __init__(
        self, answers: Mapping[tuple[int, ...], Sequence[int]], *, wrong: int = 3, num_tokens: int = 3
    ) -> None:
        self.answers, self.wrong, self.num_tokens = answers, wrong, num_tokens
        self._num_guesses = 0

    def propose(self, asks: Sequence[DraftAsk]) -> dict[int, tuple[Draft, ...]]:
        return {ask.request_id: self._guess(ask) for ask in asks if ask.prompt in self.answers}

    def _guess(self, ask: DraftAsk) -> tuple[Draft, ...]:
        at = len(ask.generated)
        drafts = []
        for token_id in self.answers[ask.prompt][at : at + min(self.num_tokens, ask.room)]:
            self._num_guesses += 1
            is_wrong = self._num_guesses % self.wrong == 0
            drafts.append(Draft(token_id=token_id ^ 1 if is_wrong and token_id else token_id))
        return tuple(drafts)

    def begin(self) -> None:
        """It knows prompts, not requests."""

    def close(self) -> None:
        """Nothing to end."""


class _Bench:
    """Runs the conditions one after another; `alone` is what they are compared with."""

    def __init__(self, runner: Runner, requests: Sequence[GenerationRequest], tolerance: float) -> None:
        self.runner, self.requests, self.tolerance = runner, list(requests), tolerance
        self.alone: Answers = []

    def run(self, conditions: Mapping[str, Condition]) -> list[ConditionResult]:
        self.alone = self._one_by_one(self._engine(), range(len(self.requests)))
        results = []
        for name, condition in conditions.items():
            answers, missing = condition()
            results.append(compare(name, self.alone, answers, self.tolerance, missing=missing))
        return results

    def conditions(self) -> dict[str, Condition]:
        """By name; each gives the answers, and why it did not come about where it did not."""
        return {
            "alone again, slots in another order": self._again,
            "all together": lambda: (self._together(self._engine(), self.requests), ""),
            "all together, other way round": self._reversed,
            **{f"together, steps of {n} tokens": self._chunked(n) for n in self._step_sizes()},
            "from kept pages": self._from_pages,
            "from kept pages, together and in chunks": self._from_pages_together,
            "paused for others of higher priority": self._paused,
            "beside requests that are given up": self._beside_aborts,
            "with guesses that hold in part": self._guessed,
        }

    def _engine(
        self,
        *,
        step_tokens: int | None = None,
        prefix_pages: int = 0,
        drafter: Drafter | None = None,
    ) -> Engine:
        longest = max(len(request.token_ids) for request in self.requests)
        return Engine(
            self.runner,
            step_tokens=step_tokens or longest * self.runner.info.num_slots,
            prefix_pages=prefix_pages,
            page_tokens=PAGE_TOKENS,
            drafter=drafter,
        )

    def _one_by_one(self, engine: Engine, order: Sequence[int]) -> Answers:
        answers: Answers = [[] for _ in self.requests]
        for n in order:
            generation = engine.submit(self.requests[n])
            _finish(engine)
            answers[n] = list(generation)
        return answers

    def _together(self, engine: Engine, requests: Sequence[GenerationRequest]) -> Answers:
        generations = [engine.submit(request) for request in requests]
        _finish(engine)
        return [list(generation) for generation in generations]

    def _again(self) -> tuple[Answers, str]:
        return self._one_by_one(self._engine(), range(len(self.requests) - 1, -1, -1)), ""

    def _reversed(self) -> tuple[Answers, str]:
        return self._together(self._engine(), self.requests[::-1])[::-1], ""

    def _chunked(self, num_tokens: int) -> Callable[[], tuple[Answers, str]]:
        def run() -> tuple[Answers, str]:
            return self._together(self._engine(step_tokens=num_tokens), self.requests), ""

        return run

    def _step_sizes(self) -> list[int]:
        """From one token of each sequence to more than most prompts have, odd ones among them."""
        slots = self.runner.info.num_slots
        return [slots, slots + 3, 4 * slots + 1, 16 * slots - 1]

    def _from_pages(self) -> tuple[Answers, str]:
        engine = self._paged()
        for n in range(len(self.requests)):
            engine.submit(self.requests[n])
            _finish(engine)
        before = engine.stats().num_cached_tokens
        answers = self._one_by_one(engine, range(len(self.requests)))
        missing = "" if engine.stats().num_cached_tokens > before else "no page was taken from those kept"
        engine.drop_pages()
        return answers, missing

    def _from_pages_together(self) -> tuple[Answers, str]:
        engine = self._paged(step_tokens=3 * self.runner.info.num_slots)
        engine.submit(self.requests[0])
        _finish(engine)
        answers = self._together(engine, self.requests)
        missing = "" if engine.stats().num_cached_tokens else "no page was taken from those kept"
        engine.drop_pages()
        return answers, missing

    def _paged(self, step_tokens: int | None = None) -> Engine:
        num_pages = sum(len(request.token_ids) // PAGE_TOKENS for request in self.requests) + 1
        return self._engine(step_tokens=step_tokens, prefix_pages=num_pages)

    def _paused(self) -> tuple[Answers, str]:
        """The first ones generate when as many as there are slots come with a higher priority."""
        engine = self._engine()
        low = [engine.submit(request) for request in self.requests]
        for _ in range(2):  # each has said something, and none has come to its end
            engine.step_once()
        urgent = [replace(request, priority=1) for request in self._crowd()]
        for request in urgent:
            engine.submit(request)
        _finish(engine)
        missing = "" if engine.stats().num_preempted else "nobody gave a slot away"
        return [list(generation) for generation in low], missing

    def _beside_aborts(self) -> tuple[Answers, str]:
        """Before each request one of the crowd, which is given up in the middle, so that slots change hands."""
        engine = self._engine()
        crowd: list[Generation] = []
        generations: list[Generation] = []
        for passer, request in zip(self._crowd(len(self.requests)), self.requests, strict=True):
            crowd.append(engine.submit(passer))
            generations.append(engine.submit(request))
        for generation in crowd:
            engine.step_once()
            engine.step_once()
            generation.abort()
        _finish(engine)
        missing = "" if engine.stats().num_aborted else "nobody was given up"
        return [list(generation) for generation in generations], missing

    def _guessed(self) -> tuple[Answers, str]:
        known = {
            request.token_ids: [event.token_id for event in answer]
            for request, answer in zip(self.requests, self.alone, strict=True)
        }
        engine = self._engine(drafter=KnownAnswers(known))
        answers = self._together(engine, self.requests)
        stats = engine.stats()
        is_shown = 0 < stats.num_accepted < stats.num_drafted
        return answers, "" if is_shown else f"{stats.num_accepted} of {stats.num_drafted} guesses held"

    def _crowd(self, count: int | None = None) -> list[GenerationRequest]:
        """Other prompts of the same kind, whose answers nobody compares."""
        info, most = self.runner.info, self.requests[0].sampling.max_tokens
        rng = random.Random(7)
        num = count or info.num_slots * info.dp
        lengths = [rng.randrange(1, min(24, info.max_tokens - most)) for _ in range(num)]
        known = [token for request in self.requests if not request.images for token in request.token_ids]
        return [
            GenerationRequest(
                token_ids=tuple(rng.choice(known) for _ in range(length)), sampling=SamplingParams(max_tokens=most)
            )
            for length in lengths
        ]


def compare(name: str, reference: Answers, answers: Answers, tolerance: float, *, missing: str = "") -> ConditionResult:
    """Answers under a condition against those alone, up to the first token that differs."""
    num_tokens = num_ties = num_wrong = 0
    difference, first_wrong = 0.0, ""
    for n, (alone, here) in enumerate(zip(reference, answers, strict=True)):
        if len(alone) != len(here):
            num_wrong += 1
            first_wrong = first_wrong or f"request {n} has {len(here)} tokens, alone {len(alone)}"
        for place, (expected, found) in enumerate(zip(alone, here, strict=False)):
            num_tokens += 1
            gap = _gap(expected, found)
            difference = gap if math.isnan(gap) else max(difference, gap)
            if expected.token_id == found.token_id:
                continue
            likelihoods = dict(expected.top)
            if expected.logprob - likelihoods.get(found.token_id, -math.inf) <= 2 * tolerance:
                num_ties += 1
            else:
                num_wrong += 1
                text = f"token {place} of request {n} is {found.token_id}, alone {expected.token_id}"
                first_wrong = first_wrong or text
            break
    return ConditionResult(
        name=name,
        num_requests=len(reference),
        num_tokens=num_tokens,
        num_ties=num_ties,
        num_wrong=num_wrong,
        max_difference=difference,
        missing=missing,
        first_wrong=first_wrong,
    )


def _gap(expected: TokenEvent, found: TokenEvent) -> float:
    """Largest difference in log probability over the ids that both tell of; infinite where they share none."""
    alone = {**dict(expected.top), expected.token_id: expected.logprob}
    here = {**dict(found.top), found.token_id: found.logprob}
    return max((abs(alone[token_id] - here[token_id]) for token_id in alone.keys() & here.keys()), default=math.inf)


def _finish(engine: Engine) -> None:
    for _ in range(MAX_STEPS):
        if not engine.step_once():
            break
    if engine.error is not None:
        raise engine.error
