"""A server with the OpenAI interface that sends given chunks at given times of a clock that it sets itself.

It speaks over a real socket, but nothing depends on how fast: the clock stands still until the server moves it, and the
server moves it on only after the client has read it for the chunk before.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROMPT_TOKENS = 7


class SetClock:
    """A clock that shows what it was set to, and counts how often it was looked at."""

    def __init__(self, now_s: float = 100.0) -> None:
        self.now_s = now_s
        self._num_reads = 0
        self._read = threading.Condition()

    def __call__(self) -> float:
        with self._read:
            self._num_reads += 1
            self._read.notify_all()
            return self.now_s

    @property
    def num_reads(self) -> int:
        with self._read:
            return self._num_reads

    def wait_read_after(self, num_reads: int) -> None:
        with self._read:
            assert self._read.wait_for(lambda: self._num_reads > num_reads, timeout=30), "the client read no time"


@dataclass
class Script:
    """What one request is answered with. `events`: (time of the clock, chunk or raw bytes). `status`: refuse instead.

    `then`: "done" ends the stream in order, "cut" closes the connection, "stall" says nothing until the client leaves.
    """

    events: Sequence[tuple[float, dict[str, Any] | bytes]] = ()
    status: int = 200
    then: str = "done"
    done_s: float | None = None


def role() -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}


def said(text: str, *, total: int | None = None) -> dict[str, Any]:
    return _chunk({"content": text}, total)


def thought(text: str, *, total: int | None = None, name: str = "reasoning_content") -> dict[str, Any]:
    return _chunk({name: text}, total)


def ended(*, total: int | None = None, reason: str = "stop") -> dict[str, Any]:
    chunk = _chunk({}, total)
    chunk["choices"][0]["finish_reason"] = reason
    return chunk


def usage(total: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": total}}


def _chunk(delta: dict[str, Any], total: int | None) -> dict[str, Any]:
    counted = {} if total is None else {"usage": {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": total}}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}], **counted}


@dataclass
class ScriptedServer:
    url: str
    clock: SetClock
    scripts: list[Script]
    refuses_running_usage: bool = False
    asked: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def scripted(*scripts: Script, refuses_running_usage: bool = False) -> Iterator[ScriptedServer]:
    """Answers one request after another with the scripts."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            self._whole(200, {"data": [{"id": "scripted"}]})

        def do_POST(self) -> None:
            content = json.loads(self.rfile.read(int(self.headers["content-length"])))
            server.asked.append(content)
            if server.refuses_running_usage and "continuous_usage_stats" in content["stream_options"]:
                self._whole(400, {"error": {"message": "unknown field continuous_usage_stats"}})
                return
            script = server.scripts.pop(0)
            if script.status != 200:
                self._whole(script.status, {"error": {"message": "as the script says"}})
                return
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            for time_s, event in script.events:
                before, server.clock.now_s = server.clock.num_reads, time_s
                is_chunk = isinstance(event, dict)  # of which the client reads the time, unless it is an error
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n" if is_chunk else event)  # type: ignore[operator]
                self.wfile.flush()
                if is_chunk and "error" not in event:
                    server.clock.wait_read_after(before)
            if script.then == "done":
                server.clock.now_s = script.done_s or server.clock.now_s
                self.wfile.write(b"data: [DONE]\n\n")
            elif script.then == "stall":
                self.connection.settimeout(30)
                self.connection.recv(1)
            else:
                self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

        def _whole(self, status: int, content: object) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    http_server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http_server.daemon_threads = True
    server = ScriptedServer(
        f"http://127.0.0.1:{http_server.server_port}/v1", SetClock(), list(scripts), refuses_running_usage
    )
    thread = threading.Thread(target=http_server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http_server.shutdown()
        http_server.server_close()
        thread.join()
