"""A chat with any OpenAI-compatible server, in the same words as with a model of our own. Standard library alone."""

from __future__ import annotations

import base64
import contextlib
import http.client
import io
import json
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import SplitResult, urlsplit

from PIL import Image

from workbench.base import DeploymentError, QueueFullError, RequestError
from workbench.serving.chunks import StreamChunk, token_arrivals
from workbench.serving.inputs import ContentPart, ImagePart, ImageSource, Message, TextPart
from workbench.serving.reply import Answer, Timings, Usage
from workbench.serving.sequence import FinishReason

__all__ = ["RemoteReply", "RemoteService", "chat_content", "read_api_key"]

MAX_LINE = 16 << 20  # of a stream: one event; a server that sends more is not one we talk to
MIME = {"PNG": "png", "JPEG": "jpeg", "WEBP": "webp", "GIF": "gif", "BMP": "bmp", "TIFF": "tiff"}


class RemoteService:
    """`url` is the base address, such as http://127.0.0.1:8000/v1. Without a `model` the first one offered is asked.

    `timeout_s` is the longest silence. Raises RequestError for an address or a key that is none, DeploymentError where
    nobody answers there.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        timeout_s: float = 600.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if api_key and not (api_key.isascii() and api_key.isprintable()):  # it is never shown
            raise RequestError("not a usable API key", expected="printable ASCII letters")
        self.url, self._parts, self._timeout_s, self._clock = url.rstrip("/"), _parts_of(url), timeout_s, clock
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self.model = model or self.models()[0]

    def models(self) -> list[str]:
        """Names that the server offers. Raises DeploymentError where there is none."""
        with contextlib.closing(self._connect()) as connection:
            response = self._send(connection, "GET", "/models")
            try:
                content = json.loads(response.read(MAX_LINE))
                names = [str(entry["id"]) for entry in content.get("data", []) if "id" in entry]
            except (AttributeError, TypeError, ValueError, OSError, http.client.HTTPException) as error:
                raise DeploymentError(f"the server sent no list of models: {error}", where=self.url) from None
        if not names:
            raise DeploymentError("the server offers no model", where=self.url)
        return names

    def stream(
        self,
        text_or_messages: str | Sequence[Message],
        image_input: Sequence[ImageSource] = (),
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
        stop: Sequence[str] = (),
        seed: int | None = None,
        running_usage: bool = False,
        fields: Mapping[str, Any] | None = None,
    ) -> RemoteReply:
        """Pieces of the answer as they come. Raises RequestError for what the server refuses, QueueFullError where it
        is busy, DeploymentError where it cannot be reached or fails.

        `running_usage` asks for the number of tokens with every chunk, which not every server knows; `fields` are
        further ones of the request.
        """
        content = {
            **chat_content(self.model, text_or_messages, image_input),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stream": True,
            "stream_options": {
                "include_usage": True,
                **({"continuous_usage_stats": True} if running_usage else {}),
            },
            **({"stop": list(stop)} if stop else {}),
            **({"seed": seed} if seed is not None else {}),
            **(fields or {}),
        }
        connection = self._connect()
        # Where the server ends the connection with its answer, the library lets go of it as soon as the answer begins.
        opened, start_s = connection.sock, self._clock()
        try:
            response = self._send(connection, "POST", "/chat/completions", content)
        except BaseException:
            connection.close()
            raise
        return RemoteReply(connection, response, opened, start_s=start_s, where=self.url, clock=self._clock)

    def _connect(self) -> http.client.HTTPConnection:
        """Open already. Raises DeploymentError where nobody answers."""
        host, port = self._parts.hostname, self._parts.port
        assert host is not None
        connection = (
            http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=ssl.create_default_context())
            if self._parts.scheme == "https"
            else http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        )
        try:
            connection.connect()
        except (OSError, UnicodeError, http.client.HTTPException) as error:  # UnicodeError: no host can be called that
            raise DeploymentError(f"the server cannot be reached: {error}", where=self.url) from None
        return connection

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, content: object = None
    ) -> http.client.HTTPResponse:
        body = None if content is None else json.dumps(content).encode()
        headers = {**self._headers, **({"content-type": "application/json"} if body is not None else {})}
        try:
            connection.request(method, self._parts.path.rstrip("/") + path, body=body, headers=headers)
            response = connection.getresponse()
            refusal = b"" if response.status == 200 else response.read(1 << 16)
        except (OSError, http.client.HTTPException) as error:
            raise DeploymentError(f"the server cannot be reached: {error}", where=self.url) from None
        if response.status != 200:
            _refused(response.status, refusal, where=self.url)
        return response


class RemoteReply:
    """Iterate for pieces of text, then read `answer`. `close` ends it, from any thread.

    `start_s` is when the request left, and `chunks` what has come so far, on the same clock; `logprobs` those of the
    tokens so far, where they were asked for.
    """

    def __init__(
        self,
        connection: http.client.HTTPConnection,
        response: http.client.HTTPResponse,
        opened: socket.socket,
        *,
        start_s: float,
        where: str,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.answer: Answer | None = None
        self.start_s, self.chunks = start_s, list[StreamChunk]()
        self._connection, self._response, self._where, self._clock = connection, response, where, clock
        self._socket = opened
        self._is_closed = False
        self._text: list[str] = []
        self._thinking: list[str] = []
        self.logprobs: list[float] = []
        self._reason: FinishReason = "abort"
        self._usage: dict[str, Any] = {}
        self._pieces = self._run()

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def thinking(self) -> str:
        """What the model has thought so far."""
        return "".join(self._thinking)

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):  # wakes a reader in another thread, where closing would not
            self._socket.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _run(self) -> Iterator[str]:
        try:
            for content in self._events():
                now = self._clock()
                usage = content["usage"] if isinstance(content.get("usage"), dict) else {}
                self._usage = usage or self._usage
                choices = content.get("choices") or ()
                deltas = [choice.get("delta") or {} for choice in choices]
                self.chunks.append(
                    StreamChunk(
                        time_s=now,
                        content="".join(delta.get("content") or "" for delta in deltas),
                        reasoning="".join(_reasoning(delta) for delta in deltas),
                        completion_tokens=_count(usage.get("completion_tokens")),
                    )
                )
                for choice, delta in zip(choices, deltas, strict=True):
                    self._reason = "length" if choice.get("finish_reason") == "length" else self._reason
                    self._reason = "stop" if choice.get("finish_reason") == "stop" else self._reason
                    self._thinking.append(_reasoning(delta))
                    told = (choice.get("logprobs") or {}).get("content") or ()
                    self.logprobs += [float(token["logprob"]) for token in told]
                    if text := delta.get("content") or "":
                        self._text.append(text)
                        yield text
        except (OSError, ValueError, http.client.HTTPException) as error:
            if not self._is_closed:
                raise DeploymentError(f"the stream broke off: {error}", where=self._where) from None
        except (AttributeError, KeyError, TypeError) as error:
            raise DeploymentError(f"the server sent no chunk of an answer: {error}", where=self._where) from None
        finally:
            self.close()
        self.answer = self._finished()

    def _events(self) -> Iterator[dict[str, Any]]:
        while line := self._response.readline(MAX_LINE):
            data = line.strip()
            if not data.startswith(b"data:"):
                continue
            data = data.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            content = json.loads(data)
            if "error" in content:
                raise DeploymentError("the server failed while it answered", where=self._where, found=content["error"])
            yield content
        if not self._is_closed:
            raise DeploymentError("the stream broke off before its end", where=self._where)

    def _finished(self) -> Answer:
        details = self._usage.get("prompt_tokens_details")
        details = details if isinstance(details, dict) else {}
        arrivals, _ = token_arrivals(self.chunks)
        token_s = tuple(time_s - self.start_s for time_s, count in arrivals for _ in range(count))
        return Answer(
            text="".join(self._text),
            thinking="".join(self._thinking),
            token_ids=(),
            logprobs=tuple(self.logprobs),
            finish_reason=self._reason,
            usage=Usage(
                prompt_tokens=_count(self._usage.get("prompt_tokens")) or 0,
                image_tokens=_count(details.get("image_tokens")) or 0,
                completion_tokens=_count(self._usage.get("completion_tokens")) or 0,
            ),
            timings=Timings(queued_s=0.0, token_s=token_s, total_s=self._clock() - self.start_s),
        )


def _parts_of(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        is_address = url.isascii() and parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, half an IPv6 address
        is_address = False
    if not is_address:
        raise RequestError("not the address of a server", found=repr(url), expected="such as http://HOST:8000/v1")
    return parts


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


def _reasoning(delta: Mapping[str, Any]) -> str:
    return str(delta.get("reasoning_content") or delta.get("reasoning") or "")


def read_api_key(path: Path) -> str:
    """The key of a file's first line, `key` or `holder:key`. Raises RequestError where there is none."""
    try:
        words = path.read_text("utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"the key cannot be read: {type(error).__name__}", where=path) from None
    if not words:
        raise RequestError("the file holds no key", where=path)
    return words[0].rpartition(":")[2]


def chat_content(
    model: str, text_or_messages: str | Sequence[Message], images: Sequence[ImageSource] = ()
) -> dict[str, Any]:
    """The body of a request for a chat, to which options may be added. Raises RequestError for unreadable pictures."""
    return {"model": model, "messages": _spelled(text_or_messages, list(images))}


def _spelled(text_or_messages: str | Sequence[Message], images: list[ImageSource]) -> list[dict[str, Any]]:
    if isinstance(text_or_messages, str):
        parts: list[ContentPart] = [*(ImagePart() for _ in images), TextPart(text_or_messages)]
        text_or_messages = [Message("user", parts)]
    waiting = iter(images)
    messages = []
    for message in text_or_messages:
        content: list[dict[str, Any]] = []
        for part in message.parts:
            if isinstance(part, TextPart):
                content.append({"type": "text", "text": part.text})
            elif (image := next(waiting, None)) is not None:
                content.append({"type": "image_url", "image_url": {"url": _data_uri(image)}})
            else:
                raise RequestError("images and their places in the chat differ in number")
        is_text = all(entry["type"] == "text" for entry in content)
        spelled = "".join(entry["text"] for entry in content) if is_text else content
        thought = {"reasoning_content": message.thinking} if message.thinking else {}
        messages.append({"role": message.role, "content": spelled, **thought})
    return messages


def _data_uri(image: ImageSource) -> str:
    if isinstance(image, Image.Image):
        file = io.BytesIO()
        image.save(file, "PNG")
        data = file.getvalue()
    else:
        data = image.read_bytes() if isinstance(image, Path) else bytes(image)
    try:
        with Image.open(io.BytesIO(data), formats=tuple(MIME)) as opened:
            kind = MIME[opened.format or ""]
    except Exception as error:  # whatever a header parser trips over
        raise RequestError(f"not a readable picture: {error}", expected=f"one of {', '.join(MIME)}") from None
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _refused(status: int, body: bytes, *, where: str) -> NoReturn:
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = body[:200].decode("utf-8", "replace") or "no reason given"
    kind = QueueFullError if status == 429 else RequestError if status < 500 else DeploymentError
    raise kind(message, where=where, found=f"status {status}")
