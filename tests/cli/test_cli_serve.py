"""serve and chat as commands: a server of its own, asked by a client and by the terminal, and ended by a signal."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from workbench.base import RequestError
from workbench.cli.terminal import Terminal
from workbench.serving import Answer, Timings, Usage
from workbench.serving.client import RemoteService

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "data" / "k3-tiny"
HOUSE = ROOT / "data" / "images" / "house.png"
KEY = "a-key-for-the-tests"

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, subprocess.Popen[str], Path]]:
    """Address, process and log of `workbench serve`; ended at the latest with the tests."""
    root = tmp_path_factory.mktemp("serve")
    keys, log = root / "keys", root / "log"
    keys.write_text(f"tests:{KEY}\n")
    command = ["serve", str(TINY), "--port", "0", "--json", "--precision", "fp32", "--slots", "2"]
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "workbench.cli", *command, "--api-key-file", str(keys), "--model-name", "tiny"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, log.read_text()
        yield json.loads(line)["url"], process, log
    finally:
        process.kill()
        process.wait()


@pytest.mark.ranks
def test_a_served_checkpoint_answers_a_client_and_the_terminal_and_ends_on_a_signal(
    served, tmp_path, call: Call
) -> None:
    url, process, log = served
    service = RemoteService(url, api_key=KEY)
    assert service.models() == ["tiny"]
    reply = service.stream("What is a shard?", [HOUSE], max_tokens=6)
    text = "".join(reply)
    assert reply.answer is not None
    assert reply.answer.text == text
    assert reply.answer.usage.completion_tokens == 6
    assert reply.answer.usage.image_tokens > 0
    assert reply.answer.finish_reason == "length"
    with pytest.raises(RequestError, match="API key"):
        RemoteService(url)

    key = tmp_path / "key"
    key.write_text(KEY)
    done = subprocess.run(
        [sys.executable, "-m", "workbench.cli", "chat", url, "--api-key-file", str(key), "--max-tokens", "4", "--json"],
        cwd=ROOT,
        input=f"/image {HOUSE}\nWhat is it?\nAnd now?\n",
        capture_output=True,
        text=True,
        timeout=120,
    )
    first, second = map(json.loads, done.stdout.splitlines())
    assert done.returncode == 0, done.stderr
    assert first["usage"]["image_tokens"] == second["usage"]["image_tokens"] > 0
    assert second["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"]

    with urllib.request.urlopen(url.removesuffix("/v1") + "/ready", timeout=30) as response:
        copies = {"ready": 1, "restarting": 0, "failed": 0, "leaving": 0, "starting": 0}
        assert json.load(response) == {"status": "ready", "copies": copies}
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    assert {line.get("key") for line in lines if line.get("status") == 200} >= {"tests"}
    assert KEY not in log.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--host", "0.0.0.0"), "lets other machines in"),
        (("--port", "70000"), "port"),
        (("--image-origin", "example.org"), "not the origin of a site"),
        (("--api-key-file", os.devnull), "not a"),
        (("--max-waiting", "-1"), "limit"),
        (("--copies", "65"), "at most 64"),
    ],
)
def test_what_cannot_be_served_is_refused_before_the_weights_are_loaded(
    monkeypatch, call: Call, arguments, words
) -> None:
    from workbench.deployment import Deployment

    monkeypatch.setattr(Deployment, "start", lambda *args, **options: pytest.fail("ranks were started"))
    outcome = call("serve", TINY, *arguments)
    assert outcome.code == 2
    assert words in outcome.err


def test_an_address_that_nobody_answers_is_an_error_in_a_line(call: Call) -> None:
    outcome = call("chat", "http://127.0.0.1:9/v1", "--json")
    assert outcome.code == 2
    assert outcome.record["error"]["type"] == "DeploymentError"
    assert call("chat", "http://127.0.0.1:9/v1", "--ranks", "2").code == 2


class Scripted:
    """Says the number of messages and pictures it was given."""

    thinking = "hm"

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.closed = 0
        self.fails = False

    def stream(self, messages: Any, images: Any, *, max_tokens: int, temperature: float) -> Scripted:
        if self.fails:
            raise RequestError("no")
        self.asked.append((len(messages), len(images)))
        self.thoughts = [message.thinking for message in messages if message.role == "assistant"]
        return self

    @property
    def answer(self) -> Answer:
        usage = Usage(prompt_tokens=1, image_tokens=0, completion_tokens=1)
        timings = Timings(queued_s=0.0, token_s=(0.1,), total_s=0.2)
        return Answer(
            text="x", thinking="", token_ids=(), logprobs=(), finish_reason="stop", usage=usage, timings=timings
        )

    def __iter__(self) -> Iterator[str]:
        yield from ("said ", "\x1b[31mred")

    def close(self) -> None:
        self.closed += 1


def run(text: str, service: Scripted, **options: Any) -> int:
    return Terminal(service, source=io.StringIO(text), **options).run()


def test_a_conversation_grows_is_cleared_and_keeps_its_pictures(capsys) -> None:
    service = Scripted()
    code = run(f"one\n\n/image {HOUSE}\ntwo\nthree\n/clear\nfour\n/quit\nnever\n", service, system="be kind")
    assert code == 0
    assert service.asked == [(2, 0), (4, 1), (6, 1), (2, 0)]
    assert service.closed == 4
    out = capsys.readouterr().out
    assert out.count("said ") == 4
    assert "\x1b" not in out, "what a model writes cannot steer the terminal"
    assert run("one\ntwo\n", service) == 0
    assert service.thoughts == ["hm"], "what it thought goes back with what it said"


def test_a_question_that_fails_is_told_and_the_conversation_goes_on(capsys) -> None:
    service = Scripted()
    service.fails = True
    assert run("one\n", service) == 2
    assert "RequestError: no" in capsys.readouterr().err
    assert run("/image /no/such/file\n", service) == 2
    service.fails = False
    assert run("/image /no/such/file\ntwo\n", service, as_json=True) == 0
    assert service.asked == [(1, 0)]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_that_fails_is_told_in_the_stream_logged_by_name_and_replaced(tmp_path: Path, sent: int) -> None:
    log = tmp_path / "log"
    command = ["serve", str(TINY), "--port", "0", "--json", "--precision", "fp32", "--slots", "2", "--ranks", "2"]
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "workbench.cli", *command],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, log.read_text()
        base = json.loads(line)["url"]
        root = base.removesuffix("/v1")
        body = {"prompt": "a b c", "max_tokens": 3000, "ignore_eos": True, "stream": True}
        asked = urllib.request.Request(
            f"{base}/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=60) as stream:
            assert stream.readline().startswith(b"data: ")
            ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            assert len(ranks) == 2
            os.kill(int(ranks[1]), sent)
            rest = stream.read().decode()
        assert '"code":"model_failed"' in rest
        assert "[DONE]" not in rest
        seen = set()
        while "ready" not in seen:
            seen.add(ready(root))
        assert "restarting" in seen
        again = urllib.request.Request(
            f"{base}/completions",
            json.dumps({"prompt": "a b c", "max_tokens": 3}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(again, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] >= 1
        lines = [json.loads(each) for each in log.read_text().splitlines() if each.startswith("{")]
        (broken,) = (each for each in lines if each["event"] == "ranks broken")
        assert f"rank 1 (process {ranks[1]}" in broken["error"]
        assert "'step'" in broken["error"]
        assert [each["event"] for each in lines].count("ranks restarted") == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def ready(root: str) -> str:
    try:
        with urllib.request.urlopen(f"{root}/ready", timeout=10) as answer:
            return str(json.load(answer)["status"])
    except urllib.error.HTTPError as error:
        return str(json.load(error)["status"])
