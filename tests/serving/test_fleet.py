"""Copies of a model that come and go while requests do: who gets which request, and what one that leaves finishes."""

from __future__ import annotations

import threading
import time

import pytest
from serving_fakes import EchoRunner, ScriptRunner

from workbench.base import DeploymentError, QueueFullError, RequestError
from workbench.serving import Fleet, MultimodalInferenceService
from workbench.serving.engine import Engine
from workbench.serving.requests import GenerationRequest, SamplingParams

pytestmark = pytest.mark.timeout(120)


def ask(ids, max_tokens=3) -> GenerationRequest:
    return GenerationRequest(token_ids=tuple(ids), sampling=SamplingParams(max_tokens=max_tokens))


def held() -> tuple[EchoRunner, threading.Event]:
    leave = threading.Event()
    return EchoRunner(num_slots=2, gate=lambda: leave.wait(30)), leave


def loads(fleet: Fleet) -> list[int]:
    return [copy.engine.num_requests for copy in fleet._copies]


def tokens(generation) -> list[int]:
    return [event.token_id for event in generation]


def until(condition) -> None:
    while not condition():
        time.sleep(0.005)


def test_requests_go_to_the_least_loaded_and_every_copy_answers():
    runners, events = zip(*(held() for _ in range(3)), strict=True)
    fleet = Fleet(runners).start()
    generations = [fleet.submit(ask([n + 1] * 4)) for n in range(6)]
    assert loads(fleet) == [2, 2, 2]
    assert fleet.num_requests == 6
    for event in events:
        event.set()
    assert [tokens(each) for each in generations] == [[n + 1] * 3 for n in range(6)]
    stats = fleet.stats()
    assert (stats.num_generated, stats.num_free_slots, stats.num_running) == (18, 6, 0)
    assert len(fleet.recent().first_token_s) == 6
    fleet.stop()


def test_a_known_beginning_goes_where_it_was_read_unless_that_is_much_busier():
    fleet = Fleet(
        [EchoRunner(num_slots=4) for _ in range(2)],
        make=lambda runner: Engine(runner, prefix_pages=9, page_tokens=4),
        affinity_tokens=4,
    )
    first, second = (copy.engine for copy in fleet._copies)
    beginning = [7] * 8

    def finish() -> None:
        while first.step_once() or second.step_once():
            pass

    fleet.submit(ask([*beginning, 1]))
    finish()
    for n in range(2):
        fleet.submit(ask([*beginning, 2 + n]))
    assert loads(fleet) == [2, 0], "both where the beginning lies, though the other one is idle"
    finish()
    assert first.stats().num_cached_tokens == 16
    for n in range(6):
        fleet.submit(ask([*beginning, 9 + n]))
    assert loads(fleet)[1] >= 1, "no copy is filled up for a beginning alone"
    finish()


@pytest.mark.parametrize(("num_pages", "num_tokens", "sizes"), [(0, 300, [1, 1]), (9, 8, [2, 0])])
def test_beginnings_keep_together_by_the_page_that_is_kept_and_not_at_all_without(num_pages, num_tokens, sizes):
    fleet = Fleet(
        [EchoRunner(num_slots=4) for _ in range(2)],
        make=lambda runner: Engine(runner, prefix_pages=num_pages, page_tokens=4),
    )
    for n in range(2):
        fleet.submit(ask([7] * num_tokens + [n + 1]))
    assert loads(fleet) == sizes


def test_a_copy_that_comes_takes_requests_at_once():
    (one, leave_one), (other, leave_other) = held(), held()
    fleet = Fleet([one]).start()
    first = [fleet.submit(ask([1])) for _ in range(3)]
    fleet.add(other)
    second = [fleet.submit(ask([2])) for _ in range(2)]
    assert loads(fleet) == [3, 2]
    leave_one.set()
    leave_other.set()
    assert [tokens(each) for each in (*first, *second)] == [[1] * 3] * 3 + [[2] * 3] * 2
    fleet.stop()


