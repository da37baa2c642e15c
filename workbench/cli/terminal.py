"""A conversation in the terminal: questions line by line, answers as they come."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from workbench.base import WorkbenchError, printable_lines
from workbench.cli.show import print_error, print_json, say
from workbench.serving import Answer, ImagePart, Message, TextPart
from workbench.serving.inputs import ImageSource

__all__ = ["ChatService", "Terminal"]

HELP = """/image FILE   a picture for the next question    /clear   begin anew
/quit         leave (also Ctrl-D)                 Ctrl-C   stop the answer"""


class ChatReply(Protocol):
    answer: Answer | None

    @property
    def thinking(self) -> str: ...
    def __iter__(self) -> Iterator[str]: ...
    def close(self) -> None: ...


class ChatService(Protocol):
    """What a conversation needs; a service of ours and a remote one both are one."""

    def stream(
        self,
        text_or_messages: Sequence[Message],
        image_input: Sequence[ImageSource],
        *,
        max_tokens: int,
        temperature: float,
    ) -> ChatReply: ...


class Terminal:
    """Reads `source` to its end. An interrupt stops the answer under way; one outside an answer leaves.

    With `as_json` every answer is one JSON document a line, and nothing else is printed.
    """

    def __init__(
        self,
        service: ChatService,
        *,
        system: str = "",
        max_tokens: int = 512,
        temperature: float = 0.0,
        as_json: bool = False,
        source: TextIO | None = None,
    ) -> None:
        self._service, self._as_json = service, as_json
        self._options = {"max_tokens": max_tokens, "temperature": temperature}
        self._start = [Message("system", system)] if system else []
        self._source = source or sys.stdin
        self._clear()

    def run(self) -> int:
        """Exit code: 0, or 2 where the last question could not be answered."""
        code = 0
        is_typed = self._source.isatty() and not self._as_json
        if is_typed:
            say(HELP)
        while (line := self._read("> " if is_typed else "")) is not None:
            name, _, rest = line.strip().partition(" ")
            if name == "/quit":
                break
            try:
                if name == "/clear":
                    self._clear()
                elif name == "/image":
                    self._images.append(Path(rest.strip()).expanduser().read_bytes())
                elif name in ("/help", "/?"):
                    say(HELP)
                elif line.strip():
                    self._ask(line.rstrip("\n"))
                code = 0
            except (WorkbenchError, OSError) as error:
                print_error(error, self._as_json)
                code = 2
        return code

    def _clear(self) -> None:
        self._messages: list[Message] = list(self._start)
        self._shown: list[ImageSource] = []  # pictures of the conversation so far
        self._images: list[ImageSource] = []  # those of the next question

    def _read(self, prompt: str) -> str | None:
        try:
            if prompt:
                return input(prompt)
            return self._source.readline() or None
        except EOFError:
            return None

    def _ask(self, text: str) -> None:
        question = Message("user", [*(ImagePart() for _ in self._images), TextPart(text)])
        images = [*self._shown, *self._images]
        options: dict[str, Any] = self._options
        reply = self._service.stream([*self._messages, question], images, **options)
        pieces: list[str] = []
        try:
            with contextlib.suppress(KeyboardInterrupt):  # stops the answer, not the conversation
                for piece in reply:
                    pieces.append(piece)
                    if not self._as_json:
                        self._show(piece)
        finally:
            reply.close()
        if not self._as_json:
            self._show("\n")
        elif reply.answer is not None:
            print_json(reply.answer.to_json())
        self._messages += [question, Message("assistant", "".join(pieces), thinking=reply.thinking)]
        self._shown, self._images = images, []

    @staticmethod
    def _show(piece: str) -> None:
        encoding = sys.stdout.encoding or "utf-8"
        shown = printable_lines(piece).encode(encoding, "backslashreplace").decode(encoding)
        print(shown, end="", flush=True)
