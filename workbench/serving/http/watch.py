"""Around every request: an id, a line in the log, figures, and an answer even where a handler fails.

Log lines are JSON. They never hold what was asked or answered, nor keys.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from workbench.serving.http.errors import ApiError, api_error, error_response
from workbench.serving.http.metrics import Metrics
from workbench.serving.http.telemetry import record_span

__all__ = ["LOG", "JsonLines", "Watched"]

LOG = logging.getLogger("workbench.http")
SAFE_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
MAX_HEADERS = 100
GONE = 499  # the client left before there was an answer


class JsonLines(logging.Formatter):
    """A log record as one line: time, level, event, and the fields given as `extra={"fields": {...}}`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class Watched:
    """Wraps the application. `scope["state"]["log"]` is a dict whose entries go into the request's log line."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        *,
        routes: frozenset[str],
        max_header: int,
        is_draining: Callable[[], bool],
    ) -> None:
        self._app, self._metrics, self._routes = app, metrics, routes
        self._max_header, self._is_draining = max_header, is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = given.decode() if SAFE_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        fields: dict[str, Any] = {}
        scope.setdefault("state", {}).update(request_id=request_id, log=fields)
        route = scope["path"] if scope["path"] in self._routes else "other"
        status, start = 0, time.perf_counter()

        async def send_watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                more = [(b"x-request-id", request_id.encode()), (b"x-content-type-options", b"nosniff")]
                if self._is_draining():
                    more.append((b"connection", b"close"))
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            await send(message)

        level = logging.INFO
        try:
            self._check_headers(scope)
            await self._app(scope, receive, send_watched)
        except Exception as error:
            told = api_error(error)
            level = logging.ERROR if told.status >= 500 else logging.INFO
            # What is wrong with a request may quote it, so only errors of the machine are spelled out.
            fields["error"] = f"{type(error).__name__}: {error}" if told.status >= 500 else told.code
            if told.status == 500:
                LOG.error("failed", exc_info=error, extra={"fields": {"request_id": request_id}})
            if status:
                raise  # too late for another answer: the connection is closed
            await error_response(told)(scope, receive, send_watched)
        finally:
            seconds = time.perf_counter() - start
            self._metrics.requests.labels(route, str(status or GONE)).inc()
            self._metrics.seconds.labels(route).observe(seconds)
            # Paths come from anybody, so only known ones are spelled out in full.
            base = {"request_id": request_id, "method": scope["method"], "path": scope["path"][:200]}
            line = {**base, "status": status or GONE, "seconds": round(seconds, 6), **fields}
            LOG.log(level, "request", extra={"fields": line})
            name = f"{scope['method']} {route}"
            record_span(name, scope["headers"], seconds=seconds, fields=line, is_failure=status >= 500)

    def _check_headers(self, scope: Scope) -> None:
        size = sum(len(name) + len(value) + 4 for name, value in scope["headers"]) + len(scope.get("raw_path") or b"")
        if size + len(scope["query_string"]) > self._max_header or len(scope["headers"]) > MAX_HEADERS:
            raise ApiError(431, "the headers are too large", code="headers_too_large")
