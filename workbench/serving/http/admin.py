"""The admin door: how many copies of the model there are, and changing that while requests come.

    GET  /admin/copies                  what is there, what is under way, why the last change failed
    POST /admin/copies {"copies": 3}    202 and the same; the change goes on in the background

Only with an admin key (`ServerSettings.admin_keys`), which lets in nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Send

from workbench.serving.copies import Copies
from workbench.serving.http.body import parse_object, read_body
from workbench.serving.http.errors import ApiError
from workbench.serving.http.gate import Gate

__all__ = ["COPIES", "AdminDoor"]

COPIES = "/admin/copies"
MAX_BODY, BODY_TIMEOUT_S = 4096, 10.0


class CopiesFields(BaseModel):
    """A misspelt field would leave things as they are and look like a success, so unknown ones are refused here."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    copies: Annotated[int, Field(ge=1)]


class AdminDoor:
    """`copies` None: the door is there, and nothing is behind it."""

    def __init__(self, gate: Gate, copies: Copies | None) -> None:
        self._gate, self._copies = gate, copies

    @property
    def handlers(self) -> dict[str, Callable[[Request, Send], Coroutine[Any, Any, None]]]:
        """By method, for the path COPIES."""
        return {"GET": self._look, "POST": self._change}

    async def _look(self, request: Request, send: Send) -> None:
        copies = self._let_in(request)
        await self._say(copies, 200, request, send)

    async def _change(self, request: Request, send: Send) -> None:
        copies = self._let_in(request)
        if self._gate.draining_since is not None:
            raise ApiError(503, "the server is shutting down", code="draining")
        body = await read_body(request, max_bytes=MAX_BODY, timeout_s=BODY_TIMEOUT_S)
        fields = CopiesFields.model_validate(parse_object(body))
        request.state.log["copies"] = fields.copies
        # Whether there is room is asked of ranks and devices, which may take a step of the model.
        is_begun = await asyncio.to_thread(copies.change, fields.copies)
        await self._say(copies, 202 if is_begun else 200, request, send)

    def _let_in(self, request: Request) -> Copies:
        request.state.log["key"] = self._gate.admin(request.headers.get("authorization"))
        if self._copies is None:
            raise ApiError(404, "the number of copies of this server is fixed", code="not_found")
        return self._copies

    async def _say(self, copies: Copies, status: int, request: Request, send: Send) -> None:
        response = JSONResponse(copies.state.to_json(), status)
        await response(request.scope, request.receive, send)
