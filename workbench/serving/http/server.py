"""A server over a running service: in the foreground until a signal, or in a thread, as a notebook wants it.

A first SIGTERM or SIGINT drains: `/ready` says so, new questions are refused, those under way are answered, then it
ends. A second one ends it at once.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import threading
from types import FrameType, TracebackType

import uvicorn

from workbench.base import DeploymentError
from workbench.serving.copies import Copies
from workbench.serving.http.api import Api
from workbench.serving.http.connection import connection_class
from workbench.serving.http.settings import ServerSettings
from workbench.serving.http.watch import LOG, JsonLines
from workbench.serving.service import MultimodalInferenceService

__all__ = ["HttpServer", "bind_address", "log_to_stderr"]

KEEP_ALIVE_S = 30
BACKLOG = 512
CANCEL_S = 2  # for what is still under way when the time to drain is over


class _Uvicorn(uvicorn.Server):
    """Drains before it stops, and does not raise the signal anew afterwards: what runs around it ends in order."""

    def __init__(self, config: uvicorn.Config, api: Api) -> None:
        super().__init__(config)
        self._api = api

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._api.gate.draining_since is None:
            self._api.gate.drain()
        else:
            self.force_exit = self.should_exit
            self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._api.gate.is_drained


class HttpServer:
    """`run()` serves until a signal; or `start()` and `stop()`, also as a context manager. The service stays open.

    with HttpServer(service, ServerSettings(model="k3", port=0)) as server:
        print(server.url)
    """

    def __init__(
        self,
        service: MultimodalInferenceService,
        settings: ServerSettings,
        *,
        bound: socket.socket | None = None,
        copies: Copies | None = None,
    ) -> None:
        """`copies`: what the admin door changes; it stays open, too."""
        self.settings = settings
        self.api = Api(service, settings, copies)
        self._socket = bound
        self._thread: threading.Thread | None = None
        self._server = _Uvicorn(
            uvicorn.Config(
                self.api.app,
                http=connection_class(settings),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=CANCEL_S,
                limit_concurrency=settings.max_connections,
                h11_max_incomplete_event_size=settings.max_header,
            ),
            self.api,
        )

    @property
    def url(self) -> str:
        """Base address of the interface, to give to clients; they may knock from now on."""
        host, port = self._listening().getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"

    def run(self) -> None:
        """Serve in this thread until a signal. Raises DeploymentError where the address is taken."""
        try:
            self._server.run(sockets=[self._listening()])
        finally:
            self._close()

    def start(self) -> HttpServer:
        """Serve in a thread of its own. Raises DeploymentError where the address is taken."""
        bound = self._listening()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._server.serve(sockets=[bound])), name="workbench-http", daemon=True
        )
        self._thread.start()
        return self

    def stop(self, *, drain: bool = True) -> None:
        """End the thread; with `drain` after the requests under way, or when their time is over."""
        self.api.gate.drain()
        if not drain:
            self._server.should_exit = True
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._close()

    def __enter__(self) -> HttpServer:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop(drain=kind is None)

    def _listening(self) -> socket.socket:
        if self._socket is None:
            self._socket = bind_address(self.settings)
        self._socket.listen(BACKLOG)  # from here on a client waits instead of being turned away
        return self._socket

    def _close(self) -> None:
        self.api.close()
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def bind_address(settings: ServerSettings) -> socket.socket:
    """The socket of a server, so that a taken address is known before anything is loaded. Raises DeploymentError."""
    host, port = settings.host, settings.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise DeploymentError(
            f"cannot listen there: {error}", where=f"{host}:{port}", next_step="Choose another port"
        ) from None
    return bound


def log_to_stderr(level: int = logging.INFO) -> None:
    """Structured log lines of the server on standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    LOG.handlers[:] = [handler]
    LOG.setLevel(level)
    LOG.propagate = False
