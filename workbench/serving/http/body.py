"""Reading a request's body: bounded in bytes and in time, then strict JSON."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from workbench.serving.http.errors import ApiError

__all__ = ["parse_object", "read_body"]

MAX_ELEMENTS = 2_000_000


async def read_body(request: Request, *, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body. Raises ApiError for one that is too large, too slow, compressed or not announced as JSON.

    The kind is insisted on because a browser may send other kinds to this machine from any page without asking.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"content-type must be application/json, not {kind[:80]!r}", code="unsupported_media_type")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "compressed bodies are not taken", code="unsupported_media_type")
    too_large = ApiError(413, f"the request is larger than {max_bytes:,} bytes", code="request_too_large")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 15 or int(length) > max_bytes):
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"the request did not arrive within {timeout_s:g} s", code="request_timeout") from None
    except ClientDisconnect:
        raise ApiError(400, "the request ended early", code="incomplete") from None
    return bytes(body)


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises ApiError for anything else, NaN and endless nesting included."""
    # Each element costs far more as an object than as text, so elements are counted before there are objects.
    num_elements = body.count(b",") + body.count(b"[") + body.count(b"{")
    if num_elements > MAX_ELEMENTS:
        raise ApiError(413, f"the body has more than {MAX_ELEMENTS:,} elements", code="request_too_large")
    try:
        content = json.loads(body, parse_constant=_no_number)
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
    except ValueError as error:  # also for bytes that are no UTF-8, and for numbers of thousands of digits
        raise ApiError(400, f"the body is not JSON: {error}"[:300], code="invalid_json") from None
    if not isinstance(content, dict):
        raise ApiError(400, "the body is not a JSON object", code="invalid_json")
    return content


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
