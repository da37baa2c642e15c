"""A service that answers as it is told to, for tests of what stands in front of one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gradio as gr

from workbench.serving import Answer, Message, Timings, Usage

__all__ = ["ScriptedReply", "ScriptedService", "Thought", "handlers", "submitted"]


class Thought(str):
    """A piece of a script that is thought, not said."""

    __slots__ = ()


class ScriptedReply:
    """Gives its pieces one by one, each after the reader may have it; a WorkbenchError in the script is raised."""

    def __init__(self, script: Sequence[str | BaseException], gate: threading.Semaphore | None) -> None:
        self.answer: Answer | None = None
        self.thinking = ""
        self.is_closed = threading.Event()
        self.num_read = 0
        self._script, self._gate = script, gate

    def __iter__(self) -> Iterator[str]:
        for piece in self._script:
            while self._gate is not None and not self._gate.acquire(timeout=0.02):
                if self.is_closed.is_set():
                    return
            if self.is_closed.is_set():
                return
            if isinstance(piece, BaseException):
                raise piece
            if isinstance(piece, Thought):
                self.thinking += piece
                continue
            self.num_read += 1
            yield piece
        times = tuple(0.25 + 0.05 * i for i in range(len(self._script)))
        self.answer = Answer(
            text="".join(piece for piece in self._script if isinstance(piece, str) and not isinstance(piece, Thought)),
            thinking=self.thinking,
            token_ids=(),
            logprobs=(),
            finish_reason="length",
            usage=Usage(prompt_tokens=40, image_tokens=12, completion_tokens=len(self._script)),
            timings=Timings(queued_s=0.0, token_s=times, total_s=1.0),
        )

    def close(self) -> None:
        self.is_closed.set()


@dataclass
class ScriptedService:
    """Replies with `script`; with a `gate`, each piece waits for one release of it. `refusal` is raised instead."""

    script: Sequence[str | BaseException] = ("one ", "two ", "three")
    gate: threading.Semaphore | None = None
    refusal: Exception | None = None
    asked: list[tuple[list[Message], list[Path], int, float]] = field(default_factory=list)
    replies: list[ScriptedReply] = field(default_factory=list)

    def stream(
        self,
        text_or_messages: Sequence[Message],
        image_input: Sequence[Path],
        *,
        max_tokens: int,
        temperature: float,
    ) -> ScriptedReply:
        self.asked.append((list(text_or_messages), list(image_input), max_tokens, temperature))
        if self.refusal is not None:
            raise self.refusal
        self.replies.append(ScriptedReply(self.script, self.gate))
        return self.replies[-1]


def handlers(app: gr.Blocks) -> dict[str, Callable[..., Any]]:
    """What the events of a page call, by name."""
    return {block.fn.__name__: block.fn for block in app.fns.values() if block.fn is not None}


def submitted() -> gr.EventData:
    """What comes with a question that was typed."""
    return gr.EventData(None, None)
