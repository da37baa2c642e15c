"""A server over a scripted runner, and a plain client of it that hides nothing of what came over the wire."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from serving_fakes import EchoRunner, ScriptRunner, byte_tokenizer

from workbench.serving import ImageProcessor, MultimodalInferenceService
from workbench.serving.http import HttpServer, ServerSettings
from workbench.spec import ImageSpec

TOKENIZER = byte_tokenizer(10_000)
MARKS = TOKENIZER.markers
CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"


def said(text: str) -> list[int]:
    return [*text.encode(), MARKS.end_of_msg]


def thought(thinking: str, text: str) -> list[int]:
    return [
        *thinking.encode(), MARKS.close, *b"think", MARKS.sep, MARKS.open, *b"response", MARKS.sep, *text.encode(),
        MARKS.close, *b"response", MARKS.sep, MARKS.end_of_msg,
    ]  # fmt: skip


def ask(text: object = "hi", **fields: object) -> dict[str, object]:
    return {"model": "k3", "messages": [{"role": "user", "content": text}], **fields}


@dataclass(frozen=True)
class Got:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        """The error, which must be in the OpenAI form and say nothing of this machine."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert "Traceback" not in self.body.decode()
        assert "/work" not in error["message"]
        return error

    @property
    def events(self) -> list[Any]:
        """Content of a finished stream, without its end mark."""
        assert self.headers["content-type"].startswith("text/event-stream")
        assert self.body.endswith(b"data: [DONE]\n\n")
        lines = [event for event in self.body.decode().split("\n\n") if event]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    @property
    def text(self) -> str:
        return "".join(c["delta"].get("content", "") for e in self.events for c in e["choices"])


@dataclass(frozen=True)
class Served:
    service: MultimodalInferenceService
    server: HttpServer
    port: int

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)

    def raw(self, data: bytes = b"") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        connection.sendall(data)
        return connection

    def call(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Got:
        connection = self.connect()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            connection.request(method, path, body=body, headers=named)
            response = connection.getresponse()
            return Got(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Got:
        return self.call("GET", path, **headers)

    def post(self, content: object, path: str = CHAT, **headers: str) -> Got:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        return self.call("POST", path, body, **{"content_type": "application/json", **headers})

    def is_idle(self) -> bool:
        stats = self.service.stats()
        info = self.service.model.info
        return (
            stats.num_running + stats.num_waiting == 0
            and stats.num_free_slots == info.num_slots * info.dp
            and self.server.api.gate.num_inside == 0
        )


@contextmanager
def served(
    runner: EchoRunner | list[int],
    *,
    processor: object = None,
    prefix_pages: int = 0,
    page_tokens: int = 256,
    thinking_first: bool = False,
    **settings: Any,
) -> Iterator[Served]:
    """Served until the block ends; afterwards every slot must be free and every place empty."""
    if isinstance(runner, list):
        runner = ScriptRunner(runner)
    service = MultimodalInferenceService(
        runner,
        TOKENIZER,
        processor or ImageProcessor(ImageSpec()),  # type: ignore[arg-type]
        prefix_pages=prefix_pages,
        page_tokens=page_tokens,
        thinking=thinking_first,
    )
    settings = {"model": "k3", "port": 0, "drain_timeout_s": 5.0, **settings}
    with service, HttpServer(service, ServerSettings(**settings)) as server:
        port = int(server.url.removesuffix("/v1").rpartition(":")[2])
        each = Served(service, server, port)
        yield each
        until(each.is_idle)


def until(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)
