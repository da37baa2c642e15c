"""Errors as clients of the OpenAI interface expect them, and what each error of ours becomes.

The text of an error about the request goes to whoever sent it. The text of an error of the machine stays in the log:
it may hold paths and lines of other processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse, Response

from workbench.base import (
    ChangeUnderWayError,
    DeploymentError,
    ImageError,
    ModelRestartingError,
    NoRoomError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    RequestFailedError,
    short_repr,
)

__all__ = ["ApiError", "api_error", "error_response"]

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer with an error: HTTP status, text, a code for programs, and the parameter at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> Mapping[str, str]:
        headers = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        return {**headers, "www-authenticate": "Bearer"} if self.status == 401 else headers

    def to_json(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def api_error(error: BaseException, *, retry_after_s: int = 1) -> ApiError:
    """What a client is told of any error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, "too many requests wait already", code="queue_full", retry_after_s=retry_after_s)
    if isinstance(error, ImageError):
        return ApiError(400, str(error), code="invalid_image", param="messages")
    if isinstance(error, PromptTooLongError):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, ChangeUnderWayError):
        return ApiError(409, str(error), code="change_under_way", retry_after_s=retry_after_s)
    if isinstance(error, RequestError):
        return ApiError(400, str(error), code="invalid_value")
    if isinstance(error, ValidationError):
        return invalid_fields(error)
    if isinstance(error, TimeoutError):
        return ApiError(504, "the answer took longer than the server allows", code="timeout")
    if isinstance(error, RequestFailedError):
        return ApiError(500, "the model failed on this request", code="request_failed")
    if isinstance(error, ModelRestartingError):
        text = "the model is starting again after a failure"
        return ApiError(503, text, code="model_restarting", retry_after_s=retry_after_s)
    if isinstance(error, NoRoomError):  # told to holders of an admin key alone, who are to see the numbers
        return ApiError(422, str(error), code="insufficient_memory")
    if isinstance(error, DeploymentError):
        return ApiError(
            503, f"the model is not available: {type(error).__name__}", code="model_failed", retry_after_s=retry_after_s
        )
    return ApiError(500, "the server failed on this request", code="internal_error")


def invalid_fields(error: ValidationError) -> ApiError:
    """The complaint that went deepest: where a field may have several forms, it is about the form that was meant."""
    deepest = max(error.errors(include_url=False, include_context=False), key=lambda each: len(each["loc"]))
    # Names of alternatives in a path are the validator's own, not the client's.
    steps = [step for step in deepest["loc"] if isinstance(step, int) or (step.isidentifier() and step != "str")]
    path = ".".join(map(str, steps))
    found = short_repr(deepest["input"]) if deepest["type"] != "missing" else "nothing"
    return ApiError(400, f"{path}: {deepest['msg']} (found {found})", code="invalid_value", param=path or None)


def error_response(error: ApiError) -> Response:
    return JSONResponse(error.to_json(), error.status, headers=dict(error.headers))
