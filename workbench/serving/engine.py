"""The loop that turns requests into steps of a runner and tokens back into events, in one background thread.

Callers submit from any thread and read their own stream of tokens. Only the engine's thread calls the runner.

Whatever goes wrong reaches whoever it concerns as an error, and nobody waits for ever. Where the runner says that it
`is_intact`, a failure belongs to one request and ends that one: the request whose picture could not be encoded, whose
logits were not finite, whose grammar or listener gave up. A step of several that failed as a whole is no one's yet, so
its sequences are read anew one by one, and the one that fails alone is the one that ends. Where the runner is not
intact, a rank has died, hangs or is out of step, and every request in flight fails at once; a runner that is
`Recovering` then begins anew, and so do the slots here.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence

from workbench.base import (
    DeploymentError,
    ImageError,
    ModelRestartingError,
    RequestError,
    RequestFailedError,
    WorkbenchError,
)
from workbench.serving.generation import EngineStats, Finish, Generation, Listener, TokenEvent
from workbench.serving.owner import claim_runner, release_runner
from workbench.serving.recent import RecentTimes, RecentWaits
from workbench.serving.requests import GenerationRequest, check_request
from workbench.serving.scheduler import Scheduler
from workbench.serving.sequence import FinishReason, ImageToEncode, SequenceState, StepPlan
from workbench.serving.speculation import DraftAsk, Drafter
from workbench.serving.steps import Draft, Recovering, Runner, SampledToken

__all__ = ["Engine"]

LOG = logging.getLogger("workbench.engine")
LOOK_S = 0.5  # how often an idle engine looks whether its runner is still there


class Engine:
    """Continuous batching over a runner.

    `step_tokens` is the most new tokens per replica and step, at least one per slot; `max_queue` the most requests that
    wait for a slot. With `prefix_pages` each replica keeps up to that many pages, of `page_tokens` tokens, of the
    beginnings of prompts: in the rows of its cache, as long as no sequence needs them, and one recurrent state each.
    With a `drafter` the next tokens of sequences are guessed and several may be confirmed by one step; answers stay as
    they are. A drafter that fails is let go, and `draft_error` says why.
    Use `start()` for the background thread, or call `step_once()` by hand.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        step_tokens: int = 512,
        max_queue: int = 256,
        prefix_pages: int = 0,
        page_tokens: int = 256,
        drafter: Drafter | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.runner = runner
        self.info = runner.info
        self.scheduler = Scheduler(
            self.info,
            step_tokens=max(step_tokens, self.info.num_slots),
            max_queue=max_queue,
            prefix_pages=prefix_pages,
            page_tokens=page_tokens,
        )
        self.draft_error: Exception | None = None
        self._drafter = drafter
        if drafter is not None:
            drafter.begin()
        self._clock = clock
        self._changed = threading.Condition()  # guards the scheduler, the table of requests and the flags below
        self._requests: dict[int, tuple[SequenceState, Generation]] = {}
        self._ids = itertools.count()
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        self._error: WorkbenchError | None = None
        self._is_recovering = False
        self._num_restarts = 0
        self._num_steps = 0
        self._num_aborted = 0
        self._num_cached = 0
        self._num_drafted = 0
        self._num_accepted = 0
        self._num_prompt_tokens = 0
        self._num_generated = 0
        self._recent = RecentWaits()

    def start(self) -> Engine:
        """Start the background thread; does nothing where it runs already. An engine that failed stays failed.

        Raises DeploymentError where another engine drives the runner: its slots are theirs until they stop.
        """
        if self._thread is None:
            claim_runner(self.runner, "an engine")
            self._is_stopping = False
            self._thread = threading.Thread(target=self._run, name="workbench-engine", daemon=True)
            self._thread.start()
        return self

    def stop(self) -> None:
        """End the thread after the step in hand; requests in flight fail. The runner stays open."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None
        self._finish_all(DeploymentError("the engine was stopped while the request was in flight"))

    @property
    def error(self) -> WorkbenchError | None:
        """What made the engine fail for good, if anything."""
        return None if self._is_recovering else self._error

    @property
    def is_recovering(self) -> bool:
        """Whether the runner is being replaced: no request is taken until that is done."""
        return self._is_recovering

    def submit(self, request: GenerationRequest, listener: Listener | None = None) -> Generation:
        """Queue a request. Raises RequestError for a request that cannot run, QueueFullError where the line is full,
        DeploymentError where the engine is stopped, ModelRestartingError while the runner is being replaced, and the
        engine's error again where it has failed.

        A `listener` gets each event as it happens, the first ones perhaps before this returns. It runs in the engine's
        thread: it must be quick, raise nothing and call nothing here.
        """
        check_request(request, self.info)
        with self._changed:
            if self._is_recovering:
                raise ModelRestartingError("the model is starting again after a failure", next_step="Try again shortly")
            if self._error is not None:
                raise copy.copy(self._error) from self._error
            if self._is_stopping:
                raise DeploymentError("the engine is stopped", next_step="Call start() again")
            sequence = SequenceState(request_id=next(self._ids), request=request)
            self.scheduler.add(sequence)
            generation = Generation(self, sequence.request_id, self._clock(), listener)
            self._requests[sequence.request_id] = (sequence, generation)
            self._changed.notify_all()
        return generation

    def abort(self, request_id: int) -> None:
        """End a request at once: it gets no further token, and its slot is free before the next step."""
        with self._changed:
            if request_id not in self._requests:
                return
            sequence = self._requests[request_id][0]
            sequence.is_aborted = True
            self._num_aborted += 1
            if sequence.slot < 0:
                self.scheduler.release(sequence)
            # A running one keeps its slot until the step in hand is done, for that step still writes into it.
            self._finish(sequence, "abort")

    @property
    def num_requests(self) -> int:
        """Requests that have not had their end."""
        return len(self._requests)

    def stats(self) -> EngineStats:
        with self._changed:
            return EngineStats(
                num_waiting=len(self.scheduler.waiting),
                num_running=self.scheduler.num_running,
                num_free_slots=self.scheduler.num_free,
                num_steps=self._num_steps,
                num_aborted=self._num_aborted,
                num_preempted=self.scheduler.num_preempted,
                num_cached_tokens=self._num_cached,
                num_restarts=self._num_restarts,
                num_drafted=self._num_drafted,
                num_accepted=self._num_accepted,
                num_pages=self.scheduler.num_pages,
                num_images=self.scheduler.num_images,
                num_pool_pages=self.scheduler.num_pool_pages,
                num_free_pool_pages=self.scheduler.num_free_pool_pages,
                num_prompt_tokens=self._num_prompt_tokens,
                num_generated=self._num_generated,
            )

    def recent(self) -> RecentTimes:
        """Times to first tokens and between tokens of the last minutes, by the engine's clock."""
        with self._changed:
            return self._recent.times(self._clock())

    def step_once(self) -> bool:
        """Admit, plan, compute and hand out one step; returns whether there was any. A broken runner ends them all."""
        try:
            return self._step()
        except Exception as error:
            self._fail(error)
            return False

    def _step(self) -> bool:
        with self._changed:
            self._release_aborted()
            admitted = self.scheduler.admit()
            now = self._clock()
            for sequence in admitted:
                generation = self._requests[sequence.request_id][1]
                generation.admitted_s = generation.admitted_s or now  # a pause is no second admission
                generation.num_cached = generation.num_cached or sequence.num_cached
                self._num_cached += sequence.num_cached
                self._num_prompt_tokens += sequence.num_to_read
            asks = self.scheduler.draft_asks() if self._drafter is not None else []
        drafts = self._drafts(asks)
        with self._changed:
            plan = self.scheduler.plan(self.scheduler.provide(drafts))
            unused = self.scheduler.unused()
        for replica, keys in unused:
            self.runner.drop_images(replica, keys)
        for sequence in admitted:
            if sequence.slot >= 0:  # not paused again for want of pages
                self.runner.reset_slot(sequence.replica, sequence.slot)
        if not plan.num_tokens and not plan.encode:
            return False
        if not all(self._encode(image) for image in plan.encode) or not plan.num_tokens:
            return True  # the plan had a request in it that has ended, or there is a picture and no text to read yet
        try:
            sampled = self.runner.step(plan.inputs)
        except Exception as error:
            if not self.runner.is_intact:
                raise
            self._isolate(plan, error)
            return True
        with self._changed:
            self._num_steps += 1
            now = self._clock()
            before = _drafted(plan)
            news = self.scheduler.commit(plan, sampled)
            after = _drafted(plan)
            self._num_drafted += after[0] - before[0]
            self._num_accepted += after[1] - before[1]
            for sequence, token, reason in news:
                self._hand_out(sequence, token, reason, now)
            self._release_aborted()
            self.scheduler.check()
        return True

    def _drafts(self, asks: Sequence[DraftAsk]) -> dict[int, tuple[Draft, ...]]:
        """Guesses by request, never more than there is room for."""
        if not asks or self._drafter is None:
            return {}
        try:
            drafts = self._drafter.propose(asks)
        except Exception as error:  # guessing is a convenience: whatever goes wrong there costs no answer
            self.draft_error, self._drafter = error, None
            LOG.error("guessing has failed and is switched off", exc_info=error)
            return {}
        return {ask.request_id: tuple(drafts.get(ask.request_id, ()))[: ask.room] for ask in asks}

    def _encode(self, image: ImageToEncode) -> bool:
        """Whether the image was encoded as planned; where it was not, the request that asked for it has ended."""
        key = image.image[0]
        try:
            if image.is_whole:
                self.runner.encode_images(image.replica, [image.image])
            else:
                self.runner.encode_rows(image.replica, image.image, image.first, image.stop)
        except Exception as error:
            if not self.runner.is_intact:
                raise
            self.runner.drop_images(image.replica, [key])  # ranks that had come to their end hold its features
            with self._changed:
                self.scheduler.images[image.replica].forget(key)
                own = error if isinstance(error, (ImageError, RequestError)) else _own_error(error)
                self._end(image.sequence, own)
            return False
        with self._changed:
            self.scheduler.images[image.replica].mark(image)
        return True

    def _isolate(self, plan: StepPlan, error: Exception) -> None:
        """A step failed and the runner is intact: end its only request, or find out which of several it was."""
        with self._changed:
            self._num_steps += 1
            sequences = [sequence for replica in plan.sequences for sequence in replica]
            if len(sequences) == 1:
                self._end(sequences[0], _own_error(error))
            else:
                self._release_aborted()
                self.scheduler.suspect(plan)
            self.scheduler.check()

    def _hand_out(
        self, sequence: SequenceState, token: SampledToken | WorkbenchError, reason: FinishReason | None, now: float
    ) -> None:
        if sequence.request_id not in self._requests:
            return  # it ended with an earlier token of this step
        generation = self._requests[sequence.request_id][1]
        generation.num_drafted, generation.num_accepted = sequence.num_drafted, sequence.num_accepted
        error = sequence.failure or _constraint_error(sequence)
        if isinstance(token, WorkbenchError):
            error = _own_error(token)
        elif error is None and reason != "stop":
            event = TokenEvent(token_id=token.token_id, logprob=token.logprob, top=token.top, time_s=now)
            self._note_time(generation, now)
            try:
                generation.put(event)
            except Exception as raised:
                error = RequestFailedError(f"whoever listens to this request failed: {type(raised).__name__}: {raised}")
        if error is not None:
            self._end(sequence, error)
        elif reason is not None:
            self.scheduler.release(sequence)
            self._finish(sequence, reason)

    def _note_time(self, generation: Generation, now: float) -> None:
        self._num_generated += 1
        if generation.last_token_s is None:
            self._recent.first(now, now - generation.submitted_s)
        else:
            self._recent.gap(now, now - generation.last_token_s)
        generation.last_token_s = now

    def _end(self, sequence: SequenceState, error: WorkbenchError) -> None:
        """A failure of this request alone. One that was aborted meanwhile has had its end; its slot is freed later."""
        if not sequence.is_aborted:
            self.scheduler.release(sequence)
            self._finish(sequence, "abort", error)

    def _release_aborted(self) -> None:
        for running in self.scheduler.running:
            for sequence in [sequence for sequence in running if sequence.is_aborted]:
                self.scheduler.release(sequence)

    def _finish(self, sequence: SequenceState, reason: FinishReason, error: WorkbenchError | None = None) -> None:
        _, generation = self._requests.pop(sequence.request_id)
        with contextlib.suppress(Exception):  # a listener that fails must not take the others with it
            generation.put(Finish(reason=reason, num_tokens=len(sequence.generated), time_s=self._clock(), error=error))

    def _fail(self, error: BaseException) -> None:
        # Never an error about a request: it is told to requests that have nothing to do with it.
        told = error if isinstance(error, DeploymentError) else _machine_error(error)
        with self._changed:
            self._error = told
            self._is_recovering = self._thread is not None and isinstance(self.runner, Recovering)
        self._finish_all(told)

    def _recover(self) -> bool:
        """Whether the runner has begun anew after a failure."""
        if not self._is_recovering or not isinstance(self.runner, Recovering):
            return False
        try:
            self.runner.recover(lambda: not self._is_stopping)
        except Exception as error:
            with self._changed:
                self._error = error if isinstance(error, DeploymentError) else _machine_error(error)
                self._is_recovering = False
            return False
        with self._changed:
            self.scheduler.begin_anew()
            self._num_restarts += 1
            self._error, self._is_recovering = None, False
        return True

    def _finish_all(self, error: WorkbenchError) -> None:
        with self._changed:
            for sequence, _ in list(self._requests.values()):
                self._finish(sequence, "abort", error)
                self.scheduler.release(sequence)
            self._release_aborted()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    while not (self._is_stopping or self._error or self.runner.failure or self.scheduler.has_work):
                        self._changed.wait(LOOK_S)
                    if self._is_stopping:
                        return
                if self._error is None:
                    if self.runner.failure is not None:
                        self._fail(self.runner.failure)
                    else:
                        self.step_once()
                if self._error is not None and not self._recover():
                    return
        except BaseException as error:  # a bug of ours: report it to whoever waits, then let it show
            self._fail(error)
            raise
        finally:
            self.drop_pages()
            release_runner(self.runner)

    def drop_pages(self) -> None:
        """Leave nothing kept behind: the next driver of the runner would know of none of it."""
        with self._changed:
            kept = self.scheduler.forget_kept()
        if self._error is not None:
            return  # nobody is there to listen
        try:
            for replica, keys in kept:
                self.runner.drop_images(replica, keys)
        except Exception as error:
            self._fail(error)


def _drafted(plan: StepPlan) -> tuple[int, int]:
    """Guesses so far, and how many held, of all sequences of a step."""
    sequences = [sequence for replica in plan.sequences for sequence in replica]
    return sum(each.num_drafted for each in sequences), sum(each.num_accepted for each in sequences)


def _machine_error(error: BaseException) -> DeploymentError:
    told = DeploymentError(f"the runner failed: {type(error).__name__}: {error}")
    told.__cause__ = error
    return told


def _own_error(error: Exception) -> RequestFailedError:
    """What the one request is told whose work failed on a runner that is intact."""
    own = RequestFailedError(f"the model failed on this request: {type(error).__name__}: {error}")
    own.__cause__ = error
    return own


def _constraint_error(sequence: SequenceState) -> WorkbenchError | None:
    """An error of this request alone, where what holds its answer to a form gave up."""
    constraint = sequence.request.constraint
    if constraint is None or constraint.error is None:
        return None
    return RequestError(f"the answer cannot be held to its grammar any longer: {constraint.error}"[:300])
