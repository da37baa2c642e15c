"""Generations read by the event loop: their events come over from the engine's thread and leave as pieces."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from workbench.serving.engine import Engine
from workbench.serving.fleet import Fleet
from workbench.serving.generation import Finish, Generation, Listener, TokenEvent
from workbench.serving.http.prompts import Ask
from workbench.serving.pieces import AnswerPieces, Piece
from workbench.serving.sequence import FinishReason

__all__ = ["Choice", "LiveAnswers"]

HEARTBEAT_S = 15.0


@dataclass(slots=True)
class Choice:
    """One answer on its way. `finish_reason` is set once it is whole."""

    index: int
    pieces: AnswerPieces
    generation: Generation | None = None
    finish_reason: FinishReason | None = None
    num_tokens: int = 0
    token_times: list[float] = field(default_factory=list)

    @property
    def num_cached(self) -> int:
        """Tokens of the prompt that did not have to be read."""
        return self.generation.num_cached if self.generation is not None else 0

    @property
    def num_drafted(self) -> int:
        """Tokens that were guessed ahead of the model."""
        return self.generation.num_drafted if self.generation is not None else 0

    @property
    def num_accepted(self) -> int:
        """Of those, how many held."""
        return self.generation.num_accepted if self.generation is not None else 0


class LiveAnswers:
    """All choices of one request. Iterate `events` once; `close` aborts what is still under way, and may be repeated.

    Raises as `Engine.submit`; then nothing stays queued.
    """

    def __init__(self, engine: Engine | Fleet, asks: Sequence[Ask]) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[Choice, TokenEvent | Finish]] = asyncio.Queue()
        self.choices = [Choice(index, ask.new_pieces()) for index, ask in enumerate(asks)]
        try:
            for choice, ask in zip(self.choices, asks, strict=True):
                choice.generation = engine.submit(ask.request, self._listener(choice))
        except BaseException:
            self.close()
            raise

    @property
    def submitted_s(self) -> float:
        """On the engine's clock, as the times of the tokens are."""
        assert self.choices[0].generation is not None
        return self.choices[0].generation.submitted_s

    def close(self) -> None:
        for choice in self.choices:
            if choice.finish_reason is None and choice.generation is not None:
                choice.generation.abort()

    async def events(self) -> AsyncIterator[tuple[Choice, list[Piece]]]:
        """New text of a choice, or that it is whole now; neither where nothing happened for long.

        Raises the engine's error where a generation failed.
        """
        while any(choice.finish_reason is None for choice in self.choices):
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    choice, event = await self._events.get()
            except TimeoutError:
                yield self.choices[0], []
                continue
            if choice.finish_reason is not None:
                continue  # the end of a generation that a stop string had ended for us
            if isinstance(event, Finish):
                if event.error is not None:
                    raise copy.copy(event.error) from event.error  # it is told to every request in flight
                choice.num_tokens = event.num_tokens
                pieces = choice.pieces.flush()
                choice.finish_reason = event.reason
            else:
                choice.num_tokens += 1
                choice.token_times.append(event.time_s)
                pieces = choice.pieces.push(event)
                if choice.pieces.is_stopped:
                    assert choice.generation is not None
                    choice.generation.abort()
                    choice.finish_reason = "stop"
            if pieces or choice.finish_reason is not None:
                yield choice, pieces

    def _listener(self, choice: Choice) -> Listener:
        def hand_over(event: TokenEvent | Finish) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it whoever read this
                self._loop.call_soon_threadsafe(self._events.put_nowait, (choice, event))

        return hand_over