def test_a_copy_that_leaves_finishes_what_it_has_and_gets_nothing_new():
    (one, leave_one), (other, leave_other) = held(), held()
    fleet = Fleet([one, other]).start()
    before = [fleet.submit(ask([n + 1])) for n in range(2)]
    assert loads(fleet) == [1, 1]
    gone: list[object] = []
    leaving = threading.Thread(target=lambda: gone.append(fleet.remove(other)))
    leaving.start()
    until(lambda: len(fleet) == 1)
    during = [fleet.submit(ask([5])) for _ in range(3)]
    assert loads(fleet) == [4, 1]
    assert leaving.is_alive()
    leave_other.set()
    leaving.join()
    assert gone == [other]
    assert loads(fleet) == [4]
    leave_one.set()
    assert [tokens(each) for each in (*before, *during)] == [[1] * 3, [2] * 3, *[[5] * 3] * 3]
    fleet.stop()
    again = Fleet([other]).start()  # nobody drives the runner that was taken out
    assert tokens(again.submit(ask([6]))) == [6] * 3
    again.stop()


def test_a_copy_that_does_not_come_to_its_end_is_not_waited_for_and_its_requests_are_told():
    (one, leave_one), (other, leave_other) = held(), held()
    fleet = Fleet([one, other]).start()
    generations = [fleet.submit(ask([n + 1])) for n in range(2)]
    timer = threading.Timer(0.3, leave_other.set)  # the step in hand ends, the request does not come to its own end
    timer.start()
    fleet.remove(other, drain_s=0.0)
    with pytest.raises(DeploymentError, match="engine was stopped"):
        tokens(generations[1])
    leave_one.set()
    assert tokens(generations[0]) == [1] * 3
    fleet.stop()


def test_a_copy_that_fails_is_passed_over_and_the_fleet_has_failed_with_its_last():
    broken = [EchoRunner(num_slots=2, bad_token=66 + n) for n in range(2)]
    fleet = Fleet(broken).start()
    with pytest.raises(DeploymentError, match="token 66"):
        tokens(fleet.submit(ask([66])))
    until(lambda: fleet._copies[0].engine.error is not None)
    assert fleet.error is None
    assert [tokens(fleet.submit(ask([5]))) for _ in range(4)] == [[5] * 3] * 4
    with pytest.raises(DeploymentError, match="token 67"):
        tokens(fleet.submit(ask([67])))
    until(lambda: fleet.error is not None)
    assert not fleet.is_recovering
    with pytest.raises(DeploymentError, match="token 6"):
        fleet.submit(ask([5]))
    fleet.stop()


def test_where_all_lines_are_full_the_caller_is_told_so():
    (one, leave_one), (other, leave_other) = held(), held()
    fleet = Fleet([one, other], make=lambda runner: Engine(runner, max_queue=1)).start()
    generations = []

    def fill() -> None:
        for _ in range(20):
            generations.append(fleet.submit(ask([1])))

    with pytest.raises(QueueFullError):
        fill()
    assert len(generations) >= 2
    leave_one.set()
    leave_other.set()
    assert [tokens(each) for each in generations] == [[1] * 3] * len(generations)
    fleet.stop()


def test_what_makes_no_fleet_is_refused():
    one = EchoRunner(num_slots=2)
    fleet = Fleet([one])
    with pytest.raises(RequestError, match="another model"):
        fleet.add(EchoRunner(num_slots=2, max_tokens=77))
    with pytest.raises(RequestError, match="already"):
        fleet.add(one)
    with pytest.raises(RequestError, match="last runner"):
        fleet.remove(one)
    with pytest.raises(RequestError, match="not in the fleet"):
        fleet.remove(EchoRunner())
    with pytest.raises(RequestError, match="at least one"):
        Fleet([])


def test_a_service_and_its_server_run_on_a_fleet_as_on_an_engine():
    pytest.importorskip("uvicorn")
    from http_served import TOKENIZER, Served, said
    from http_served import ask as question

    from workbench.serving.http import HttpServer, ServerSettings

    runners = [ScriptRunner(said("ok")) for _ in range(2)]
    fleet = Fleet(runners)
    service = MultimodalInferenceService(fleet, TOKENIZER)
    with service, HttpServer(service, ServerSettings(model="k3", port=0)) as server:
        client = Served(service, server, int(server.url.removesuffix("/v1").rpartition(":")[2]))
        copies = {"ready": 2, "restarting": 0, "failed": 0, "leaving": 0}
        assert client.get("/ready").json == {"status": "ready", "copies": copies}
        assert client.post(question()).json["choices"][0]["message"]["content"] == "ok"
        fleet.remove(runners[0])
        assert client.post(question(stream=True)).text == "ok"
        fleet.add(runners[0])
        assert f"workbench_free_slots {2.0 * runners[0].info.num_slots}" in client.get("/metrics").body.decode()
    assert service.stats().num_running == 0
