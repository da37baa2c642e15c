"""One connection with bounds that the HTTP library leaves open: slow headers, stuck readers, errors in our form."""

from __future__ import annotations

import asyncio
import json

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from workbench.serving.http.errors import ApiError
from workbench.serving.http.settings import ServerSettings

__all__ = ["connection_class"]


class _Connection(H11Protocol):
    header_timeout_s: float
    write_timeout_s: float
    _header_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._header_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state is not h11.IDLE:  # in the middle of an answer: there is no way to say it
            self.transport.close()
            return
        body = json.dumps(ApiError(400, msg, code="invalid_request").to_json()).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch_headers(self) -> None:
        """A timer runs while a request has begun, or its connection has, and its headers are not all there."""
        if self.conn.their_state is h11.IDLE:
            if self._header_timer is None:
                self._header_timer = self.loop.call_later(self.header_timeout_s, self.transport.abort)
        elif self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


def connection_class(settings: ServerSettings) -> type[H11Protocol]:
    """The connection of a server with these settings."""
    return type(
        "Connection",
        (_Connection,),
        {"header_timeout_s": settings.header_timeout_s, "write_timeout_s": settings.write_timeout_s},
    )
