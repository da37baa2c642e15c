"""What a caller holds of one request: its tokens as they come, and how it ended."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

from workbench.base import WorkbenchError
from workbench.serving.sequence import FinishReason

__all__ = ["EngineStats", "Finish", "Generation", "Listener", "TokenEvent"]


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
    num_restarts: int = 0  # of the runner, after something broke it
    num_drafted: int = 0  # tokens that were guessed, and how many of them held
    num_accepted: int = 0
    num_pages: int = 0  # kept beginnings of prompts, over all replicas
    num_images: int = 0  # whose features the ranks hold, over all replicas
    num_pool_pages: int = 0  # of the caches, over all replicas; a slot with rows of its own is one
    num_free_pool_pages: int = 0  # held neither by a sequence nor as a kept beginning
    num_prompt_tokens: int = 0  # to read at every admission, `num_cached_tokens` among them
    num_generated: int = 0  # tokens handed out


Listener = Callable[[TokenEvent | Finish], None]


class Aborting(Protocol):
    """Whoever can end a request before its time."""

    def abort(self, request_id: int) -> None: ...


class Generation:
    """The tokens of one request, as they come. Iterate once; the stop token itself is not among them.

    With a listener the events go there instead, and there is nothing to iterate.
    """

    def __init__(self, engine: Aborting, request_id: int, submitted_s: float, listener: Listener | None = None) -> None:
        self.request_id = request_id
        self.submitted_s = submitted_s
        self.admitted_s: float | None = None
        self.last_token_s: float | None = None
        self.num_cached = 0  # tokens of the prompt that were not read again
        self.num_drafted = 0  # tokens that were guessed, and how many of them held
        self.num_accepted = 0
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
