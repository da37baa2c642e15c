"""Pictures of a request: bytes inside it, or from sites that the operator has allowed. Never a file of this machine."""

from __future__ import annotations

import base64
import binascii
import re
import urllib.request
from urllib.parse import urlsplit

from workbench.base import short_repr
from workbench.serving.http.errors import ApiError

__all__ = ["read_image"]

DATA_URI = re.compile(r"data:image/[a-z0-9.+-]{1,40};base64,", re.IGNORECASE)
MAX_URL = 4096
FETCH_TIMEOUT_S = 10.0
MAX_FETCH_BYTES = 32 << 20


def read_image(url: str, *, origins: tuple[str, ...] = ()) -> bytes:
    """The file that `url` stands for. Raises ApiError for anything but a data URI or an allowed site, for bad base64,
    and where the site does not deliver.

    A site that sends elsewhere is not followed: the other place was not allowed.
    """
    if head := DATA_URI.match(url):
        try:
            return base64.b64decode(url[head.end() :], validate=True)
        except (binascii.Error, ValueError):
            raise ApiError(400, "the data URI is not base64", code="invalid_image", param="messages") from None
    if len(url) > MAX_URL or not url.isprintable() or _origin(url) not in origins:
        raise ApiError(
            400,
            f"pictures are taken as data URIs (data:image/png;base64,...), not from {short_repr(url)}",
            code="invalid_image_url",
            param="messages",
        )
    return _fetch(url)


def _origin(url: str) -> str | None:
    try:
        parts = urlsplit(url)
    except ValueError:  # such as half an IPv6 address
        return None
    return f"{parts.scheme}://{parts.netloc}".lower()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: object, **kwargs: object) -> None:
        return None


def _fetch(url: str) -> bytes:
    # No handlers but these: the standard ones also know files, FTP and proxies.
    opener = urllib.request.OpenerDirector()
    for handler in (urllib.request.HTTPHandler, urllib.request.HTTPSHandler, urllib.request.HTTPErrorProcessor):
        opener.add_handler(handler())
    opener.add_handler(urllib.request.HTTPDefaultErrorHandler())
    opener.add_handler(_NoRedirect())
    try:
        with opener.open(url, timeout=FETCH_TIMEOUT_S) as response:
            data: bytes = response.read(MAX_FETCH_BYTES + 1)
    except (OSError, ValueError) as error:  # URLError and HTTPError are OSErrors
        raise ApiError(400, f"the picture could not be fetched: {error}"[:200], code="invalid_image_url") from None
    if len(data) > MAX_FETCH_BYTES:
        raise ApiError(400, f"the picture is larger than {MAX_FETCH_BYTES:,} bytes", code="invalid_image")
    return data
