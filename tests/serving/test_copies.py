"""The number of copies changed while requests come, over the admin door and beneath it, on scripted copies."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from http_served import PLAIN, TOKENIZER, Got, Served, until
from serving_fakes import EchoRunner

from workbench.base import (
    ChangeUnderWayError,
    ConfigError,
    DeploymentError,
    LoadError,
    NoRoomError,
    RequestError,
)
from workbench.deployment.room import RankRoom, require_room
from workbench.serving import Copies, Fleet, MultimodalInferenceService
from workbench.serving.copies import MOST, CopyEvent, Tell
from workbench.serving.http import HttpServer, ServerSettings

pytestmark = pytest.mark.timeout(120)

ADMIN, USER = "an-admin-key-for-tests", "a-user-key-for-the-tests"
COPIES = "/admin/copies"


def digests(**keys: str) -> dict[str, str]:
    return {sha256(key.encode()).hexdigest(): holder for holder, key in keys.items()}


class ClosingRunner(EchoRunner):
    """Knows whether it was closed, and fails where it is used afterwards."""

    is_closed = False

    def step(self, inputs):
        assert not self.is_closed, "a copy was closed while it had work"
        return super().step(inputs)

    def close(self) -> None:
        assert not self.is_closed, "closed twice"
        self.is_closed = True


@dataclass
class House:
    """A server over copies that are started as a test says: `starting` is called by each start."""

    client: Served
    copies: Copies
    runners: list[ClosingRunner]
    events: list[CopyEvent]
    starting: Callable[[Tell], None]
    room: list[int]

    def admin(self, number: object = None, key: str | None = ADMIN, **more: object) -> Got:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        if number is None:
            return self.client.get(COPIES, **headers)
        return self.client.post({"copies": number, **more}, COPIES, **headers)

    def settled(self) -> Any:
        until(lambda: self.admin().json["change"] is None)
        return self.admin().json

    def ask(self, secret: str) -> Got:
        body = {"model": "k3", "prompt": secret, "max_tokens": len(secret)}
        return self.client.post(body, PLAIN)


@contextmanager
def house(
    gate: Callable[[], None] = lambda: None, *, num_slots: int = 2, drain_s: float = 60.0, **settings: Any
) -> Iterator[House]:
    first = ClosingRunner(num_slots=num_slots, gate=gate)
    runners, events, room = [first], list[CopyEvent](), [64]
    fleet = Fleet([first])

    def start(tell: Tell) -> ClosingRunner:
        here.starting(tell)
        runners.append(ClosingRunner(num_slots=num_slots, gate=gate))
        return runners[-1]

    def check(num_more: int) -> None:
        if num_more > room[0]:
            raise NoRoomError("no room", found=f"{room[0]} GB free", expected=f"{num_more} GB")

    copies = Copies(fleet, [first], start=start, check=check, on_event=events.append, drain_s=drain_s)
    service = MultimodalInferenceService(fleet, TOKENIZER)
    settings = {"admin_keys": digests(boss=ADMIN), "max_waiting": 64, "drain_timeout_s": 5.0, **settings}
    with ExitStack() as ends:
        ends.callback(copies.close)
        ends.enter_context(service)
        server = ends.enter_context(HttpServer(service, ServerSettings(model="k3", port=0, **settings), copies=copies))
        client = Served(service, server, int(server.url.removesuffix("/v1").rpartition(":")[2]))
        here = House(client, copies, runners, events, lambda tell: None, room)
        yield here
    assert all(runner.is_closed for runner in runners), "a copy was left behind"


def test_copies_come_and_go_while_secrets_are_asked_for_and_nothing_is_lost_or_mixed() -> None:
    answers: dict[str, Got] = {}
    stop = threading.Event()

    def ask_on(worker: int) -> None:
        number = 0
        while not stop.is_set():
            secret = f"secret-{worker}-{number}-{sha256(bytes([worker, number % 256])).hexdigest()[:12]}"
            answers[secret] = here.ask(secret)
            number += 1

    with house(lambda: time.sleep(0.001)) as here:
        workers = [threading.Thread(target=ask_on, args=(worker,)) for worker in range(6)]
        for worker in workers:
            worker.start()
        for target in (3, 2, 4, 1):
            done, before = here.admin(target), len(answers)
            assert done.status == 202
            assert len(here.settled()["copies"]) == target
            until(lambda before=before: len(answers) > before + 6)
        stop.set()
        for worker in workers:
            worker.join()
        assert {got.status for got in answers.values()} == {200}
        wrong = {secret for secret, got in answers.items() if got.json["choices"][0]["text"] != secret}
        assert not wrong
        assert [event.kind for event in here.events] == ["added"] * 2 + ["removed"] + ["added"] * 2 + ["removed"] * 3
        assert sum(runner.is_closed for runner in here.runners) == 4
        assert all(runner.steps for runner in here.runners), "every copy had its part"
        # What copies that have left had counted is still there.
        text = here.client.get("/metrics").body.decode()
        counted = sum(len(runner.steps) for runner in here.runners)
        assert f"workbench_engine_steps_total {float(counted)}" in text


def test_a_copy_that_starts_is_seen_and_takes_requests_only_once_it_is_ready() -> None:
    told, go = threading.Event(), threading.Event()

    def starting(tell: Tell) -> None:
        tell(0, 0.75)
        tell(1, 0.25)
        told.set()
        assert go.wait(30)

    with house() as here:
        here.starting = starting
        assert here.client.server.api.gate.capacity == 2 + 64
        assert here.admin(2).status == 202
        assert told.wait(30)
        state = here.admin().json
        assert state["wanted"] == 2
        assert [copy["state"] for copy in state["copies"]] == ["ready"]
        change = state["change"]
        assert (change["target"], change["doing"], change["fraction"]) == (2, "starting", 0.25)
        busy = here.admin(3)
        assert (busy.status, busy.error["code"]) == (409, "change_under_way")
        assert "retry-after" in busy.headers
        starting_now = {"ready": 1, "restarting": 0, "failed": 0, "leaving": 0, "starting": 1}
        assert here.client.get("/ready").json == {"status": "ready", "copies": starting_now}
        assert here.client.get("/health").json == {"status": "ok", "copies": starting_now}
        assert 'workbench_copies{state="starting"} 1.0' in here.client.get("/metrics").body.decode()
        assert here.ask("meanwhile").json["choices"][0]["text"] == "meanwhile"
        go.set()
        assert [copy["number"] for copy in here.settled()["copies"]] == [1, 2]
        assert here.client.server.api.gate.capacity == 4 + 64
        text = here.client.get("/metrics").body.decode()
        assert 'workbench_copies{state="ready"} 2.0' in text
        assert 'workbench_copies{state="starting"} 0.0' in text
        again = here.admin(2)
        assert again.status == 200, "there is nothing to do"


@pytest.mark.parametrize("error", [LoadError("model-3.safetensors is cut off"), MemoryError("no memory")])
def test_a_copy_that_does_not_come_is_told_of_and_the_others_serve_on(error: Exception) -> None:
    with house() as here:

        def starting(tell: Tell) -> None:
            raise error

        here.starting = starting
        assert here.admin(3).status == 202
        state = here.settled()
        assert (state["wanted"], len(state["copies"])) == (1, 1)
        assert state["failure"]["type"] == type(error).__name__
        assert str(error) in state["failure"]["message"]
        assert [event.kind for event in here.events] == ["failed"]
        assert here.ask("still here").json["choices"][0]["text"] == "still here"
        assert here.client.get("/ready").json["copies"]["ready"] == 1
        assert str(error) not in here.client.get("/ready").body.decode(), "told to holders of an admin key alone"
        here.starting = lambda tell: None
        assert here.admin(2).status == 202
        state = here.settled()
        assert (state["failure"], len(state["copies"])) == (None, 2)


def test_a_copy_that_has_no_room_is_refused_with_the_numbers_and_not_started() -> None:
    with house() as here:
        here.room[0] = 1
        refused = here.admin(3)
        assert (refused.status, refused.error["code"]) == (422, "insufficient_memory")
        assert "found 1 GB free, expected 2 GB" in refused.error["message"]
        state = here.admin().json
        assert (state["wanted"], state["change"], state["failure"]) == (1, None, None)
        assert len(here.runners) == 1
        assert here.admin(2).status == 202
        here.settled()
        # It may be gone by the time of the second one: what has come stays.
        here.starting = lambda tell: here.room.__setitem__(0, 0)
        here.room[0] = 2
        assert here.admin(4).status == 202
        state = here.settled()
        assert (state["wanted"], len(state["copies"]), state["failure"]["type"]) == (3, 3, "NoRoomError")


def test_the_door_opens_to_an_admin_key_alone() -> None:
    def code(got: Got) -> tuple[int, str]:
        return got.status, got.error["code"]

    with house(api_keys=digests(ann=USER)) as here:
        for number in (None, 2):
            assert code(here.admin(number, key=None)) == (401, "missing_api_key")
            assert code(here.admin(number, key="not-a-key-of-anybody")) == (401, "invalid_api_key")
            assert code(here.admin(number, key=USER)) == (403, "not_admin")
        assert code(here.client.get("/v1/models", authorization=f"Bearer {ADMIN}")) == (401, "invalid_api_key")
        assert here.admin().status == 200
        assert len(here.admin().json["copies"]) == 1
    with house(admin_keys={}) as here:
        for key in (None, ADMIN):
            assert code(here.admin(2, key=key)) == (403, "admin_disabled")
        assert len(here.runners) == 1
    runner = EchoRunner()
    service = MultimodalInferenceService(runner, TOKENIZER)
    settings = ServerSettings(model="k3", port=0, admin_keys=digests(boss=ADMIN))
    with service, HttpServer(service, settings) as server:
        client = Served(service, server, int(server.url.removesuffix("/v1").rpartition(":")[2]))
        assert code(client.get(COPIES, authorization=f"Bearer {ADMIN}")) == (404, "not_found")
    with pytest.raises(ConfigError, match="both"):
        ServerSettings(model="k3", admin_keys=digests(boss=USER), api_keys=digests(ann=USER))


@pytest.mark.parametrize("number", [0, -1, 1.5, "2", True, None, [2], MOST + 1, 10**30])
def test_what_is_no_number_of_copies_is_refused_by_name(number: object) -> None:
    with house() as here:
        body = json.dumps({"copies": number}).encode()
        got = here.client.post(body, COPIES, authorization=f"Bearer {ADMIN}")
        assert got.status == 400
        assert "copies" in got.error["message"]
        assert len(here.runners) == 1
        for raw in (b"{}", b"[]", b"nonsense", b'{"copies": 2, "copy": 3}'):
            assert here.client.post(raw, COPIES, authorization=f"Bearer {ADMIN}").status == 400
        assert here.client.call("DELETE", COPIES).error["code"] == "method_not_allowed"


def test_a_copy_that_goes_finishes_what_it_has_before_it_is_closed() -> None:
    leave, reached = threading.Event(), threading.Semaphore(0)

    def gate() -> None:
        reached.release()
        assert leave.wait(30)

    with house(gate) as here:
        here.admin(2)
        here.settled()
        got: dict[str, Got] = {}
        asking = [
            threading.Thread(target=lambda s=secret: got.setdefault(s, here.ask(s))) for secret in ("first", "second")
        ]
        for thread in asking:
            thread.start()
        assert all(reached.acquire(timeout=30) for _ in range(2)), "one at each copy"
        assert here.admin(1).status == 202
        until(lambda: here.client.get("/ready").json["copies"]["leaving"] == 1)
        assert here.admin().json["change"]["doing"] == "draining"
        assert not any(runner.is_closed for runner in here.runners)
        leave.set()
        for thread in asking:
            thread.join()
        assert len(here.settled()["copies"]) == 1
        assert {secret: each.json["choices"][0]["text"] for secret, each in got.items()} == {
            "first": "first",
            "second": "second",
        }
        assert [runner.is_closed for runner in here.runners] == [False, True], "the newest of the equally busy goes"


def test_a_copy_that_has_failed_is_replaced_and_the_number_is_of_those_that_have_not() -> None:
    with house() as here:
        here.admin(2)
        here.settled()
        here.runners[0].bad_token = ord("x")
        while here.admin().json["copies"][0]["state"] != "failed":
            here.ask("xx")
        assert here.client.get("/ready").status == 200
        assert here.admin(2).status == 202
        state = here.settled()
        assert [(copy["number"], copy["state"]) for copy in state["copies"]] == [(2, "ready"), (3, "ready")]
        assert here.runners[0].is_closed


def test_closing_calls_off_a_start_and_leaves_nothing_behind() -> None:
    told = threading.Event()

    def starting(tell: Tell) -> None:
        while True:  # as loading does: it tells how far it is, and goes on unless that raises
            tell(0, 0.5)
            told.set()
            time.sleep(0.01)

    with house() as here:
        here.starting = starting
        here.admin(3)
        assert told.wait(30)
    assert (len(here.runners), here.events) == (1, [])
    with pytest.raises(DeploymentError, match="closed"):
        here.copies.change(2)


def test_beneath_the_door_the_same_is_refused_as_errors() -> None:
    runner, go = ClosingRunner(), threading.Event()

    def start(tell: Tell) -> ClosingRunner:
        assert go.wait(30)
        return ClosingRunner(max_tokens=77)

    copies = Copies(Fleet([runner]), [runner], start=start)
    with pytest.raises(RequestError, match="cannot be"):
        copies.change(0)
    assert copies.change(1) is False
    assert copies.change(2) is True
    with pytest.raises(ChangeUnderWayError, match="towards 2"):
        copies.change(1)
    go.set()
    until(lambda: copies.state.change is None)
    assert copies.state.failure is not None
    assert "another model" in copies.state.failure.message, "a copy that is none is closed and not taken in"
    copies.close()
    copies.close()
    assert runner.is_closed


def test_room_is_summed_over_the_ranks_of_each_host_and_device() -> None:
    gb = 10**9
    ranks = [
        RankRoom(
            rank=rank,
            needs={f"host {rank // 2}": 3 * gb, f"card {rank}": 50 * gb},
            free={f"host {rank // 2}": (20 - rank) * gb, f"card {rank}": 90 * gb if rank else None},
        )
        for rank in range(4)
    ]
    require_room(ranks, 1)
    with pytest.raises(NoRoomError, match="2 more copies") as caught:
        require_room(ranks, 2)
    for text in ("card 1 has 90 GB free", "card 3 has 90 GB free", "100 GB (2 x 50 GB)"):
        assert text in str(caught.value)
    assert "card 0" not in str(caught.value), "what nobody knows is not held against it"
    assert "host" not in str(caught.value)
    with pytest.raises(NoRoomError, match=r"host 1 has 17 GB free.*24 GB \(4 x 6 GB\)"):
        require_room(ranks, 4)
    require_room([], 1)
