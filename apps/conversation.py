"""What one visitor asked and was told, and how an answer streams into it. Nothing here knows a browser.

A conversation is immutable: each step of a streamed answer is a new one, so that what the visitor saw last is always
whole, wherever the stream is cut.
"""

from __future__ import annotations

import html
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Literal, Protocol

from workbench.base import RequestError, WorkbenchError
from workbench.serving import Answer, ImagePart, Message, TextPart

__all__ = ["ChatReply", "ChatService", "Conversation", "Options", "Turn", "TurnState", "stream_answer"]

TurnState = Literal["answering", "done", "stopped", "failed"]

POLL_S = 0.2  # a stop is noticed at the next yield, so there is one at least this often, news or not
THROTTLE_S = 0.05  # twenty updates a second are enough to read along; each costs the browser a redraw
MAX_IMAGES = 8  # per question
THOUGHT = "Thought first"  # title of what the model thought before its answer


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What a visitor may choose. `temperature` 0 takes the likeliest token."""

    max_tokens: int = 128
    temperature: float = 0.0


class ChatReply(Protocol):
    """Pieces of text as they come, thoughts so far, and the finished answer; `close` ends them from any thread."""

    answer: Answer | None

    @property
    def thinking(self) -> str: ...
    def __iter__(self) -> Iterator[str]: ...
    def close(self) -> None: ...


class ChatService(Protocol):
    """What a chat needs of a service; `MultimodalInferenceService` is one."""

    def stream(
        self,
        text_or_messages: Sequence[Message],
        image_input: Sequence[Path],
        *,
        max_tokens: int,
        temperature: float,
    ) -> ChatReply: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """A question with its pictures, and what came back so far. `note` holds figures, or what went wrong."""

    text: str
    images: tuple[str, ...] = ()
    thinking: str = ""
    answer: str = ""
    state: TurnState = "answering"
    note: str = ""


@dataclass(frozen=True, slots=True)
class Conversation:
    turns: tuple[Turn, ...] = ()

    @property
    def note(self) -> str:
        return self.turns[-1].note if self.turns else ""

    @property
    def is_open(self) -> bool:
        """Whether an answer is under way."""
        return bool(self.turns) and self.turns[-1].state == "answering"

    def ask(self, text: str, images: Iterable[str] = ()) -> Conversation:
        """With one more question. Raises RequestError where there is nothing to answer or too many pictures."""
        text, images = text.strip(), tuple(images)
        if not text:
            raise RequestError("there is no question", next_step="Write one, with or without pictures")
        if len(images) > MAX_IMAGES:
            raise RequestError("too many pictures in one question", found=len(images), expected=f"at most {MAX_IMAGES}")
        return Conversation((*self.turns, Turn(text=text, images=images)))

    def taken_back(self) -> tuple[Conversation, Turn]:
        """Without the last question, and that. Raises RequestError where there is none, and while it is answered: the
        answer would go on writing."""
        if self.is_open:
            raise RequestError("an answer is under way", next_step="Stop it first")
        if not self.turns:
            raise RequestError("there is no question", next_step="Write one, with or without pictures")
        return Conversation(self.turns[:-1]), self.turns[-1]

    def asked_again(self) -> Conversation:
        """With the last question once more, and without what was answered to it. Raises as `taken_back`."""
        before, turn = self.taken_back()
        return before.ask(turn.text, turn.images)

    def answered(self, answer: str, state: TurnState, note: str, *, thinking: str = "") -> Conversation:
        """With what has come back to the last question, and what was thought about it before."""
        turn = replace(self.turns[-1], thinking=thinking, answer=answer, state=state, note=note)
        return Conversation((*self.turns[:-1], turn))

    def stopped(self) -> Conversation:
        """With the last turn closed, if it was still open."""
        if not self.is_open:
            return self
        last = self.turns[-1]
        return self.answered(last.answer, "stopped", "stopped", thinking=last.thinking)

    def prompt(self) -> tuple[list[Message], list[Path]]:
        """What the model reads: all turns but failed ones, pictures before the text of their question."""
        messages: list[Message] = []
        images: list[Path] = []
        for turn in self.turns:
            if turn.state == "failed":
                continue
            messages.append(Message("user", [*(ImagePart() for _ in turn.images), TextPart(turn.text)]))
            images += map(Path, turn.images)
            if turn.state != "answering":
                messages.append(Message("assistant", turn.answer, thinking=turn.thinking))
        return messages, images

    def shown(self) -> list[dict[str, object]]:
        """Entries of a chat window, thoughts as entries of their own that open and close.

        Pictures go by path: encoded, they would be sent again with every update.
        """
        entries: list[dict[str, object]] = []
        for turn in self.turns:
            entries += [{"role": "user", "content": {"path": path, "alt_text": "picture"}} for path in turn.images]
            answer = f"{turn.answer}\n\n⚠ {turn.note}".strip() if turn.state == "failed" else turn.answer
            entries.append(_entry("user", turn.text))
            if turn.thinking:
                entries.append({**_entry("assistant", turn.thinking), "metadata": {"title": THOUGHT}})
            if answer or not turn.thinking:
                entries.append(_entry("assistant", answer))
        return entries


def stream_answer(
    service: ChatService,
    conversation: Conversation,
    options: Options,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Generator[Conversation, None, None]:
    """The conversation as its last question is answered; an error of the workbench ends it as a failed turn.

    Yields at least every `POLL_S`, at most every `THROTTLE_S` while text comes. Closing the iterator, at whichever
    yield it stands, aborts the request.
    """
    started_s = clock()
    try:
        messages, images = conversation.prompt()
        reply = service.stream(messages, images, max_tokens=options.max_tokens, temperature=options.temperature)
    except WorkbenchError as error:
        yield conversation.answered("", "failed", str(error))
        return
    pieces = _read_in_thread(reply)
    text, thinking, end = "", "", None
    try:
        while end is None:
            news, end = _collect(pieces)
            text += "".join(news)
            thinking = reply.thinking
            if end is None:
                state = "writing" if text else "thinking" if thinking else "reading the question"
                note = f"{state}, {clock() - started_s:.1f} s"
                yield conversation.answered(text, "answering", note, thinking=thinking)
        if isinstance(end, WorkbenchError):
            yield conversation.answered(text, "failed", str(end), thinking=thinking)
        elif isinstance(end, _Ended):
            note = _figures(reply.answer) if reply.answer else ""
            yield conversation.answered(text, "done", note, thinking=thinking)
        else:
            raise end  # a bug of ours, to be seen in the log
    finally:
        reply.close()


def _entry(role: str, text: str) -> dict[str, object]:
    """Escaped, for a chat window treats text as HTML even where it is told to render no markup: a model's output must
    not be able to make the visitor's browser fetch anything."""
    return {"role": role, "content": html.escape(text, quote=False)}


