"""One request from its fields to its last byte: whole or streamed, aborted as soon as nobody listens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Send

from workbench.serving.http.errors import api_error
from workbench.serving.http.fields import CommonFields
from workbench.serving.http.live import Choice, LiveAnswers
from workbench.serving.http.metrics import Metrics
from workbench.serving.http.prompts import Ask
from workbench.serving.http.replies import ChatForm, CompletionForm, ReplyForm, Written
from workbench.serving.http.settings import ServerSettings
from workbench.serving.service import MultimodalInferenceService

__all__ = ["Answering"]

Prepare = Callable[[], Awaitable[list[Ask]]]
SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies would hold the stream back
]


class Answering:
    """What one request asked for, ready to be answered once; `log` gets its figures."""

    def __init__(
        self,
        service: MultimodalInferenceService,
        metrics: Metrics,
        settings: ServerSettings,
        *,
        fields: CommonFields,
        form: type[ChatForm] | type[CompletionForm],
        with_logprobs: bool,
        log: dict[str, Any],
    ) -> None:
        self._service, self._metrics, self._settings = service, metrics, settings
        self._fields, self._form, self._with_logprobs, self._log = fields, form, with_logprobs, log
        self._has_begun = False

    async def run(self, request: Request, send: Send, prepare: Prepare) -> None:
        """Answer with the choices that `prepare` works out in a thread; end early where the client leaves.

        Raises what went wrong before the first byte; what goes wrong later is told in the stream.
        """
        work = asyncio.ensure_future(self._timed(request, send, prepare))
        gone = asyncio.ensure_future(_until_gone(request.receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self._log["gone"] = True
                return
            await work
        finally:
            for task in (work, gone):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await work

    async def _timed(self, request: Request, send: Send, prepare: Prepare) -> None:
        try:
            async with asyncio.timeout(self._settings.request_timeout_s):
                await self._answer(request, send, await prepare())
        except Exception as error:
            if not self._has_begun:
                raise
            told = api_error(error)
            self._log["error"] = f"{type(error).__name__}: {error}"
            await send({"type": "http.response.body", "body": _event(told.to_json()), "more_body": False})

    async def _answer(self, request: Request, send: Send, asks: list[Ask]) -> None:
        requests = {id(ask.request.token_ids): ask.request for ask in asks}.values()  # choices share their prompt
        form = self._form(
            id=("chatcmpl-" if self._form is ChatForm else "cmpl-") + secrets.token_hex(12),
            created=int(time.time()),
            model=self._settings.model,
            tokenizer=self._service.tokenizer,
            prompt_tokens=sum(len(each.token_ids) for each in requests),
            image_tokens=sum(each.num_image_tokens for each in requests),
            choices_per_prompt=self._fields.num_choices,
            with_logprobs=self._with_logprobs,
            with_usage=self._fields.include_usage,
        )
        live = LiveAnswers(self._service.engine, asks)
        try:
            if self._fields.stream:
                await self._stream(live, form, send)
            else:
                written = [Written() for _ in live.choices]
                async for choice, pieces in live.events():
                    written[choice.index].add(pieces)
                await JSONResponse(form.whole(live.choices, written))(request.scope, request.receive, send)
        finally:
            live.close()
            self._record(live, form)

    async def _stream(self, live: LiveAnswers, form: ReplyForm, send: Send) -> None:
        async def say(data: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        self._has_begun = True
        await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        for choice in live.choices:
            await say(b"".join(map(_event, self._counted(form, choice, form.opening(choice)))))
        async for choice, pieces in live.events():
            chunks = [form.delta(choice, piece) for piece in pieces]
            if choice.finish_reason is not None:
                chunks.append(form.closing(choice))
            # Nothing for long: a comment, so that nobody on the way takes the connection for dead.
            await say(b"".join(map(_event, self._counted(form, choice, chunks))) or b": waiting\n\n")
        if self._fields.include_usage:
            await say(_event(form.usage(live.choices)))
        await say(b"data: [DONE]\n\n", more=False)

    def _counted(self, form: ReplyForm, choice: Choice, chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The chunks, each with its choice's tokens so far where that was asked for."""
        if not self._fields.running_usage:
            return chunks
        return [{**chunk, "usage": form.usage([choice])["usage"]} for chunk in chunks]

    def _record(self, live: LiveAnswers, form: ChatForm | CompletionForm) -> None:
        completion = sum(choice.num_tokens for choice in live.choices)
        self._metrics.prompt_tokens.inc(form.prompt_tokens)
        self._metrics.image_tokens.inc(form.image_tokens)
        self._metrics.completion_tokens.inc(completion)
        firsts = []
        for choice in live.choices:
            self._metrics.answered(submitted_s=live.submitted_s, token_times=choice.token_times)
            firsts += choice.token_times[:1]
        self._log.update(
            model=self._settings.model,
            stream=bool(self._fields.stream),
            prompt_tokens=form.prompt_tokens,
            image_tokens=form.image_tokens,
            completion_tokens=completion,
            first_token_s=round(min(firsts) - live.submitted_s, 6) if firsts else None,
            finish=[choice.finish_reason for choice in live.choices],
        )


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(content: dict[str, Any]) -> bytes:
    return (
        b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n\n"
    )
