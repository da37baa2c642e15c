"""Guesses at the next tokens, so that one step of the model may confirm several: from the text so far, or from a draft
model of the same tokenizer. Pure bookkeeping, no tensors; a draft model runs behind a runner of its own.

A wrong guess costs arithmetic and never an answer: `verify` draws every token from the model's own distribution. So
what guesses is free in how it guesses, but must say from what distribution it drew (see `Draft`).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from workbench.base import RequestError, WorkbenchError
from workbench.serving.requests import MAX_LOGPROBS, SamplingParams
from workbench.serving.steps import Draft, Runner, RunnerInfo, SampledToken, SequenceStep
from workbench.serving.uniform import DRAFT, uniform

__all__ = ["DraftAsk", "Drafter", "ModelDrafter", "PromptLookup"]

Drafts = Mapping[int, tuple[Draft, ...]]  # by request


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DraftAsk:
    """A sequence that generates, and how many guesses there is room for."""

    request_id: int
    replica: int
    slot: int
    prompt: tuple[int, ...]
    generated: Sequence[int]  # at least one
    sampling: SamplingParams
    room: int

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.generated)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Tokens [start, stop) of prompt and answer together."""
        num_prompt = len(self.prompt)
        return [*self.prompt[start:stop], *self.generated[max(0, start - num_prompt) : max(0, stop - num_prompt)]]


class Drafter(Protocol):
    """Guesses; called between steps, by one thread. Whatever it raises ends the guessing and nothing else."""

    def propose(self, asks: Sequence[DraftAsk]) -> Drafts:
        """At most `room` guesses for each of the sequences it can guess for, by request."""

    def begin(self) -> None:
        """Forget all sequences: another engine takes over, whose numbers of requests mean others."""

    def close(self) -> None: ...


class PromptLookup:
    """The last tokens have stood here before: what followed then may follow now. Saxena 2023, prompt lookup decoding.

    The longest ending of `max_ngram` down to `min_ngram` tokens with an earlier occurrence counts, and of several
    occurrences the last. Good where answers quote their question: code to edit, texts to sum up, tables to copy.
    """

    def __init__(self, num_tokens: int = 4, *, max_ngram: int = 4, min_ngram: int = 2) -> None:
        if num_tokens < 1 or not 1 <= min_ngram <= max_ngram:
            raise RequestError(
                f"num_tokens={num_tokens}, n-grams of {min_ngram} to {max_ngram}", expected="numbers from 1, in order"
            )
        self.num_tokens, self.max_ngram, self.min_ngram = num_tokens, max_ngram, min_ngram
        self._texts: dict[int, array[int]] = {}  # by request, so that a long prompt is copied once

    def propose(self, asks: Sequence[DraftAsk]) -> Drafts:
        self._texts = {ask.request_id: self._text(ask) for ask in asks}
        drafts = {}
        for ask in asks:
            ids = self.lookup(self._texts[ask.request_id], min(self.num_tokens, ask.room))
            if ids:
                drafts[ask.request_id] = tuple(Draft(token_id=token_id) for token_id in ids)
        return drafts

    def begin(self) -> None:
        self._texts = {}

    def lookup(self, text: array[int], count: int) -> list[int]:
        """Up to `count` ids that followed an earlier occurrence of the ending of `text`; none where there is none."""
        data, width = text.tobytes(), text.itemsize
        for size in range(min(self.max_ngram, len(text) - 1), self.min_ngram - 1, -1):
            ending, stop = data[-size * width :], len(data) - 1  # an occurrence must end before the text does
            while (at := data.rfind(ending, 0, stop)) >= 0:
                if at % width == 0:
                    first = at // width + size
                    return list(text[first : first + count])
                stop = at + len(ending) - 1
        return []

    def _text(self, ask: DraftAsk) -> array[int]:
        text = self._texts.get(ask.request_id) or array("i", ask.prompt)
        text.extend(ask.tokens(len(text), ask.num_tokens))
        return text

    def close(self) -> None:
        """Nothing to end."""


@dataclass(eq=False, slots=True)
class _Draftee:
    """A sequence as the draft model knows it: `num_read` of its certain tokens are in the state of the slot."""

    request_id: int
    num_read: int = 0


