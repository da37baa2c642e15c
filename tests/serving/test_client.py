"""What a client of a server is told where the address, the key or the server is not what it should be."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from workbench.base import DeploymentError, RequestError
from workbench.serving.client import RemoteService, read_api_key

pytestmark = pytest.mark.timeout(60)


@contextmanager
def saying(body: bytes) -> Iterator[str]:
    """Address of a server that answers every GET with `body`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    "url",
    [
        *("http://host:99999/v1", "http://host:port/v1", "http://host:0/v1", "http://[::1/v1"),
        *("http://host/vé", "http:///v1", "ftp://host/v1", "host:8000"),
    ],
)
def test_what_is_no_address_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(RequestError, match="not the address of a server"):
        RemoteService(url)


def test_a_host_that_cannot_be_called_so_is_one_that_cannot_be_reached() -> None:
    with pytest.raises(DeploymentError, match="cannot be reached"):
        RemoteService("http://a..b/v1")


@pytest.mark.parametrize(
    "body", [b"<html>", b"", b"\xff", b"[1]", b"7", b'{"data": 5}', b'{"data": null}', b'{"data": [3]}']
)
def test_a_page_that_is_no_list_of_models_is_an_error_of_the_server(body: bytes) -> None:
    with saying(body) as url, pytest.raises(DeploymentError, match="sent no list of models"):
        RemoteService(url)


def test_the_first_model_of_a_list_is_asked_and_an_empty_one_is_told() -> None:
    with saying(b'{"data": [{"id": "one"}, {"id": "two"}]}') as url:
        assert RemoteService(url).model == "one"
    with saying(b'{"data": []}') as url, pytest.raises(DeploymentError, match="offers no model"):
        RemoteService(url)


@pytest.mark.parametrize("key", ["a-sécret-key-of-somebody", "two\nlines-of-a-key"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(RequestError, match="not a usable API key") as caught:
        RemoteService("http://127.0.0.1:9/v1", api_key=key, model="m")
    assert key[:5] not in str(caught.value)


def test_a_file_that_holds_no_key_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "key"
    with pytest.raises(RequestError, match="FileNotFoundError"):
        read_api_key(file)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RequestError, match="UnicodeDecodeError"):
        read_api_key(file)
    file.write_text("holder:key-of-somebody\n")
    assert read_api_key(file) == "key-of-somebody"
