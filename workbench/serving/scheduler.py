"""Who runs in which slot, and what goes into the next step: pure bookkeeping, no clock, no threads, no model.

Continuous batching in its first form. Sequences enter free slots in order of arrival. A step then holds one token of
every sequence that generates, and the prompts of the others share what is left of the token budget: each gets an equal
part, and what a short prompt does not need goes to the longer ones. So a text prompt of n tokens behind any others is
read in at most ceil(n / (step_tokens // num_slots)) steps once it has a slot, and nobody's generation pauses.

Images are encoded when the first chunk that needs them comes up, at most one per replica and step, and their features
are dropped when no admitted prompt has rows left to fill from them.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from workbench.base import DeploymentError, QueueFullError
from workbench.serving.requests import GenerationRequest, PlacedImage
from workbench.serving.steps import EncodeImage, ImageSpan, RunnerInfo, SampledToken, SequenceStep, StepInput

__all__ = ["FinishReason", "Scheduler", "SequenceState", "StepPlan"]

FinishReason = Literal["stop", "length", "abort"]


@dataclass(eq=False, slots=True)
class SequenceState:
    """A request on its way. `num_cached` of its tokens (prompt, then generated) are in its slot."""

    request_id: int
    request: GenerationRequest
    replica: int = -1
    slot: int = -1
    num_cached: int = 0
    generated: list[int] = field(default_factory=list)
    is_aborted: bool = False

    @property
    def num_prompt(self) -> int:
        return len(self.request.token_ids)

    @property
    def num_unread(self) -> int:
        """Prompt tokens not yet in the cache."""
        return max(0, self.num_prompt - self.num_cached)

    @property
    def history(self) -> bytes:
        """int32 ids of prompt and answer, where the sampling needs them."""
        if not self.request.sampling.needs_history:
            return b""
        return array("i", [*self.request.token_ids, *self.generated]).tobytes()

    @property
    def allowed(self) -> bytes:
        """Which ids may come next, where there is a constraint."""
        return self.request.constraint.allowed() if self.request.constraint is not None else b""

    def waiting_images(self) -> list[PlacedImage]:
        """Images with rows not yet in the cache."""
        return [image for image in self.request.images if image.stop > self.num_cached]


@dataclass(eq=False, slots=True)
class StepPlan:
    """One step: images to encode first, an input per replica, and the sequences behind each entry of the inputs."""

    encode: list[tuple[int, EncodeImage]]
    inputs: list[StepInput]
    sequences: list[list[SequenceState]]

    @property
    def num_tokens(self) -> int:
        return sum(len(step.token_ids) for replica in self.inputs for step in replica)


class Scheduler:
    """Waiting line, slots and images of `info.dp` replicas.

    Invariant: in each replica the free slots and the slots of running sequences are disjoint and together all slots.
    """

    def __init__(self, info: RunnerInfo, *, step_tokens: int, max_queue: int) -> None:
        if step_tokens < info.num_slots:
            raise ValueError(f"step_tokens={step_tokens} cannot give each of {info.num_slots} slots a token per step")
        self.info = info
        self.step_tokens = step_tokens
        self.max_queue = max_queue
        self.waiting: deque[SequenceState] = deque()
        self.running: list[list[SequenceState]] = [[] for _ in range(info.dp)]  # in order of admission
        self._free: list[list[int]] = [list(reversed(range(info.num_slots))) for _ in range(info.dp)]
        self._users: list[Counter[str]] = [Counter() for _ in range(info.dp)]  # admitted prompts that still need a key
        self._encoded: list[set[str]] = [set() for _ in range(info.dp)]

    @property
    def has_work(self) -> bool:
        return bool(self.waiting) or any(self.running)

    @property
    def num_running(self) -> int:
        return sum(map(len, self.running))

    @property
    def num_free(self) -> int:
        return sum(map(len, self._free))

    def add(self, sequence: SequenceState) -> None:
        """Put a request at the end of the line. Raises QueueFullError where `max_queue` wait already."""
        if len(self.waiting) >= self.max_queue:
            raise QueueFullError(
                f"{len(self.waiting)} requests wait already",
                expected=f"at most {self.max_queue}",
                next_step="Try later",
            )
        self.waiting.append(sequence)

    def admit(self) -> list[SequenceState]:
        """Move sequences from the line into free slots of the least-loaded replicas; their slots must then be reset."""
        admitted = []
        while self.waiting and self.num_free:
            sequence = self.waiting.popleft()
            replica = max(range(self.info.dp), key=lambda r: len(self._free[r]))  # the first of equals
            sequence.replica, sequence.slot = replica, self._free[replica].pop()
            self.running[replica].append(sequence)
            self._users[replica].update({image.key for image in sequence.request.images})
            admitted.append(sequence)
        return admitted

    def plan(self) -> StepPlan:
        """The next step over all running sequences. Changes nothing: `commit` does, once the step has been computed."""
        plan = StepPlan(encode=[], inputs=[], sequences=[])
        for replica, running in enumerate(self.running):
            steps: list[SequenceStep] = []
            sequences: list[SequenceState] = []
            reading = [sequence for sequence in running if sequence.num_unread]
            budget = self.step_tokens - (len(running) - len(reading))
            grants = dict(zip(map(id, reading), _shares([s.num_unread for s in reading], budget), strict=True))
            fresh: str | None = None  # the one image that this step encodes
            for sequence in running:
                if not sequence.num_unread:
                    steps.append(_decode_step(sequence))
                    sequences.append(sequence)
                    continue
                stop = sequence.num_cached + grants[id(sequence)]
                for image in sequence.waiting_images():
                    if image.row >= stop:
                        break
                    if image.key in self._encoded[replica] or image.key == fresh:
                        continue
                    if fresh is not None:
                        stop = max(sequence.num_cached, image.row)
                        break
                    fresh = image.key
                    plan.encode.append((replica, (image.key, image.patches, image.grid)))
                if stop > sequence.num_cached:
                    steps.append(_prefill_step(sequence, stop))
                    sequences.append(sequence)
            plan.inputs.append(tuple(steps))
            plan.sequences.append(sequences)
        return plan

    def commit(
        self, plan: StepPlan, sampled: Sequence[Sequence[SampledToken]]
    ) -> list[tuple[SequenceState, SampledToken, FinishReason | None]]:
        """Take over a computed step. Returns each new token with its reason to finish, if any; leaves aborted ones out.

        Raises DeploymentError where the runner returned another number of tokens than sequences that sample.
        """
        news: list[tuple[SequenceState, SampledToken, FinishReason | None]] = []
        for replica, encoded in plan.encode:
            self._encoded[replica].add(encoded[0])
        for replica, (steps, sequences) in enumerate(zip(plan.inputs, plan.sequences, strict=True)):
            sampling = [sequence for step, sequence in zip(steps, sequences, strict=True) if step.sample is not None]
            if len(sampled[replica]) != len(sampling):
                raise DeploymentError(
                    f"replica {replica} returned {len(sampled[replica])} tokens", expected=f"{len(sampling)}"
                )
            for step, sequence in zip(steps, sequences, strict=True):
                before = {image.key for image in sequence.waiting_images()}
                sequence.num_cached += len(step.token_ids)
                self._users[replica].subtract(before - {image.key for image in sequence.waiting_images()})
            for sequence, token in zip(sampling, sampled[replica], strict=True):
                sequence.generated.append(token.token_id)
                if sequence.request.constraint is not None:
                    sequence.request.constraint.accept(token.token_id)
                if not sequence.is_aborted:
                    news.append((sequence, token, _finish_reason(sequence)))
        return news

    def release(self, sequence: SequenceState) -> None:
        """Free the slot of a running sequence, or take a waiting one out of the line."""
        if sequence.slot < 0:
            self.waiting.remove(sequence)
            return
        self.running[sequence.replica].remove(sequence)
        self._free[sequence.replica].append(sequence.slot)
        self._users[sequence.replica].subtract({image.key for image in sequence.waiting_images()})
        sequence.slot = -1

    def unused_images(self) -> list[tuple[int, list[str]]]:
        """Encoded images that nobody needs any more, by replica; they count as dropped from now on."""
        unused = []
        for replica, encoded in enumerate(self._encoded):
            keys = sorted(key for key in encoded if self._users[replica][key] <= 0)
            encoded.difference_update(keys)
            self._users[replica] = +self._users[replica]
            if keys:
                unused.append((replica, keys))
        return unused

    def check(self) -> None:
        """Raises AssertionError where a slot is lost or held twice."""
        for replica, running in enumerate(self.running):
            slots = self._free[replica] + [sequence.slot for sequence in running]
            assert sorted(slots) == list(range(self.info.num_slots)), f"replica {replica}: slots {sorted(slots)}"


def _shares(wanted: Sequence[int], budget: int) -> list[int]:
    """Equal parts of `budget`, none above what is wanted; what a small one leaves goes to the larger ones."""
    shares = [0] * len(wanted)
    order = sorted(range(len(wanted)), key=lambda i: (wanted[i], i))
    for done, index in enumerate(order):
        shares[index] = min(wanted[index], budget // (len(order) - done))
        budget -= shares[index]
    return shares


def _decode_step(sequence: SequenceState) -> SequenceStep:
    return SequenceStep(
        slot=sequence.slot,
        start=sequence.num_cached,
        token_ids=(sequence.generated[-1],),
        sample=sequence.request.sampling,
        step_idx=len(sequence.generated),
        history=sequence.history,
        allowed=sequence.allowed,
    )


def _prefill_step(sequence: SequenceState, stop: int) -> SequenceStep:
    start = sequence.num_cached
    spans = []
    for image in sequence.waiting_images():
        first, last = max(image.row, start), min(image.stop, stop)
        if first < last:
            spans.append(ImageSpan(key=image.key, row=first - start, first=first - image.row, count=last - first))
    return SequenceStep(
        slot=sequence.slot,
        start=start,
        token_ids=sequence.request.token_ids[start:stop],
        images=tuple(spans),
        has_images=bool(sequence.request.images),
        sample=sequence.request.sampling if stop == sequence.num_prompt else None,
        history=sequence.history if stop == sequence.num_prompt else b"",
        allowed=sequence.allowed if stop == sequence.num_prompt else b"",
    )


def _finish_reason(sequence: SequenceState) -> FinishReason | None:
    if sequence.generated[-1] in sequence.request.sampling.stop_ids:
        return "stop"
    return "length" if len(sequence.generated) == sequence.request.sampling.max_tokens else None
