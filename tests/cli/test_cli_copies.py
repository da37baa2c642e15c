"""`serve` with several copies on real ranks: more and fewer of them under load, one that cannot come, nothing left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("uvicorn")

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "data" / "k3-tiny"
ADMIN = "an-admin-key-for-tests"
CHANGE_S = 120

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def call(url: str, body: object = None, key: str = "") -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@contextmanager
def serving(model: Path, folder: Path, *more: str) -> Iterator[tuple[str, psutil.Process, Path]]:
    """Address, process and log of `serve`; it must end on a signal, and none of its ranks may outlive it."""
    keys, log = folder / "admin", folder / "log"
    keys.write_text(f"boss:{ADMIN}\n")
    command = ["serve", str(model), "--port", "0", "--json", "--precision", "fp32", "--slots", "3"]
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "workbench.cli", *command, "--admin-key-file", str(keys), *more],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    seen: set[psutil.Process] = set()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, log.read_text()
        yield json.loads(line)["url"], psutil.Process(process.pid), log
        seen.update(psutil.Process(process.pid).children(recursive=True))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
        _, alive = psutil.wait_procs(seen, timeout=10)
        assert alive == []
    finally:
        process.kill()
        process.wait()


def settled(base: str, seen: list[Any]) -> Any:
    end = time.monotonic() + CHANGE_S
    while True:
        _, state = call(f"{base}/admin/copies", key=ADMIN)
        seen.append(state)
        if state["change"] is None:
            return state
        assert time.monotonic() < end, state
        time.sleep(0.1)


def test_one_copy_becomes_two_and_one_again_under_load_and_a_bad_shard_leaves_it_serving(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    prompts = [f"secret {number}: {number * 7919} " for number in range(8)]

    def ask(url: str, prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        status, answer = call(f"{url}/completions", body)
        assert status == 200, answer
        return str(answer["choices"][0]["text"])

    with serving(model, tmp_path) as (url, process, log):
        base = url.removesuffix("/v1")
        alone = {prompt: ask(url, prompt) for prompt in prompts}
        assert len(set(alone.values())) > 1
        stop, wrong, answered, lost = threading.Event(), list[str](), [0], list[BaseException]()

        def ask_on(worker: int) -> None:
            number = worker
            while not stop.is_set():
                prompt = prompts[number % len(prompts)]
                try:
                    if ask(url, prompt) != alone[prompt]:
                        wrong.append(prompt)
                except (OSError, AssertionError) as error:
                    lost.append(error)
                answered[0] += 1
                number += 3

        workers = [threading.Thread(target=ask_on, args=(worker,)) for worker in range(4)]
        for worker in workers:
            worker.start()
        seen: list[Any] = []
        assert call(f"{base}/admin/copies", {"copies": 2}, ADMIN)[0] == 202
        assert len(settled(base, seen)["copies"]) == 2
        assert len(process.children(recursive=True)) == 2
        assert any(state["change"] and state["change"]["doing"] == "starting" for state in seen)
        requests_of = lambda: [copy["num_requests"] for copy in call(f"{base}/admin/copies", key=ADMIN)[1]["copies"]]  # noqa: E731
        wait_for(lambda: all(requests_of()), "both copies at work")
        before = answered[0]
        wait_for(lambda: answered[0] > before + 8, "answers of both")
        assert call(f"{base}/admin/copies", {"copies": 1}, ADMIN)[0] == 202
        assert len(settled(base, seen)["copies"]) == 1
        wait_for(lambda: len(process.children(recursive=True)) == 1, "the end of the ranks of the copy that left")
        before = answered[0]
        wait_for(lambda: answered[0] > before + 4, "answers of the one that stays")
        stop.set()
        for worker in workers:
            worker.join()
        assert (wrong, lost) == ([], [])

        # The files go bad while the first copy serves: the second one does not come, and the first answers as before.
        shard = sorted(model.glob("*.safetensors"))[-1]
        os.truncate(shard, shard.stat().st_size // 2)
        assert call(f"{base}/admin/copies", {"copies": 2}, ADMIN)[0] == 202
        state = settled(base, seen)
        assert (state["wanted"], len(state["copies"])) == (1, 1)
        assert shard.name in state["failure"]["message"]
        assert call(f"{base}/ready")[1] == {
            "status": "ready",
            "copies": {"ready": 1, "restarting": 0, "failed": 0, "leaving": 0, "starting": 0},
        }
        assert {prompt: ask(url, prompt) for prompt in prompts} == alone
        assert len(process.children(recursive=True)) == 1
        kinds = [json.loads(line)["event"] for line in log.read_text().splitlines() if '"copy ' in line]
        assert kinds == ["copy added", "copy removed", "copy failed"]


def test_copies_asked_for_at_the_start_come_each_with_ranks_of_its_own_and_too_many_are_refused(tmp_path: Path) -> None:
    with serving(TINY, tmp_path, "--ranks", "2", "--copies", "2") as (url, process, _):
        base = url.removesuffix("/v1")
        assert len(settled(base, [])["copies"]) == 2
        assert len(process.children(recursive=True)) == 4
        free = psutil.virtual_memory().total
        each = sum(child.memory_info().rss for child in process.children(recursive=True)) // 2
        if each * 60 < free:
            pytest.skip("this machine has room for 62 copies")
        status, refused = call(f"{base}/admin/copies", {"copies": 62}, ADMIN)
        assert (status, refused["error"]["code"]) == (422, "insufficient_memory")
        assert "60 x" in refused["error"]["message"]
        assert len(process.children(recursive=True)) == 4


def wait_for(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + CHANGE_S
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {CHANGE_S} s"
        time.sleep(0.02)
