"""A proxy before a server that writes down requests and the events of their answers as they pass, on one clock.

Whatever a client says of its requests can be held against what passed here of the very same ones, by whatever
definition that client has: the figures then do not depend on how calm the machine is.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

__all__ = ["Wire", "WireEvent", "WireRequest"]

PER_HOP = {"host", "connection", "keep-alive", "transfer-encoding", "content-length", "accept-encoding", "te"}


@dataclass(frozen=True, kw_only=True)
class WireEvent:
    """One event of a stream: `has_choice` where it belongs to the answer, `text` what it adds to that."""

    time_s: float
    has_choice: bool
    text: str
    completion_tokens: int | None


@dataclass(kw_only=True)
class WireRequest:
    """One question that was answered as a stream. Times are those of the proxy: `began_s` when its first line came."""

    request_id: str
    content: str  # of its last message, as JSON
    began_s: float
    events: list[WireEvent] = field(default_factory=list)
    ended_s: float = 0.0

    @property
    def tokens(self) -> int:
        return max((each.completion_tokens or 0 for each in self.events), default=0)

    @property
    def text_times(self) -> list[float]:
        return [each.time_s for each in self.events if each.text]

    @property
    def choice_times(self) -> list[float]:
        """With the first one, that says whose turn it is, and the last one, that says why it ended."""
        return [each.time_s for each in self.events if each.has_choice]


class Wire:
    """Listens at `url` for what goes on to the server of `target`."""

    def __init__(self, target: str) -> None:
        self.target = urlsplit(target)
        self._lock, self._requests = threading.Lock(), list[WireRequest]()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"wire": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}{self.target.path}"

    def __enter__(self) -> Wire:
        threading.Thread(target=self._server.serve_forever, name="wire", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def add(self, request: WireRequest) -> None:
        with self._lock:
            self._requests.append(request)

    def take(self) -> list[WireRequest]:
        """Those that have passed whole since the last call, in the order in which they began."""
        with self._lock:
            taken, self._requests = self._requests, []
        return sorted(taken, key=lambda each: each.began_s)


class _Handler(BaseHTTPRequestHandler):
    wire: Wire
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    began_s = 0.0

    def parse_request(self) -> bool:
        self.began_s = time.perf_counter()
        return super().parse_request()

    def do_GET(self) -> None:
        self._pass_on()

    def do_POST(self) -> None:
        self._pass_on()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the benchmark prints."""

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        headers = {name: value for name, value in self.headers.items() if name.lower() not in PER_HOP}
        target = self.wire.target
        connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=900)
        with contextlib.closing(connection), contextlib.suppress(ConnectionError):
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.request(self.command, self.path, body or None, headers)
            response = connection.getresponse()
            self.send_response_only(response.status)
            for name, value in response.getheaders():
                if name.lower() not in PER_HOP:
                    self.send_header(name, value)
            if response.headers.get_content_type() != "text/event-stream":
                content = response.read()
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
                return
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            record = WireRequest(
                request_id=response.headers.get("x-request-id", ""), content=_content(body), began_s=self.began_s
            )
            for block in _blocks(response):
                now = time.perf_counter()
                record.events += _event(block, now)
                self.wfile.write(b"%x\r\n%s\r\n" % (len(block), block))
            record.ended_s = time.perf_counter()
            self.wire.add(record)
            self.wfile.write(b"0\r\n\r\n")


def _blocks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Events with the blank line behind each."""
    block = b""
    while line := response.readline():
        block += line
        if line in (b"\n", b"\r\n"):
            yield block
            block = b""
    if block:
        yield block


def _event(block: bytes, now: float) -> list[WireEvent]:
    data = b"".join(line[5:].strip() for line in block.splitlines() if line.startswith(b"data:"))
    if not data or data == b"[DONE]":
        return []
    content: dict[str, Any] = json.loads(data)
    choices = content.get("choices") or []
    deltas = [choice.get("delta") or {} for choice in choices]
    text = "".join((delta.get("content") or "") + (delta.get("reasoning_content") or "") for delta in deltas)
    tokens = (content.get("usage") or {}).get("completion_tokens")
    return [WireEvent(time_s=now, has_choice=bool(choices), text=text, completion_tokens=tokens)]


def _content(body: bytes) -> str:
    try:
        return json.dumps(json.loads(body)["messages"][-1]["content"])
    except (ValueError, KeyError, IndexError, TypeError):
        return ""
