"""Who runs in which slot, and what goes into the next step: pure bookkeeping, no clock, no threads, no model.

Continuous batching in its first form. Sequences enter free slots in order of arrival, and tenants take turns by their
weights. A step then holds one token of every sequence that generates, and the prompts of the others share what is left
of the token budget: each gets an equal part, and what a short prompt does not need goes to the longer ones. So a text
prompt of n tokens behind any others is read in at most ceil(n / (step_tokens // num_slots)) steps once it has a slot,
and nobody's generation pauses.

The deeper in a prompt a token stands, the more there is to attend to. Where the runner says what `reading` costs, the
chunks of a prompt become shorter beyond `FULL_DEPTH` tokens, so that they cost no more than those at that depth, and
everybody's next token comes as soon behind the end of a very long prompt as behind its beginning. Up to that depth the
number of steps above holds.

Images are encoded when the first chunk that needs them comes up, in parts that cost no more than the chunk would, so
that a large picture makes no step longer (see `encoding`).

Where slots share a pool of rows (see `replica_cache`), a sequence enters once there are pages for all that it has to
read, and gets more as it generates. With `prefix_pages` beginnings of prompts are kept (see `prefix`); chunks then end
at the borders of pages. A request of higher priority may take the slot of a lower one, and where pages run out, the one
that would go last gives up its own: it waits again and later reads its prompt and what it had generated anew, so that
it goes on with the same tokens.

Guesses at the next tokens (see `speculation`) go into a sequence's step behind its last token, as far as its own share
of the budget goes, so that they take nothing from the prompts of others.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Mapping, Sequence

from workbench.base import DeploymentError, QueueFullError, WorkbenchError
from workbench.serving.encoding import ReplicaImages
from workbench.serving.prefix import page_keys
from workbench.serving.replica_cache import ReplicaCache, page_size
from workbench.serving.sequence import (
    FinishReason,
    ImageToEncode,
    News,
    SequenceState,
    StepPlan,
    decode_step,
    prefill_step,
)
from workbench.serving.speculation import DraftAsk
from workbench.serving.steps import Draft, RunnerInfo, SampledToken, SequenceStep

__all__ = ["Scheduler"]

FULL_DEPTH = 2048  # tokens of a prompt up to which its chunks are as long as its share


class Scheduler:
    """Waiting line, slots and images of `info.dp` replicas.

    Invariant: in each replica the free slots and the slots of running sequences are disjoint and together all slots,
    and each page of the pool is free or held by running sequences and the index of kept ones.
    """

    def __init__(
        self,
        info: RunnerInfo,
        *,
        step_tokens: int,
        max_queue: int,
        prefix_pages: int = 0,
        page_tokens: int = 256,
    ) -> None:
        if step_tokens < info.num_slots:
            raise ValueError(f"step_tokens={step_tokens} cannot give each of {info.num_slots} slots a token per step")
        self.info = info
        self.step_tokens = step_tokens
        self.max_queue = max_queue
        # A page that no prompt of a slot's length can have behind it is never hit.
        self.page_tokens = page_tokens if prefix_pages and page_tokens < info.max_tokens else 0
        self.pool_page_tokens = page_size(info, self.page_tokens)
        self.waiting: list[SequenceState] = []  # by rank
        self.num_preempted = 0
        self.running: list[list[SequenceState]] = [[] for _ in range(info.dp)]  # in order of admission
        self._free: list[list[int]] = [list(reversed(range(info.num_slots))) for _ in range(info.dp)]
        self._turn = 0.0  # of whoever was admitted last, and when the next one of each tenant is
        self._turns: dict[str, float] = {}
        self.images = [ReplicaImages(replica, info.encoding if info.reading else None) for replica in range(info.dp)]
        self._caches = [
            ReplicaCache(
                info.num_rows, self.pool_page_tokens, prefix_tokens=self.page_tokens, prefix_pages=prefix_pages
            )
            for _ in range(info.dp)
            if self.pool_page_tokens
        ]

    @property
    def has_work(self) -> bool:
        return bool(self.waiting) or any(self.running)

    @property
    def num_running(self) -> int:
        return sum(map(len, self.running))

    @property
    def num_free(self) -> int:
        return sum(map(len, self._free))

    @property
    def num_pages(self) -> int:
        """Kept pages, over all replicas."""
        return sum(len(cache.index) for cache in self._caches)

    @property
    def num_pool_pages(self) -> int:
        """Pages of the pools of all replicas; a slot with rows of its own counts as one."""
        return sum(cache.pool.num_pages for cache in self._caches) or self.info.num_slots * self.info.dp

    @property
    def num_free_pool_pages(self) -> int:
        """Those that neither sequences nor kept beginnings of prompts hold."""
        return sum(cache.pool.num_free for cache in self._caches) if self._caches else self.num_free

    @property
    def num_images(self) -> int:
        """Images whose features the ranks hold, or have begun to compute, over all replicas."""
        return sum(map(len, self.images))

    def add(self, sequence: SequenceState) -> None:
        """Put a request at the end of the line. Raises QueueFullError where `max_queue` wait already."""
        if len(self.waiting) >= self.max_queue:
            raise QueueFullError(
                f"{len(self.waiting)} requests wait already",
                expected=f"at most {self.max_queue}",
                next_step="Try later",
            )
        if self.page_tokens:
            sequence.page_keys = page_keys(sequence.request, self.page_tokens)
        insort(self.waiting, sequence, key=lambda each: each.rank)

    def admit(self) -> list[SequenceState]:
        """Move sequences from the line into free slots of the least-loaded replicas; their slots must then be reset."""
        admitted: list[SequenceState] = []
        while self.waiting:
            place = self._next_place()
            sequence = self.waiting[place]
            replica = self._replica_for(sequence)
            if replica is None:
                if not self._preempt_for(sequence):
                    break
                continue
            self._take(place)
            sequence.replica, sequence.slot = replica, self._free[replica].pop()
            if self._caches:
                sequence.restore, sequence.pages = self._caches[replica].admit(
                    sequence.request_id, sequence.page_keys, sequence.num_to_read, room=_most_tokens(sequence)
                )
            self.running[replica].append(sequence)
            sequence.num_cached = len(sequence.restore) * self.page_tokens
            self.images[replica].need(image.key for image in sequence.waiting_images())
            admitted.append(sequence)
        return admitted

    def _replica_for(self, sequence: SequenceState) -> int | None:
        """The one with most free slots, the first of equals, among those with a slot and the pages for it.

        Each sequence there gets a page left to grow into, lest it push the new one out again at once.
        """
        fitting = [
            replica
            for replica in range(self.info.dp)
            if self._free[replica]
            and (
                not self._caches
                or self._caches[replica].can_admit(
                    sequence.page_keys, sequence.num_to_read, spare=len(self.running[replica])
                )
            )
        ]
        return max(fitting, key=lambda replica: len(self._free[replica]), default=None)

    def _next_place(self) -> int:
        """Who in the line is next: of the highest priority, whose tenant holds the fewest slots for its weight, and has
        had the fewest turns for it lately; of equals the first. So nobody fills all slots by asking more often, and
        whoever is alone may have them all."""
        held = Counter(each.request.tenant for running in self.running for each in running)

        def order(place: int) -> tuple[float, float, int]:
            request = self.waiting[place].request
            return held[request.tenant] / request.weight, self._turn_of(request.tenant), place

        priority = self.waiting[0].request.priority
        places = (place for place, each in enumerate(self.waiting) if each.request.priority == priority)
        return min(places, key=order)

    def _take(self, place: int) -> None:
        """Out of the line, which is a turn of its tenant."""
        request = self.waiting.pop(place).request
        self._turn = self._turn_of(request.tenant)
        self._turns[request.tenant] = self._turn + 1 / request.weight

    def _turn_of(self, tenant: str) -> float:
        """When its next turn is, in turns of weight 1; who was away has none in store."""
        return max(self._turn, self._turns.get(tenant, 0.0))

    def _preempt_for(self, sequence: SequenceState) -> bool:
        """Send the running sequence of lowest rank back into the line, where it is of lower priority."""
        last = max((each for running in self.running for each in running), key=lambda each: each.rank)
        if last.request.priority >= sequence.request.priority:
            return False
        self._pause(last)
        self.num_preempted += 1
        return True

    def _pause(self, sequence: SequenceState) -> None:
        """Back into the line; all it has read and generated will be read anew."""
        self.release(sequence)
        sequence.num_cached, sequence.num_to_read = 0, len(sequence.request.token_ids) + len(sequence.generated)
        insort(self.waiting, sequence, key=lambda each: each.rank)

    def suspect(self, plan: StepPlan) -> None:
        """A step failed as a whole: what its slots hold is unknown, so its sequences begin anew, one in a step."""
        for steps, sequences in zip(plan.inputs, plan.sequences, strict=True):
            for step, sequence in zip(steps, sequences, strict=True):
                if sequence.slot >= 0:
                    sequence.trial_end = step.start + len(step.token_ids) - len(step.drafts)
                    self._pause(sequence)

    def draft_asks(self) -> list[DraftAsk]:
        """The sequences whose next tokens may be guessed, each with the room there is.

        Not those that answer to a grammar, which says after each token what may come next, nor while one is on trial.
        """
        if any(sequence.trial_end for running in self.running for sequence in running):
            return []
        share = self.step_tokens // self.info.num_slots
        asks = []
        for sequence in (sequence for running in self.running for sequence in running):
            request, num_generated = sequence.request, len(sequence.generated)
            room = min(request.sampling.max_tokens - num_generated, share) - 1
            if sequence.num_unread or sequence.is_aborted or request.constraint is not None or room < 1:
                continue
            ask = DraftAsk(
                request_id=sequence.request_id,
                replica=sequence.replica,
                slot=sequence.slot,
                prompt=request.token_ids,
                generated=sequence.generated,
                sampling=request.sampling,
                room=room,
            )
            asks.append(ask)
        return asks

    def provide(self, drafts: Mapping[int, Sequence[Draft]]) -> dict[int, Sequence[Draft]]:
        """Pages for the next step's tokens; the guesses for which there are any.

        Where there are none for a token that is certain, the sequence of lowest rank in its replica is paused.
        """
        while self._pause_for_pages():
            pass
        allowed = dict(drafts)
        for replica, cache in enumerate(self._caches):
            for sequence in self._generating(replica):
                guesses = allowed.get(sequence.request_id, ())
                while guesses and not self._grow(cache, sequence, 1 + len(guesses)):
                    guesses = guesses[:-1]
                allowed[sequence.request_id] = guesses
        return allowed

    def _pause_for_pages(self) -> bool:
        """Whether somebody had to be paused; who takes part in the step may be others then."""
        for replica, cache in enumerate(self._caches):
            for sequence in self._generating(replica):
                if not self._grow(cache, sequence, 1):
                    self._pause(max(self.running[replica], key=lambda each: each.rank))
                    self.num_preempted += 1
                    return True
        return False

    def _grow(self, cache: ReplicaCache, sequence: SequenceState, num_new: int) -> bool:
        num_tokens, room = sequence.num_cached + num_new, _most_tokens(sequence)
        return cache.grow(sequence.request_id, sequence.pages, num_tokens, room=room)

    def _generating(self, replica: int) -> list[SequenceState]:
        """The sequences that read a token of their own in the next step, by rank."""
        return sorted((each for each in self._stepping(replica) if not each.num_unread), key=lambda each: each.rank)

    def _stepping(self, replica: int) -> list[SequenceState]:
        """The sequences that take part in the next step: all of them, or the first of those on trial."""
        suspects = [sequence for running in self.running for sequence in running if sequence.trial_end]
        return [each for each in self.running[replica] if not suspects or each is suspects[0]]

    def plan(self, drafts: Mapping[int, Sequence[Draft]] | None = None) -> StepPlan:
        """The next step over all running sequences, with guesses by request; no more of them than was asked for, and
        what `provide` has left of them.

        Changes nothing: `commit` does, once the step has been computed.
        """
        drafts = drafts or {}
        plan = StepPlan(encode=[], inputs=[], sequences=[])
        for replica in range(self.info.dp):
            running = self._stepping(replica)
            steps: list[SequenceStep] = []
            sequences: list[SequenceState] = []
            reading = [sequence for sequence in running if sequence.num_unread]
            budget = self.step_tokens - sum(
                1 + len(drafts.get(sequence.request_id, ())) for sequence in running if not sequence.num_unread
            )
            grants = dict(zip(map(id, reading), _shares([s.num_unread for s in reading], budget), strict=True))
            share = budget // max(1, len(reading))
            encode: dict[str, ImageToEncode] = {}
            for sequence in running:
                if not sequence.num_unread:
                    steps.append(decode_step(sequence, drafts.get(sequence.request_id, ()), self.pool_page_tokens))
                    sequences.append(sequence)
                    continue
                num_tokens = self._chunk(sequence, grants[id(sequence)], share)
                stop = self._chunk_end(sequence, sequence.num_cached + num_tokens)
                if sequence.request.images:
                    granted = max(share, grants[id(sequence)])
                    room, allowance = self._chunk(sequence, granted, share), self._allowance(granted, share)
                    stop = self.images[replica].plan(sequence, stop, encode, allowance=allowance, room=room)
                if stop > sequence.num_cached:
                    save = self._page_to_save(sequence, stop)
                    steps.append(prefill_step(sequence, stop, save, self.page_tokens, self.pool_page_tokens))
                    sequences.append(sequence)
            plan.encode += encode.values()
            plan.inputs.append(tuple(steps))
            plan.sequences.append(sequences)
        return plan

    def commit(self, plan: StepPlan, sampled: Sequence[Sequence[SampledToken | WorkbenchError]]) -> list[News]:
        """Take over a computed step. Returns each new token with its reason to finish, if any; leaves aborted ones out.

        Raises DeploymentError where the runner returned another number of tokens than sequences that sample.
        """
        news: list[News] = []
        for replica, (steps, sequences) in enumerate(zip(plan.inputs, plan.sequences, strict=True)):
            sampling = [sequence for step, sequence in zip(steps, sequences, strict=True) if step.sample is not None]
            if len(sampled[replica]) != len(sampling):
                raise DeploymentError(
                    f"replica {replica} returned {len(sampled[replica])} tokens", expected=f"{len(sampling)}"
                )
            tokens = iter(sampled[replica])
            for step, sequence in zip(steps, sequences, strict=True):
                token = next(tokens) if step.sample is not None else None
                num_accepted = _num_accepted(step, token)
                before = {image.key for image in sequence.waiting_images()}
                sequence.num_cached += len(step.token_ids) - len(step.drafts) + num_accepted
                if sequence.num_cached >= sequence.trial_end:
                    sequence.trial_end = 0
                sequence.num_sent = step.first_page + len(step.pages)
                if step.restore:
                    self._caches[replica].restored(step.restore)
                    sequence.restore = ()
                if step.save:
                    self._caches[replica].keep(step.save, sequence.pages, sequence.num_cached)
                self.images[replica].release(before - {image.key for image in sequence.waiting_images()})
                sequence.num_drafted += len(step.drafts)
                sequence.num_accepted += num_accepted
                if token is not None:
                    news += _take(sequence, token)
        return news

    def release(self, sequence: SequenceState) -> None:
        """Free the slot of a running sequence, or take a waiting one out of the line."""
        if sequence.slot < 0:
            self.waiting.remove(sequence)
            return
        self.running[sequence.replica].remove(sequence)
        self._free[sequence.replica].append(sequence.slot)
        self.images[sequence.replica].release(image.key for image in sequence.waiting_images())
        if self._caches:
            self._caches[sequence.replica].release(sequence.request_id, sequence.pages, sequence.restore)
        sequence.slot, sequence.restore, sequence.pages, sequence.num_sent = -1, (), [], 0

    def _chunk(self, sequence: SequenceState, granted: int, share: int) -> int:
        """As many of the granted tokens as cost no more than a share of them does at FULL_DEPTH."""
        reading = self.info.reading
        if reading is None:
            return granted
        return reading.chunk(granted, sequence.num_cached, limit=self._allowance(granted, share))

    def _allowance(self, granted: int, share: int) -> float:
        """Multiply-adds that one sequence may spend on its prompt in a step, text and pictures together."""
        # By the share, not by what is left to read: the end of a prompt would come in ever smaller pieces.
        return self.info.reading.of(max(granted, share), FULL_DEPTH) if self.info.reading else 0.0

    def _chunk_end(self, sequence: SequenceState, stop: int) -> int:
        """Not beyond the next border of a page that is to be kept: the state can be kept there only."""
        page = sequence.num_cached // self.page_tokens if self.page_tokens else 0
        if self.page_tokens and page < len(sequence.page_keys):
            return min(stop, (page + 1) * self.page_tokens)
        return stop

    def _page_to_save(self, sequence: SequenceState, stop: int) -> str:
        """Key of the page that ends here, where nobody has it yet."""
        if not self.page_tokens or stop % self.page_tokens or stop > len(sequence.page_keys) * self.page_tokens:
            return ""
        key = sequence.page_keys[stop // self.page_tokens - 1]
        return "" if key in self._caches[sequence.replica].index else key

    def unused(self) -> list[tuple[int, list[str]]]:
        """Encoded images and kept pages that nobody needs any more, by replica; they count as dropped from now on."""
        unused = []
        for replica, images in enumerate(self.images):
            keys = images.unused() + (self._caches[replica].evict() if self._caches else [])
            if keys:
                unused.append((replica, keys))
        return unused

    def begin_anew(self) -> None:
        """The runner holds nothing any more. Only where nobody has a slot."""
        assert not self.num_running, self.num_running
        self.forget_kept()
        for images in self.images:
            images.clear()

    def forget_kept(self) -> list[tuple[int, list[str]]]:
        """All kept pages and encoded images by replica; none is there from now on."""
        kept = [
            (replica, images.forget_all() + (self._caches[replica].clear() if self._caches else []))
            for replica, images in enumerate(self.images)
        ]
        return [(replica, keys) for replica, keys in kept if keys]

    def check(self) -> None:
        """Raises AssertionError where a slot is lost or held twice."""
        for replica, running in enumerate(self.running):
            slots = self._free[replica] + [sequence.slot for sequence in running]
            assert sorted(slots) == list(range(self.info.num_slots)), f"replica {replica}: slots {sorted(slots)}"
            for sequence in running if self._caches else ():
                room = len(sequence.pages) * self.pool_page_tokens
                assert sequence.num_cached <= room, f"slot {sequence.slot}: {sequence.num_cached} tokens in {room} rows"

    def check_pages(self) -> None:
        """Raises AssertionError where a page is lost or has another number of holders; looks at every page."""
        for cache, running in zip(self._caches, self.running, strict=bool(self._caches)):
            cache.check([sequence.pages for sequence in running])


def _shares(wanted: Sequence[int], budget: int) -> list[int]:
    """Equal parts of `budget`, none above what is wanted; what a small one leaves goes to the larger ones."""
    shares = [0] * len(wanted)
    order = sorted(range(len(wanted)), key=lambda i: (wanted[i], i))
    for done, index in enumerate(order):
        shares[index] = min(wanted[index], budget // (len(order) - done))
        budget -= shares[index]
    return shares


def _take(sequence: SequenceState, token: SampledToken | WorkbenchError) -> list[News]:
    """New tokens of a sequence, up to the one that ends it; none where it was aborted."""
    if isinstance(token, WorkbenchError):
        return [] if sequence.is_aborted else [(sequence, token, None)]
    news: list[News] = []
    for each in (*token.accepted, token):
        sequence.take(each.token_id)
        reason = _finish_reason(sequence)
        news.append((sequence, each, reason))
        if reason is not None:
            break
    return [] if sequence.is_aborted else news


def _num_accepted(step: SequenceStep, token: SampledToken | WorkbenchError | None) -> int:
    if not isinstance(token, SampledToken) or not token.accepted:
        return 0
    ids = [each.token_id for each in token.accepted]
    guessed = [draft.token_id for draft in step.drafts]
    if ids != guessed[: len(ids)]:
        raise DeploymentError("the runner accepted what was not guessed", found=ids, expected=f"the first of {guessed}")
    return len(ids)


def _most_tokens(sequence: SequenceState) -> int:
    """Cached tokens that a request may come to; the last that it generates is never fed back."""
    return len(sequence.request.token_ids) + sequence.request.sampling.max_tokens - 1


def _finish_reason(sequence: SequenceState) -> FinishReason | None:
    if sequence.generated[-1] in sequence.request.sampling.stop_ids:
        return "stop"
    return "length" if len(sequence.generated) == sequence.request.sampling.max_tokens else None
