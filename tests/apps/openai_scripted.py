"""A server of the OpenAI interface that answers as a test tells it to, and remembers what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["ScriptedOpenAI", "Stream", "chunk", "dies_after", "refuses", "says", "words_of"]

Stream = Callable[["Handler"], None]


class ScriptedOpenAI(ThreadingHTTPServer):
    """`script` has what each question in turn is answered with; the last one answers all that come after."""

    daemon_threads = True

    def __init__(self, *script: Stream) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script = list(script)
        self.asked: list[dict[str, Any]] = []
        self.left = threading.Event()  # a reader was gone before its answer was whole
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def __exit__(self, *args: object) -> None:
        self.shutdown()
        super().__exit__(*args)

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a reader that leaves is part of the tests


class Handler(BaseHTTPRequestHandler):
    server: ScriptedOpenAI

    def do_GET(self) -> None:
        self.whole(200, {"object": "list", "data": [{"id": "scripted"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(body)
        script = self.server.script
        answer = script.pop(0) if len(script) > 1 else script[0]
        try:
            answer(self)
        except OSError:
            self.server.left.set()

    def whole(self, status: int, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def begin(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()

    def event(self, content: object) -> None:
        data = content if isinstance(content, str) else json.dumps(content)
        self.wfile.write(f"data: {data}\n\n".encode())
        self.wfile.flush()

    def log_message(self, *args: object) -> None:
        pass


def chunk(finish: str | None = None, **delta: str) -> dict[str, Any]:
    return {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def says(
    pieces: Sequence[str | dict[str, Any]],
    *,
    gate: threading.Semaphore | None = None,
    usage: dict[str, Any] | None = None,
) -> Stream:
    """The pieces one by one, text or whole chunks; with a `gate`, each after one release of it."""

    def answer(handler: Handler) -> None:
        handler.begin()
        for piece in pieces:
            while gate is not None and not gate.acquire(timeout=0.02):
                handler.wfile.write(b": waiting\n\n")  # notices a reader that has left
                handler.wfile.flush()
            handler.event(chunk(content=piece) if isinstance(piece, str) else piece)
        handler.event(chunk("stop"))
        if usage is not None:
            handler.event({"choices": [], "usage": usage})
        handler.event("[DONE]")

    return answer


def dies_after(pieces: Sequence[str]) -> Stream:
    """Some pieces, and then no more: not even an end."""

    def answer(handler: Handler) -> None:
        handler.begin()
        for piece in pieces:
            handler.event(chunk(content=piece))
        handler.close_connection = True

    return answer


def refuses(status: int, message: str) -> Stream:
    return lambda handler: handler.whole(status, {"error": {"message": message, "type": "", "code": None}})


def words_of(asked: dict[str, Any]) -> list[tuple[str, str]]:
    """Role and text of each message; pictures as "[picture]"."""
    told = []
    for message in asked["messages"]:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        told.append((message["role"], "".join(part.get("text", "[picture]") for part in parts)))
    return told
