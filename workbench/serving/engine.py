"""The loop that turns requests into steps of a runner and tokens back into events, in one background thread.

Callers submit from any thread and read their own stream of tokens. Only the engine's thread calls the runner. Whatever
goes wrong there reaches every request in flight as an error: nobody waits for ever.
"""

from __future__ import annotations

import copy
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue

from workbench.base import DeploymentError, RequestError, WorkbenchError
from workbench.serving.owner import claim_runner, release_runner
from workbench.serving.requests import GenerationRequest, check_request
from workbench.serving.scheduler import FinishReason, Scheduler, SequenceState
from workbench.serving.steps import Runner

__all__ = ["Engine", "EngineStats", "Finish", "Generation", "Listener", "TokenEvent"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenEvent:
    """A generated token, its natural-log probability, and when it was there (s, the engine's clock)."""

    token_id: int
    logprob: float
    time_s: float
    top: tuple[tuple[int, float], ...] = ()  # likeliest ids and their log probabilities, where they were asked for


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """How a request ended. `num_tokens` counts all generated tokens, a stop token among them; `error`: it failed."""

    reason: FinishReason
    num_tokens: int
    time_s: float
    error: WorkbenchError | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    num_waiting: int
    num_running: int
    num_free_slots: int
    num_steps: int
    num_aborted: int
    num_preempted: int = 0
    num_cached_tokens: int = 0  # tokens that kept pages saved from being read


Listener = Callable[[TokenEvent | Finish], None]


class Generation:
    """The tokens of one request, as they come. Iterate once; the stop token itself is not among them.

    With a listener the events go there instead, and there is nothing to iterate.
    """

    def __init__(self, engine: Engine, request_id: int, submitted_s: float, listener: Listener | None = None) -> None:
        self.request_id = request_id
        self.submitted_s = submitted_s
        self.admitted_s: float | None = None
        self.num_cached = 0  # tokens of the prompt that were not read again
        self.finish: Finish | None = None
        self._engine = engine
        self._events: SimpleQueue[TokenEvent | Finish] = SimpleQueue()
        self._listener = listener or self._events.put

    def __iter__(self) -> Iterator[TokenEvent]:
        """Tokens until the end, which `finish` then describes. Raises the engine's error where the request failed."""
        while self.finish is None:
            event = self._events.get()
            if isinstance(event, TokenEvent):
                yield event
            else:
                self.finish = event
        if self.finish.error is not None:
            # A copy: one error object raised in many threads would gather all their tracebacks.
            raise copy.copy(self.finish.error) from self.finish.error

    def abort(self) -> None:
        """Stop the request and free its slot; harmless after its end."""
        self._engine.abort(self.request_id)

    def put(self, event: TokenEvent | Finish) -> None:
        self._listener(event)


class Engine:
    """Continuous batching over a runner.

    `step_tokens` is the most new tokens per replica and step, at least one per slot; `max_queue` the most requests that
    wait for a slot. With `prefix_pages` each replica keeps up to that many pages, of `page_tokens` tokens, of the
    beginnings of prompts; a page costs the cached rows of its tokens and one recurrent state.
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
        self._clock = clock
        self._changed = threading.Condition()  # guards the scheduler, the table of requests and the flags below
        self._requests: dict[int, tuple[SequenceState, Generation]] = {}
        self._ids = itertools.count()
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        self._error: WorkbenchError | None = None
        self._num_steps = 0
        self._num_aborted = 0
        self._num_cached = 0

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
        """What made the engine fail, if anything."""
        return self._error

    def submit(self, request: GenerationRequest, listener: Listener | None = None) -> Generation:
        """Queue a request. Raises RequestError for a request that cannot run, QueueFullError where the line is full,
        DeploymentError where the engine is stopped, and its error again where it has failed.

        A `listener` gets each event as it happens, the first ones perhaps before this returns. It runs in the engine's
        thread: it must be quick, raise nothing and call nothing here.
        """
        check_request(request, self.info)
        with self._changed:
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
            )

    def step_once(self) -> bool:
        """Admit, plan, compute and hand out one step; returns whether there was any. A failure ends all requests."""
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
            plan = self.scheduler.plan()
            unused = self.scheduler.unused()
        for replica, keys in unused:
            self.runner.drop_images(replica, keys)
        if not plan.num_tokens:
            return False
        for sequence in admitted:
            self.runner.reset_slot(sequence.replica, sequence.slot)
        for replica, image in plan.encode:
            self.runner.encode_images(replica, [image])
        sampled = self.runner.step(plan.inputs)
        with self._changed:
            self._num_steps += 1
            now = self._clock()
            for sequence, token, reason in self.scheduler.commit(plan, sampled):
                if (error := _constraint_error(sequence)) is not None:
                    self.scheduler.release(sequence)
                    self._finish(sequence, "abort", error)
                    continue
                if reason != "stop":
                    event = TokenEvent(token_id=token.token_id, logprob=token.logprob, top=token.top, time_s=now)
                    self._requests[sequence.request_id][1].put(event)
                if reason is not None:
                    self.scheduler.release(sequence)
                    self._finish(sequence, reason)
            self._release_aborted()
            self.scheduler.check()
        return True

    def _release_aborted(self) -> None:
        for running in self.scheduler.running:
            for sequence in [sequence for sequence in running if sequence.is_aborted]:
                self.scheduler.release(sequence)

    def _finish(self, sequence: SequenceState, reason: FinishReason, error: WorkbenchError | None = None) -> None:
        _, generation = self._requests.pop(sequence.request_id)
        generation.put(Finish(reason=reason, num_tokens=len(sequence.generated), time_s=self._clock(), error=error))

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, WorkbenchError):
            self._error = error
        else:
            self._error = DeploymentError(f"the runner failed: {type(error).__name__}: {error}")
            self._error.__cause__ = error
        self._finish_all(self._error)

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
                    while not self._is_stopping and self._error is None and not self.scheduler.has_work:
                        self._changed.wait()
                    if self._is_stopping or self._error is not None:
                        return
                self.step_once()
        except BaseException as error:  # a bug of ours: report it to whoever waits, then let it show
            self._fail(error)
            raise
        finally:
            self._drop_pages()
            release_runner(self.runner)

    def _drop_pages(self) -> None:
        """Leave nothing kept behind: the next driver of the runner would know of none of it."""
        with self._changed:
            pages = self.scheduler.forget_pages()
        if self._error is not None:
            return  # nobody is there to listen
        try:
            for replica, keys in pages:
                self.runner.drop_images(replica, keys)
        except WorkbenchError as error:
            self._error = error


def _constraint_error(sequence: SequenceState) -> WorkbenchError | None:
    """An error of this request alone, where what holds its answer to a form gave up."""
    constraint = sequence.request.constraint
    if constraint is None or constraint.error is None:
        return None
    return RequestError(f"the answer cannot be held to its grammar any longer: {constraint.error}"[:300])
