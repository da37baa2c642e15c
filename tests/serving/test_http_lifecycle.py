"""Clients that leave, stall or crowd, and a server that ends: nothing hangs, nothing leaks, answers are finished."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace

import pytest

pytest.importorskip("uvicorn")

from http_served import CHAT, ask, said, served, until
from serving_fakes import EchoRunner, ScriptRunner

from workbench.base import ConfigError, DeploymentError, WorkerDiedError
from workbench.serving.http import ServerSettings, bind_address, read_api_keys
from workbench.serving.http.errors import ApiError
from workbench.serving.http.gate import MAX_BUCKETS, Buckets, Gate
from workbench.serving.http.settings import key_digest

pytestmark = pytest.mark.timeout(120)


def slow_runner(**options) -> ScriptRunner:
    runner = ScriptRunner([97], **options)
    runner.gate = lambda: time.sleep(0.002)
    return runner


def request_bytes(body: bytes, path: str = CHAT, *, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    lines = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {size}"]
    head = "\r\n".join([*lines, "", ""])
    return head.encode() + body


STREAM = b'{"model":"k3","messages":[{"role":"user","content":"hi"}],"stream":true,"max_tokens":4000}'
WHOLE = b'{"model":"k3","messages":[{"role":"user","content":"hi"}],"max_tokens":4000}'


# clients that leave


@pytest.mark.parametrize("body", [STREAM, WHOLE], ids=["stream", "whole"])
def test_a_client_that_leaves_is_noticed_once_and_its_slot_is_free(body):
    with served(slow_runner(num_slots=1)) as server:
        connection = server.raw(request_bytes(body))
        until(lambda: server.service.stats().num_running == 1)
        if body is STREAM:
            assert connection.recv(10)
        connection.close()
        until(server.is_idle)
        assert server.service.stats().num_aborted == 1
        assert server.post(ask(max_tokens=2)).status == 200
        assert server.service.stats().num_aborted == 1, "an answer that ended by itself is not aborted"


def test_a_client_that_leaves_while_it_waits_for_a_slot_leaves_the_line():
    with served(slow_runner(num_slots=1)) as server:
        first = server.raw(request_bytes(STREAM))
        until(lambda: server.service.stats().num_running == 1)
        second = server.raw(request_bytes(WHOLE))
        until(lambda: server.service.stats().num_waiting == 1)
        second.close()
        until(lambda: server.service.stats().num_waiting == 0)
        first.close()


def test_a_reader_that_takes_nothing_is_cut_off():
    class WordyRunner(ScriptRunner):
        def step(self, inputs):
            return [[replace(token, top=((300, -1.5),) * 20) for token in row] for row in super().step(inputs)]

    runner = WordyRunner([300])
    runner.gate = lambda: time.sleep(0.004)
    with served(runner, write_timeout_s=0.3) as server:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(request_bytes(STREAM.replace(b"true", b'true,"n":3,"logprobs":true,"top_logprobs":20')))
        until(lambda: server.service.stats().num_running > 0)
        until(server.is_idle, limit_s=60)
        assert server.service.stats().num_aborted == 3
        connection.close()


# slow and broken senders


@pytest.mark.parametrize(
    "data", [b"", b"POST /v1/chat/comple", request_bytes(b"")[:-6]], ids=["nothing", "line", "headers"]
)
def test_headers_that_do_not_come_end_the_connection(data):
    with (
        served(said("ok"), header_timeout_s=100.0) as patient,
        served(said("ok"), header_timeout_s=0.3) as server,
    ):
        kept, connection = patient.raw(data), server.raw(data)
        assert connection.recv(100) == b""
        kept.setblocking(False)
        with pytest.raises(BlockingIOError):  # still open, though it came first: the limit is the one that was set
            kept.recv(100)
        kept.close()
        assert server.post(ask()).status == 200


def test_a_body_that_does_not_come_is_answered_with_a_timeout():
    with served(said("ok"), body_timeout_s=0.3) as server:
        connection = server.raw(request_bytes(b'{"model"', length=500))
        assert b" 408 " in connection.recv(4096).splitlines()[0]
        connection.close()


def test_a_body_that_ends_early_frees_its_place():
    with served(said("ok")) as server:
        server.raw(request_bytes(b'{"model"', length=500)).close()
        until(lambda: server.server.api.gate.num_inside == 0)
        assert server.post(ask()).status == 200


def test_a_connection_takes_one_request_after_another():
    with served(said("ok")) as server:
        connection = server.connect()
        for _ in range(3):
            connection.request("GET", "/health")
            assert connection.getresponse().read() == b'{"status":"ok"}'
        connection.close()


# crowds


def test_more_than_fit_are_told_when_to_come_back_and_come_back():
    with served(slow_runner(num_slots=1), max_waiting=1) as server:
        held = [server.raw(request_bytes(STREAM)) for _ in range(2)]
        until(lambda: server.service.stats().num_waiting == 1)
        got = server.post(ask())
        assert (got.status, got.error["code"]) == (429, "queue_full")
        assert 1 <= int(got.headers["retry-after"]) <= 60
        assert server.get("/health").status == 200
        for connection in held:
            connection.close()
        until(server.is_idle)
        assert server.post(ask(max_tokens=1)).status == 200


def test_a_holder_of_a_key_has_a_rate_and_does_not_use_up_that_of_others():
    keys = {key_digest("a" * 16): "alice", key_digest("b" * 16): "bob"}
    with served(said("ok"), api_keys=keys, requests_per_minute=8) as server:
        statuses = [server.post(ask(), authorization=f"Bearer {'a' * 16}").status for _ in range(3)]
        got = server.post(ask(), authorization=f"Bearer {'a' * 16}")
        assert statuses == [200, 200, 429]
        assert got.error["code"] == "rate_limit_exceeded"
        assert 1 <= int(got.headers["retry-after"]) <= 8
        assert server.post(ask(), authorization=f"Bearer {'b' * 16}").status == 200


def test_a_bucket_fills_with_time_and_the_table_of_buckets_is_bounded():
    now = [0.0]
    buckets = Buckets(60, clock=lambda: now[0])
    assert [buckets.take("x") for _ in range(15)] == [0.0] * 15
    assert buckets.take("x") == pytest.approx(1.0)
    now[0] = 1.5
    assert buckets.take("x") == 0.0
    assert buckets.take("x") == pytest.approx(0.5)
    for i in range(MAX_BUCKETS + 100):
        buckets.take(f"made-up-{i}")
    assert len(buckets._buckets) == MAX_BUCKETS


def test_the_time_to_come_back_follows_the_requests_inside():
    now = [0.0]
    gate = Gate(ServerSettings(model="k3", max_waiting=100), num_slots=2, clock=lambda: now[0])
    for _ in range(60):
        with gate.place("x"):
            now[0] += 10.0
    assert gate.retry_after_s == 1, "nobody is inside"
    gate.num_inside = 7
    assert gate.retry_after_s == pytest.approx(35, abs=2)
    gate.num_inside = gate.capacity
    with pytest.raises(ApiError), gate.place("x"):
        pass


# failures of the machine


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_rank_is_told_to_the_requests_in_flight_and_shows_in_health(stream):
    runner = EchoRunner()
    go = threading.Event()

    def gate() -> None:
        if len(runner.steps) == 3:
            go.wait(10)
            raise WorkerDiedError("rank 1 died", where="/work/secret/path", found="SIGKILL")

    runner.gate = gate
    with served(runner) as server:
        connection = server.connect()
        body = STREAM if stream else WHOLE
        connection.request("POST", CHAT, body, {"content-type": "application/json"})
        go.set()
        response = connection.getresponse()
        said_ = response.read().decode()
        assert response.status == (200 if stream else 503)
        assert '"code":"model_failed"' in said_
        assert "WorkerDiedError" in said_
        assert "secret" not in said_, "what a rank said stays in the log"
        assert "[DONE]" not in said_
        connection.close()
        assert server.post(ask()).status == 503
        assert (server.get("/health").status, server.get("/ready").json) == (503, {"status": "failed"})


def test_an_answer_that_takes_too_long_is_ended_and_its_slot_freed():
    with served(slow_runner(), request_timeout_s=0.3) as server:
        got = server.post(WHOLE)
        assert (got.status, got.error["code"]) == (504, "timeout")
        stream = server.post(STREAM)
        assert stream.status == 200
        assert b'"code":"timeout"' in stream.body
        until(server.is_idle)
        assert server.service.stats().num_aborted == 2


# the end


def test_stopping_lets_answers_finish_and_refuses_new_ones():
    runner = slow_runner()
    with served(runner, drain_timeout_s=100) as server:
        waiting = server.connect()
        waiting.connect()  # accepted before the end begins
        answers: list[object] = []
        client = threading.Thread(target=lambda: answers.append(server.post(ask(max_tokens=150, stream=True))))
        client.start()
        until(lambda: server.service.stats().num_running == 1)
        server.server.api.gate.drain()
        assert server.get("/ready").json == {"status": "draining"}
        got = server.post(ask())
        assert (got.status, got.error["code"], got.headers["connection"]) == (503, "draining", "close")
        assert int(got.headers["retry-after"]) > 0
        client.join(100)
        assert answers[0].text == "a" * 150
        waiting.close()


def test_a_stop_does_not_wait_for_ever_for_an_answer():
    runner = slow_runner()
    with served(runner, drain_timeout_s=0.2) as server:
        connection = server.raw(request_bytes(STREAM))
        until(lambda: server.service.stats().num_running == 1)
        server.server.stop()
        until(lambda: server.service.stats().num_aborted == 1)  # given up, and not waited for
        connection.close()


def test_a_signal_drains_and_what_runs_around_the_server_ends_in_order(tmp_path):
    code = f"""
    import sys, time
    sys.path.insert(0, {str(os.path.dirname(__file__))!r})
    from http_served import *
    runner = ScriptRunner([97]); runner.gate = lambda: time.sleep(0.005)
    service = MultimodalInferenceService(runner, TOKENIZER)
    try:
        with service:
            server = HttpServer(service, ServerSettings(model="k3", port=0))
            print(server.url, flush=True)
            server.run()
    finally:
        print("closed in order", flush=True)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    try:
        port = int(process.stdout.readline().strip().removesuffix("/v1").rpartition(":")[2])
        connection = socket.create_connection(("127.0.0.1", port), timeout=30)
        connection.sendall(request_bytes(STREAM.replace(b"4000", b"200")))
        first = connection.recv(200)
        process.send_signal(signal.SIGTERM)
        rest = first
        while data := connection.recv(1 << 16):
            rest += data
        assert b"[DONE]" in rest, "the answer under way was given to its end"
        out, _ = process.communicate(timeout=30)
        assert (process.returncode, out.strip()) == (0, "closed in order")
    finally:
        process.kill()


def test_a_taken_address_is_an_error_that_says_so():
    with served(said("ok")) as server, pytest.raises(DeploymentError, match=r"cannot listen.*Choose another port"):
        bind_address(ServerSettings(model="k3", port=server.port))


# settings


def test_keys_are_read_by_line_and_kept_as_digests(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"# ours\nalice: {'a' * 16}\n\n{'b' * 20}\n")
    assert read_api_keys(path) == {key_digest("a" * 16): "alice", key_digest("b" * 20): "key-4"}


@pytest.mark.parametrize(
    "text", ["", "# none", "alice:short", "alice:" + "ä" * 16, "x:" + "a" * 16 + "\ny:" + "a" * 16]
)
def test_an_unusable_key_file_is_refused_without_showing_a_key(tmp_path, text):
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_api_keys(path)
    assert "aaaa" not in str(caught.value)
    assert "short" not in str(caught.value).replace("too short", "")


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": ""},
        {"port": 70_000},
        {"max_body": 0},
        {"write_timeout_s": 0},
        {"requests_per_minute": 0},
        {"image_origins": ("file:///",)},
        {"image_origins": ("https://a.org/path",)},
    ],
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError):
        ServerSettings(**{"model": "k3", **wrong})
