"""Generated tokens into pieces of an answer: channels told apart, stop strings cut off, tokens matched to their text.

Pure bookkeeping over events, without threads or clocks: the blocking `Reply` and the HTTP server both read through it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from workbench.serving.generation import TokenEvent
from workbench.serving.inputs import AnswerStream, Tokenizer
from workbench.serving.inputs.messages import AnswerDelta
from workbench.serving.stop import StopMatcher

__all__ = ["AnswerPieces", "Piece", "PlainStream"]

Channel = Literal["thinking", "response"]


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of one channel. `tokens` are those of the response whose text is shown in full by now, each once."""

    channel: Channel
    text: str
    tokens: tuple[TokenEvent, ...] = ()


class ChannelStream(Protocol):
    """Ids in, text out by channel. `shows_markers`: reserved ids are text, too."""

    @property
    def channel(self) -> Channel | None: ...
    @property
    def shows_markers(self) -> bool: ...
    def push(self, token_id: int) -> list[AnswerDelta]: ...
    def flush(self) -> list[AnswerDelta]: ...


class PlainStream:
    """All text is response, as where a prompt has no message form; reserved ids are left out, or shown by name."""

    channel: Channel = "response"

    def __init__(self, tokenizer: Tokenizer, *, show_markers: bool = False) -> None:
        self.shows_markers = show_markers
        self._text = tokenizer.stream(show_markers=show_markers)

    def push(self, token_id: int) -> list[AnswerDelta]:
        text = self._text.push(token_id)
        return [AnswerDelta("response", text)] if text else []

    def flush(self) -> list[AnswerDelta]:
        text = self._text.flush()
        return [AnswerDelta("response", text)] if text else []


class AnswerPieces:
    """Feed events with `push`, then `flush` once. After a stop string `is_stopped` holds and nothing more comes out.

    Neither the text nor the tokens of a stop string are ever given out: a token counts as shown when the last
    character that it reaches into is.
    """

    def __init__(self, tokenizer: Tokenizer, *, stop: StopMatcher, stream: ChannelStream | None = None) -> None:
        self._tokenizer = tokenizer
        self._stream = stream or AnswerStream(tokenizer)
        self._stop = stop
        self._waiting: deque[tuple[TokenEvent, int]] = deque()  # response tokens, and the characters up to their ends
        self._num_read = 0  # characters of the response so far
        self._num_shown = 0

    @property
    def is_stopped(self) -> bool:
        return self._stop.is_stopped

    def push(self, event: TokenEvent) -> list[Piece]:
        if self.is_stopped:
            return []
        is_shown = self._stream.shows_markers or not self._tokenizer.is_reserved(event.token_id)
        is_text = self._stream.channel == "response" and is_shown
        deltas = self._stream.push(event.token_id)
        if is_text:
            grown = sum(len(delta.text) for delta in deltas)
            # One that completes no character reaches into the next one.
            self._waiting.append((event, self._num_read + max(1, grown)))
        return self._pieces(deltas)

    def flush(self) -> list[Piece]:
        """What was held back, once the last event is in."""
        pieces = self._pieces(self._stream.flush())
        if self.is_stopped:
            return pieces
        rest = self._stop.flush()
        tokens = tuple(event for event, _ in self._waiting)
        self._waiting.clear()
        return [*pieces, Piece("response", rest, tokens)] if rest or tokens else pieces

    def _pieces(self, deltas: Sequence[AnswerDelta]) -> list[Piece]:
        pieces = []
        for delta in deltas:
            if delta.channel == "thinking":
                pieces.append(Piece("thinking", delta.text))
                continue
            self._num_read += len(delta.text)
            shown = self._stop.feed(delta.text)
            self._num_shown += len(shown)
            if shown:
                pieces.append(Piece("response", shown, self._shown_tokens()))
        return pieces

    def _shown_tokens(self) -> tuple[TokenEvent, ...]:
        shown = []
        while self._waiting and self._waiting[0][1] <= self._num_shown:
            shown.append(self._waiting.popleft()[0])
        return tuple(shown)
