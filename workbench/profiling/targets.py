"""What a load is sent to: any server with the OpenAI interface, or a service in this process. One timing per request.

A request that fails is a timing as well, with its error and what had arrived by then: a load must not end because a
server is overloaded, which is what it is there to find out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from workbench.base import QueueFullError, RequestError, WorkbenchError
from workbench.profiling.latency import RequestTiming
from workbench.serving.chunks import TokenEnds, token_arrivals
from workbench.serving.client import RemoteReply, RemoteService
from workbench.serving.inputs import ImageSource
from workbench.serving.service import MultimodalInferenceService

__all__ = ["Question", "ServerTarget", "ServiceTarget", "Target"]

MAX_ERROR = 200  # characters kept of an error


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One request of a load. `label` names its kind; `seed` is of the draws, where `temperature` is above 0."""

    text: str
    images: tuple[ImageSource, ...] = field(default=(), repr=False)
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int | None = None
    label: str = ""


class Target(Protocol):
    """Something that answers. `clock` is the one its timings are on."""

    @property
    def clock(self) -> Callable[[], float]: ...

    def ask(self, question: Question) -> RequestTiming:
        """Ask and wait for the end. Called from many threads; raises nothing that a server can cause."""
        ...


class ServerTarget:
    """A server with the OpenAI interface. `token_ends` cuts text as its model does, for servers that do not count.

    The first request finds out whether the server counts tokens chunk by chunk. Every request connects anew, and its
    time includes that. `fields` go into every request, such as {"ignore_eos": True} for answers of a fixed length.
    """

    def __init__(
        self,
        service: RemoteService,
        *,
        token_ends: TokenEnds | None = None,
        fields: dict[str, Any] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.service, self.clock = service, clock
        self._token_ends, self._fields = token_ends, fields
        self._has_running_usage: bool | None = None  # None: not found out yet

    def ask(self, question: Question) -> RequestTiming:
        started_s = self.clock()
        reply: RemoteReply | None = None
        error = ""
        try:
            started_s, reply = self._stream(question)
            for _ in reply:
                pass
        except WorkbenchError as failure:
            error = _text_of(failure)
        except BaseException:
            if reply is not None:
                reply.close()
            raise
        chunks = reply.chunks if reply is not None else []
        arrivals, counted_by = token_arrivals(chunks, token_ends=self._token_ends)
        usage = reply.answer.usage if reply is not None and reply.answer is not None else None
        return RequestTiming(
            submitted_s=started_s,
            arrivals=arrivals,
            num_prompt_tokens=usage.prompt_tokens if usage is not None else 0,
            num_images=len(question.images),
            label=question.label,
            counted_by=counted_by,
            error=error,
        )

    def _stream(self, question: Question) -> tuple[float, RemoteReply]:
        """The reply, and when the request that led to it began."""
        started_s = self.clock()
        try:
            reply = self._send(question, running_usage=self._has_running_usage is not False)
        except QueueFullError:
            raise
        except RequestError:
            if self._has_running_usage is not None:
                raise
            # It may be the question that is wrong: only an answer without the field says that it was the field.
            started_s = self.clock()
            reply = self._send(question, running_usage=False)
            self._has_running_usage = False
        else:
            self._has_running_usage = self._has_running_usage is not False
        return started_s, reply

    def _send(self, question: Question, *, running_usage: bool) -> RemoteReply:
        return self.service.stream(
            question.text,
            question.images,
            max_tokens=question.max_tokens,
            temperature=question.temperature,
            seed=question.seed,
            running_usage=running_usage,
            fields=self._fields,
        )


class ServiceTarget:
    """A service in this process, measured where its tokens are made: no transport, every token counted by its id.

    Preparing the prompt and its pictures is part of the time. The service's engine must be on its usual clock.
    """

    clock: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(self, service: MultimodalInferenceService) -> None:
        self.service = service

    def ask(self, question: Question) -> RequestTiming:
        started_s = self.clock()
        arrivals: Sequence[tuple[float, int]] = ()
        num_prompt_tokens, error = 0, ""
        try:
            reply = self.service.stream(
                question.text,
                list(question.images),
                max_tokens=question.max_tokens,
                temperature=question.temperature,
                seed=question.seed,
            )
            answer = reply.result()
            ended_s = reply.submitted_s + answer.timings.total_s
            arrivals = [*((reply.submitted_s + t, 1) for t in answer.timings.token_s), (ended_s, 0)]
            num_prompt_tokens = answer.usage.prompt_tokens
        except WorkbenchError as failure:
            error = _text_of(failure)
        return RequestTiming(
            submitted_s=started_s,
            arrivals=tuple(arrivals),
            num_prompt_tokens=num_prompt_tokens,
            num_images=len(question.images),
            label=question.label,
            error=error,
        )


def _text_of(error: WorkbenchError) -> str:
    return f"{type(error).__name__}: {error.message}".partition("\n")[0][:MAX_ERROR]