class ModelDrafter:
    """A small model of the same tokenizer goes ahead of the large one, `num_tokens` at a time.

    It has a slot for every slot of `target`, reads each prompt at most `step_tokens` tokens per step of the large model
    (until it has caught up there are no guesses). It looks at no pictures and reads the ids that stand in their places,
    which is enough for what follows from the words: forms, lists, what was said before. Its own guesses are read
    tentatively, so its state only ever holds what the large model has confirmed.

    Above temperature 0 a guess is drawn from the likeliest MAX_LOGPROBS tokens, which is the distribution that `verify`
    is told of. Raises RequestError where the runner does not fit.
    """

    def __init__(self, runner: Runner, target: RunnerInfo, num_tokens: int = 4, *, step_tokens: int = 512) -> None:
        info = runner.info
        if info.vocab_size != target.vocab_size or info.dp != 1 or info.num_slots < target.num_slots * target.dp:
            raise RequestError(
                "the draft model does not fit",
                found=f"{info.vocab_size} ids, {info.num_slots} slots, {info.dp} replicas",
                expected=f"{target.vocab_size} ids, {target.num_slots * target.dp} slots in one replica",
            )
        if num_tokens < 1:
            raise RequestError(f"num_tokens={num_tokens}", expected="at least 1")
        self.runner, self.target, self.num_tokens, self.step_tokens = runner, target, num_tokens, step_tokens
        self._draftees: dict[int, _Draftee] = {}  # by slot of the draft model
        self._greedy = SamplingParams(max_tokens=1, num_logprobs=min(MAX_LOGPROBS, info.vocab_size))

    def propose(self, asks: Sequence[DraftAsk]) -> Drafts:
        asks = [ask for ask in asks if self._room(ask)]
        ready = self._read(asks)
        drafts: dict[int, list[Draft]] = {ask.request_id: [] for ask, _ in ready}
        while ready:
            ready = [(ask, token) for ask, token in ready if self._take(ask, token, drafts[ask.request_id])]
            if ready:
                ready = self._go_on([ask for ask, _ in ready], drafts)
        return {request_id: tuple(each) for request_id, each in drafts.items() if each}

    def begin(self) -> None:
        self._draftees.clear()  # each slot is reset before its next use

    def close(self) -> None:
        self.runner.close()

    def _room(self, ask: DraftAsk) -> int:
        """Guesses that fit everywhere; the last one is not read by the draft model."""
        return max(0, min(ask.room, self.num_tokens, self.runner.info.max_tokens - ask.num_tokens + 1))

    def _slot(self, ask: DraftAsk) -> int:
        return ask.replica * self.target.num_slots + ask.slot

    def _read(self, asks: Sequence[DraftAsk]) -> list[tuple[DraftAsk, SampledToken | WorkbenchError]]:
        """Let the draft model read what is certain by now. Returns those that it has read in full, with its token."""
        left = self.step_tokens
        steps: list[SequenceStep] = []
        readers: list[DraftAsk] = []
        for ask in sorted(asks, key=lambda each: each.num_tokens):  # a long prompt does not hold up the others
            slot = self._slot(ask)
            draftee = self._draftees.get(slot)
            if draftee is None or draftee.request_id != ask.request_id:
                draftee = self._draftees[slot] = _Draftee(ask.request_id)
                self.runner.reset_slot(0, slot)
            stop = min(ask.num_tokens, draftee.num_read + left)
            if stop == draftee.num_read:
                continue
            is_whole = stop == ask.num_tokens
            step = SequenceStep(
                slot=slot,
                start=draftee.num_read,
                token_ids=tuple(ask.tokens(draftee.num_read, stop)),
                sample=self._greedy if is_whole else None,
            )
            left -= stop - draftee.num_read
            draftee.num_read = stop
            steps.append(step)
            if is_whole:
                readers.append(ask)
        return self._step(steps, readers)

    def _go_on(
        self, asks: Sequence[DraftAsk], drafts: Mapping[int, Sequence[Draft]]
    ) -> list[tuple[DraftAsk, SampledToken | WorkbenchError]]:
        """One guess further. All guesses are read anew: they are few, and the state stays where it is certain."""
        steps = [
            SequenceStep(
                slot=self._slot(ask),
                start=ask.num_tokens,
                token_ids=tuple(draft.token_id for draft in drafts[ask.request_id]),
                is_tentative=True,
                sample=self._greedy,
            )
            for ask in asks
        ]
        return self._step(steps, asks)

    def _step(
        self, steps: Sequence[SequenceStep], asks: Sequence[DraftAsk]
    ) -> list[tuple[DraftAsk, SampledToken | WorkbenchError]]:
        if not steps:
            return []
        (tokens,) = self.runner.step([tuple(steps)])
        return list(zip(asks, tokens, strict=True))

    def _take(self, ask: DraftAsk, token: SampledToken | WorkbenchError, drafts: list[Draft]) -> bool:
        """Add the guess that follows from the draft model's token; whether there is room for another one after it."""
        if isinstance(token, WorkbenchError):
            return False
        drafts.append(draw_draft(token, ask.sampling, len(ask.generated) + len(drafts)))
        return len(drafts) < self._room(ask)


def draw_draft(token: SampledToken, sampling: SamplingParams, step_idx: int) -> Draft:
    """A guess for generated token `step_idx` from what a draft model says is likely."""
    if sampling.temperature == 0.0 or not token.top:
        return Draft(token_id=token.token_id)
    best = token.top[0][1]
    weights = [math.exp((logprob - best) / sampling.temperature) for _, logprob in token.top]
    total = math.fsum(weights)
    support = tuple((token_id, weight / total) for (token_id, _), weight in zip(token.top, weights, strict=True))
    support = tuple(each for each in support if each[1] > 0.0)
    target = uniform(sampling.seed, step_idx, DRAFT)
    for token_id, probability in support:
        target -= probability
        if target < 0:
            return Draft(token_id=token_id, support=support)
    return Draft(token_id=support[0][0], support=support)  # what rounding left over
