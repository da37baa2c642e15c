"""The routes: which request is read how, and who answers it.

    POST /v1/chat/completions   POST /v1/completions     with a key, where keys are set
    GET  /v1/models             GET  /v1/models/NAME     with a key, where keys are set
    GET  /health                the process lives and its engine has not failed
    GET  /ready                 it takes requests: not while it shuts down or its model starts again
    GET  /metrics               figures for Prometheus
    GET  /admin/copies          POST /admin/copies       with an admin key; see `admin`

Nothing slow runs on the event loop: bodies are parsed, texts cut into tokens and pictures decoded in threads, pictures
in others than texts, so that neither health checks nor plain questions wait behind them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from workbench.serving.copies import Copies
from workbench.serving.fleet import Fleet
from workbench.serving.http.admin import COPIES, AdminDoor
from workbench.serving.http.answering import Answering
from workbench.serving.http.body import parse_object, read_body
from workbench.serving.http.errors import ApiError
from workbench.serving.http.fields import ChatFields, CommonFields, CompletionFields
from workbench.serving.http.gate import Gate
from workbench.serving.http.metrics import Metrics
from workbench.serving.http.prompts import has_images, prepare_chat, prepare_completion
from workbench.serving.http.replies import ChatForm, CompletionForm
from workbench.serving.http.settings import ServerSettings
from workbench.serving.http.watch import Watched
from workbench.serving.service import MultimodalInferenceService

__all__ = ["Api"]

Result = TypeVar("Result")
AnyFields = TypeVar("AnyFields", ChatFields, CompletionFields)
Handler = Callable[[Request, Send], Coroutine[Any, Any, None]]
MODELS = "/v1/models"


class Api:
    """The interface over a service that is running; `app` is what a server runs. `close` ends its threads."""

    def __init__(
        self, service: MultimodalInferenceService, settings: ServerSettings, copies: Copies | None = None
    ) -> None:
        self.service, self.settings = service, settings
        info, engine = service.model.info, service.engine
        fleet = engine if isinstance(engine, Fleet) else None
        self._copies = copies or fleet
        self.gate = Gate(
            settings, num_slots=info.num_slots * info.dp if fleet is None else lambda: max(1, fleet.num_slots)
        )
        self.metrics = Metrics(engine, self.gate, self._copies)
        self._created = int(time.time())
        self._texts = ThreadPoolExecutor(settings.prepare_threads, "workbench-text")
        self._pictures = ThreadPoolExecutor(settings.prepare_threads, "workbench-picture")
        self._handlers: dict[str, Mapping[str, Handler]] = {
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/completions": {"POST": self._completion},
            MODELS: {"GET": self._models},
            "/health": {"GET": self._health},
            "/ready": {"GET": self._ready},
            "/metrics": {"GET": self._metrics},
            COPIES: AdminDoor(self.gate, copies).handlers,
        }
        self.app: ASGIApp = Watched(
            self._dispatch,
            self.metrics,
            routes=frozenset(self._handlers),
            max_header=settings.max_header,
            is_draining=lambda: self.gate.draining_since is not None,
        )

    def close(self) -> None:
        for pool in (self._texts, self._pictures):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, request = scope["path"], Request(scope, receive)
        if path.startswith(f"{MODELS}/"):
            path = MODELS
        if path not in self._handlers:
            raise ApiError(404, "no such path", code="not_found")
        handlers = self._handlers[path]
        handler = handlers.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            raise ApiError(405, f"this path takes {' and '.join(handlers)}", code="method_not_allowed")
        await handler(request, send)

    async def _chat(self, request: Request, send: Send) -> None:
        with self._place(request):
            fields = await self._fields(request, ChatFields)
            pool = self._pictures if has_images(fields) else self._texts
            work = partial(prepare_chat, fields, self.service, self.settings, tenant=request.state.log["key"] or "")
            answering = self._answering(request, fields, ChatForm, with_logprobs=bool(fields.logprobs))
            await answering.run(request, send, partial(_in_thread, pool, work))

    async def _completion(self, request: Request, send: Send) -> None:
        with self._place(request):
            fields = await self._fields(request, CompletionFields)
            work = partial(
                prepare_completion, fields, self.service, self.settings, tenant=request.state.log["key"] or ""
            )
            answering = self._answering(request, fields, CompletionForm, with_logprobs=fields.logprobs is not None)
            await answering.run(request, send, partial(_in_thread, self._texts, work))

    def _answering(
        self,
        request: Request,
        fields: CommonFields,
        form: type[ChatForm] | type[CompletionForm],
        *,
        with_logprobs: bool,
    ) -> Answering:
        return Answering(
            self.service,
            self.metrics,
            self.settings,
            fields=fields,
            form=form,
            with_logprobs=with_logprobs,
            log=request.state.log,
        )

    async def _models(self, request: Request, send: Send) -> None:
        self.gate.holder(request.headers.get("authorization"))
        name = request.url.path.removeprefix(MODELS).removeprefix("/")
        entry = {
            "id": self.settings.model,
            "object": "model",
            "created": self._created,
            "owned_by": "workbench",
            "max_model_len": self.service.model.info.max_tokens,
        }
        if name:
            self._check_model(name)
        content = entry if name else {"object": "list", "data": [entry]}
        await self._say(JSONResponse(content), request, send)

    async def _health(self, request: Request, send: Send) -> None:
        status = self._engine_status()
        content = {"status": status, **self._num_copies()}
        await self._say(JSONResponse(content, 503 if status == "failed" else 200), request, send)

    async def _ready(self, request: Request, send: Send) -> None:
        if self.gate.draining_since is not None:
            status = "draining"
        else:
            status = self._engine_status().replace("ok", "ready")
        content = {"status": status, **self._num_copies()}
        await self._say(JSONResponse(content, 200 if status == "ready" else 503), request, send)

    def _num_copies(self) -> dict[str, object]:
        """Copies by state, where there may be several."""
        return {} if self._copies is None else {"copies": self._copies.num_by_state()}

    def _engine_status(self) -> str:
        if self.service.engine.is_recovering:
            return "restarting"
        return "failed" if self.service.engine.error is not None else "ok"

    async def _metrics(self, request: Request, send: Send) -> None:
        text = Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
        await self._say(text, request, send)

    async def _say(self, response: Response, request: Request, send: Send) -> None:
        await response(request.scope, request.receive, send)

    def _place(self, request: Request) -> AbstractContextManager[None]:
        holder = self.gate.holder(request.headers.get("authorization"))
        request.state.log["key"] = holder
        address = request.client.host if request.client is not None else "unknown"
        return self.gate.place(holder or address)

    async def _fields(self, request: Request, kind: type[AnyFields]) -> AnyFields:
        limits = self.settings
        body = await read_body(request, max_bytes=limits.max_body, timeout_s=limits.body_timeout_s)

        def parse() -> AnyFields:
            return kind.model_validate(parse_object(body))

        fields = await _in_thread(self._texts, parse)
        if fields.model is not None:
            self._check_model(fields.model)
        return fields

    def _check_model(self, name: str) -> None:
        if name != self.settings.model:
            raise ApiError(404, f"no model {name[:80]!r} here", code="model_not_found", param="model")


async def _in_thread(pool: ThreadPoolExecutor, work: Callable[[], Result]) -> Result:
    return await asyncio.get_running_loop().run_in_executor(pool, work)