class _Ended:
    """The reply came to its end."""


def _read_in_thread(reply: ChatReply) -> SimpleQueue[str | _Ended | BaseException]:
    """Pieces of a blocking reply, then how it ended."""
    pieces: SimpleQueue[str | _Ended | BaseException] = SimpleQueue()

    def read() -> None:
        try:
            for piece in reply:
                pieces.put(piece)
            pieces.put(_Ended())
        except BaseException as error:
            pieces.put(error)

    threading.Thread(target=read, name="chat-answer", daemon=True).start()
    return pieces


def _collect(
    pieces: SimpleQueue[str | _Ended | BaseException],
) -> tuple[list[str], _Ended | BaseException | None]:
    """Waits up to `POLL_S` for a piece and gathers those of one `THROTTLE_S`: (pieces, how the reply ended or None)."""
    news: list[str] = []
    until_s = time.monotonic() + POLL_S
    while not news or time.monotonic() < until_s:
        try:
            piece = pieces.get(timeout=max(0.0, until_s - time.monotonic()))
        except Empty:
            break
        if not isinstance(piece, str):
            return news, piece
        if not news:
            until_s = time.monotonic() + THROTTLE_S
        news.append(piece)
    return news, None


def _figures(answer: Answer) -> str:
    usage, timings = answer.usage, answer.timings
    parts = []
    if usage.prompt_tokens:  # not every server counts, and none has nothing to read
        of_pictures = f" ({usage.image_tokens} of pictures)" if usage.image_tokens else ""
        parts = [f"{usage.prompt_tokens} tokens read{of_pictures}", f"{usage.completion_tokens} written"]
    if timings.first_token_s is not None:
        parts.append(f"the first after {timings.first_token_s * 1000:.0f} ms")
    if timings.per_token_s is not None:
        parts.append(f"then one every {timings.per_token_s * 1000:.1f} ms")
    ends = {"stop": "the model ended its answer", "length": "cut at the longest answer allowed", "abort": "stopped"}
    return "; ".join([*parts, ends[answer.finish_reason]])
