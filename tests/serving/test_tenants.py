"""Who has the next slot: holders of keys take turns by weight, and quotas bound what one of them may take."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from serving_fakes import EchoRunner

from workbench.base import ConfigError, RequestError
from workbench.serving.engine import Engine
from workbench.serving.requests import GenerationRequest, SamplingParams
from workbench.serving.scheduler import Scheduler

pytestmark = pytest.mark.timeout(120)


def ask(tenant: str, weight: float = 1.0, *, max_tokens: int = 2, priority: int = 0) -> GenerationRequest:
    return GenerationRequest(
        token_ids=(1, 2, 3),
        sampling=SamplingParams(max_tokens=max_tokens),
        tenant=tenant,
        weight=weight,
        priority=priority,
    )


def served(requests: list[GenerationRequest], *, num_slots: int) -> list[str]:
    """Tenants in the order of their admission."""
    engine = Engine(EchoRunner(num_slots=num_slots))
    order: list[str] = []
    admit = engine.scheduler.admit

    def admitting():
        admitted = admit()
        order.extend(sequence.request.tenant for sequence in admitted)
        return admitted

    engine.scheduler.admit = admitting
    for request in requests:
        engine.submit(request)
    while engine.step_once():
        pass
    assert len(order) == len(requests)
    return order


@pytest.mark.parametrize("num_slots", [1, 2, 4])
def test_who_asks_once_does_not_wait_for_all_of_one_who_asks_often(num_slots, monkeypatch):
    requests = [ask("often") for _ in range(20)] + [ask("once")]
    assert served(requests, num_slots=num_slots).index("once") <= num_slots
    monkeypatch.setattr(Scheduler, "_next_place", lambda self: 0)
    assert served(requests, num_slots=num_slots).index("once") == 20, "the check sees a line in order of arrival alone"


@pytest.mark.parametrize("num_slots", [1, 4])
def test_weights_are_the_parts_of_the_slots_while_several_want_them(num_slots):
    requests = [ask("heavy", 3.0) for _ in range(40)] + [ask("light") for _ in range(40)]
    counts = Counter(served(requests, num_slots=num_slots)[:40])
    assert counts["heavy"] == pytest.approx(30, abs=2)


def test_who_was_away_has_no_turns_in_store():
    requests = [ask("first") for _ in range(10)]
    engine = Engine(EchoRunner(num_slots=1))
    for request in requests:
        engine.submit(request)
    while engine.step_once():
        pass
    for request in (*(ask("late") for _ in range(10)), *(ask("first") for _ in range(10))):
        engine.submit(request)
    order: list[str] = []
    while engine.scheduler.has_work:
        order += [sequence.request.tenant for sequence in engine.scheduler.admit()]
        for sequence in list(engine.scheduler.running[0]):
            engine.scheduler.release(sequence)
    assert order[:6].count("first") >= 2, "ten turns of the past do not count against it"


def test_priority_goes_before_turns_and_one_tenant_alone_has_all_slots_in_order():
    order = served([*(ask("a") for _ in range(4)), ask("b"), ask("a", priority=1)], num_slots=1)
    assert order[:2] == ["a", "b"]
    engine = Engine(EchoRunner(num_slots=3))
    for n in range(3):
        engine.submit(ask("alone", max_tokens=n + 1))
    assert [each.request_id for each in engine.scheduler.admit()] == [0, 1, 2]


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_refused(weight):
    with pytest.raises(RequestError, match="weight"):
        Engine(EchoRunner()).submit(ask("a", weight))


# quotas


def test_quotas_are_read_by_line_and_nonsense_is_refused(tmp_path):
    from workbench.serving.http import Quota, ServerSettings, read_quotas

    file = tmp_path / "quotas"
    file.write_text("# who may what\nann weight=2.5 at_once=4\n\nbob requests_per_minute=60  # slow\ncyn\n")
    quotas = read_quotas(file)
    assert quotas == {"ann": Quota(weight=2.5, at_once=4), "bob": Quota(requests_per_minute=60), "cyn": Quota()}
    settings = ServerSettings(model="k3", api_keys={"x": "ann", "y": "bob", "z": "cyn"}, quotas=quotas)
    assert settings.quota_of("ann").weight == 2.5
    assert settings.quota_of("nobody") == Quota()
    with pytest.raises(ConfigError, match="without a key"):
        ServerSettings(model="k3", api_keys={"x": "ann"}, quotas=quotas)
    for text in ("ann weight=0", "ann weight=nan", "ann at_once=0", "ann speed=3", "ann weight", "ann weight=x",
                 "ann weight=1 weight=2", "ann\nann", "weight=3"):  # fmt: skip
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"line [12]"):
            read_quotas(file)


def test_one_holder_at_its_quota_is_told_to_come_back_and_others_are_served():
    pytest.importorskip("uvicorn")
    from http_served import ask as question
    from http_served import served as serving
    from http_served import until

    from workbench.serving.http import Quota
    from workbench.serving.http.settings import key_digest

    keys = {key_digest(letter * 16): letter for letter in "abc"}
    quotas = {"a": Quota(at_once=1, weight=2.0), "b": Quota(requests_per_minute=4)}
    leave = threading.Event()
    runner = EchoRunner(num_slots=1, gate=lambda: leave.wait(30))

    def post(holder: str):
        return server.post(question(max_tokens=1), authorization=f"Bearer {holder * 16}")

    with serving(runner, api_keys=keys, quotas=quotas) as server:
        first = threading.Thread(target=post, args=("a",))
        first.start()
        until(lambda: server.service.stats().num_running == 1)
        (sequence,) = server.service.engine.scheduler.running[0]
        assert (sequence.request.tenant, sequence.request.weight) == ("a", 2.0)
        got = post("a")
        assert (got.status, got.error["code"]) == (429, "too_many_at_once")
        assert int(got.headers["retry-after"]) >= 1
        leave.set()
        first.join()
        assert [post("a").status for _ in range(3)] == [200] * 3, "its place is free again"
        assert [post("b").status for _ in range(2)] == [200, 429], "a rate of its own"
        assert [post("c").status for _ in range(3)] == [200] * 3, "no quota, no limit"
