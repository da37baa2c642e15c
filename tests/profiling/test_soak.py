"""A soak over a scripted model: good where nothing is wrong, and every planted fault is named."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from http_served import Served, served
from serving_fakes import EchoRunner

from workbench.base import ConfigError, DeploymentError, RequestError
from workbench.profiling.soak import SoakCheck, SoakRecord, SoakSettings, Subject, memory_trend, soak
from workbench.profiling.soak.memory import MemorySeries, MemoryTrend
from workbench.profiling.soak.pools import pool_faults
from workbench.profiling.soak.questions import draw_questions, foreign_secrets
from workbench.profiling.soak.run import _memory_check, _outage, _outage_check
from workbench.profiling.soak.users import Ledger
from workbench.serving.http.gate import Gate
from workbench.serving.scheduler import Scheduler
from workbench.serving.steps import SampledToken, StepInput
from workbench.view import draw_svg, memory_over_time

pytestmark = pytest.mark.timeout(180)

QUICK = {"num_streams": 5, "seconds": 0.8, "questions_per_stream": 1, "max_answer_tokens": 40, "settle_s": 1.0}


class ParrotRunner(EchoRunner):
    """Answers with the text of its prompt from the secret on, so whose slot was read shows in the answer."""

    mixes = False

    def step(self, inputs: Sequence[StepInput]) -> list[list[SampledToken]]:
        super().step(inputs)
        out: list[list[SampledToken]] = []
        for replica, steps in enumerate(inputs):
            sampling = [step for step in steps if step.sample is not None]
            texts = [self.text_of(replica, step.slot) for step in sampling]
            if self.mixes and len(self.steps) % 3 == 0:
                texts.reverse()
            out.append(
                [
                    SampledToken(token_id=text[step.step_idx % len(text)], logprob=-0.5)
                    for step, text in zip(sampling, texts, strict=True)
                ]
            )
        return out

    def text_of(self, replica: int, slot: int) -> list[int]:
        held = _bytes(self.slots[replica, slot])
        return list(held[held.index(b"KEY-") :])


def parrot(**options) -> ParrotRunner:
    """With a pause in every step: an answer that is there at once cannot be given up half way."""
    return ParrotRunner(**{"num_slots": 3, "max_tokens": 1200, "gate": lambda: time.sleep(0.001), **options})


def _bytes(held: Sequence[int]) -> bytes:
    return bytes(token for token in held if 0 <= token < 256)


def _turn_bad(runner: Any, words: str) -> None:
    runner.is_bad = runner.is_bad or words.startswith("measured")


def subject_of(server: Served, **options: object) -> Subject:
    gate = server.server.api.gate
    return Subject(
        service=server.service, url=server.server.url, place="fake", num_inside=lambda: gate.num_inside, **options
    )


def soaked(server: Served, **options: object) -> tuple[SoakRecord, dict[str, SoakCheck]]:
    record = soak(subject_of(server, max_pages=4), SoakSettings(**{**QUICK, **options}))
    return record, {check.name: check for check in record.checks}


def test_a_server_without_fault_keeps_every_promise_and_the_record_says_so():
    with served(parrot(), prefix_pages=4, page_tokens=64, max_waiting=20) as server:
        record, checks = soaked(server)
    for name in ("no secret in another's answer", "answers as alone", "no request fails", "pools as before"):
        assert checks[name].verdict == "good", record.render()
    assert checks["answers can be told apart"].verdict == "good"
    assert {"two pictures", "picture", "long", "short"} >= set(record.kinds)
    assert record.counts["answers compared"] > 5
    assert record.before["free slots"] == record.after["free slots"] == 3
    assert "pools as before" in record.render()
    assert record.to_json()["counts"] == dict(record.counts)


def test_answers_made_from_another_slot_are_found_by_secret_and_by_comparison():
    runner = parrot(num_slots=4)
    with served(runner, max_waiting=20) as server:
        subject, settings = subject_of(server), SoakSettings(**{**QUICK, "cancel_share": 0.0, "disconnect_share": 0.0})
        runner.mixes = True  # alone there is nobody to be mixed with, so the right answers are right
        record = soak(subject, settings)
    checks = {check.name: check for check in record.checks}
    assert checks["answers as alone"].verdict == "BAD"
    assert not record.ok


def test_a_whole_prompt_of_somebody_else_is_a_leak():
    ledger, (mine, other) = Ledger(), _questions(2)
    assert not ledger.judge(mine, f"you said {other.secret}", is_whole=True)
    assert (len(ledger.leaks), len(ledger.wrong)) == (1, 1)
    assert other.secret in ledger.leaks[0]
    assert foreign_secrets(f"{mine.secret} {other.secret}", mine.secret) == [other.secret]


def test_answers_of_the_neighbour_are_told_with_the_secret_that_was_in_them():
    class Rotated(ParrotRunner):
        is_bad = False

        def text_of(self, replica: int, slot: int) -> list[int]:
            others = [
                s for (r, s), held in self.slots.items() if r == replica and s != slot and b"KEY-" in _bytes(held)
            ]
            return super().text_of(replica, others[0] if self.is_bad and others else slot)

    runner = Rotated(num_slots=4, max_tokens=1200, gate=lambda: time.sleep(0.001))
    with served(runner, max_waiting=20) as server:
        subject = subject_of(server)
        record = soak(subject, SoakSettings(**QUICK), tell=lambda words: _turn_bad(runner, words))
    checks = {check.name: check for check in record.checks}
    assert checks["no secret in another's answer"].verdict == "BAD", record.render()
    assert " was told KEY-" in checks["no secret in another's answer"].found
    assert not record.ok


class FailingRunner(ParrotRunner):
    """While it `is_bad`, one of `every` so many steps fails."""

    is_bad = False
    every = 1

    def step(self, inputs):
        if self.is_bad and len(self.steps) % self.every == 0:
            self.steps.append(inputs)
            raise ValueError("this step does not work")
        return super().step(inputs)


def test_a_request_that_fails_for_no_killed_rank_breaks_its_promise():
    runner = FailingRunner(num_slots=1, max_tokens=1200, is_intact=True)
    runner.every = 50
    with served(runner, max_waiting=20) as server:
        subject = subject_of(server)
        record = soak(subject, SoakSettings(**QUICK), tell=lambda words: _turn_bad(runner, words))
    (check,) = (check for check in record.checks if check.name == "no request fails")
    assert check.verdict == "BAD", record.render()
    assert "the model failed on this request" in check.found


def test_answers_that_are_all_alike_prove_nothing():
    class Monotone(ParrotRunner):
        def text_of(self, replica: int, slot: int) -> list[int]:
            return list(b"yes ")

    with served(Monotone(num_slots=3, max_tokens=1200), max_waiting=20) as server:
        record, checks = soaked(server, max_answer_tokens=4)
    assert checks["answers can be told apart"].verdict == "not shown"
    assert not record.ok


def test_half_an_answer_must_be_the_beginning_of_the_right_one():
    ledger, (question, _) = Ledger(), _questions(2)
    object.__setattr__(question, "expected", "one two three")
    assert ledger.judge(question, "one tw", is_whole=False)
    assert not ledger.judge(question, "one tu", is_whole=False)
    assert not ledger.judge(question, "one tw", is_whole=True)
    assert len(ledger.wrong) == 2
    object.__setattr__(question, "logprobs", (-0.5, -0.25))
    assert ledger.judge(question, "one", (-0.5001,), is_whole=False)
    assert not ledger.judge(question, "one", (-0.5, -0.3), is_whole=False), "the same words with another certainty"
    assert not ledger.judge(question, "one", (float("nan"),), is_whole=False)


def test_a_slot_that_is_not_given_back_is_counted(monkeypatch):
    release, lost, is_measured = Scheduler.release, [], []

    def losing(self, sequence):
        replica = sequence.replica
        release(self, sequence)
        if is_measured and not lost:
            lost.append(self._free[replica].pop())

    monkeypatch.setattr(Scheduler, "check", lambda self: None)  # which would have ended the engine at once
    monkeypatch.setattr(Scheduler, "release", losing)
    with served(parrot(), max_waiting=20) as server:
        record = soak(
            subject_of(server),
            SoakSettings(**QUICK),
            tell=lambda words: is_measured.append(1) if words.startswith("measured") else None,
        )
        server.service.engine.scheduler._free[0] += lost  # the stand-in of a server looks as well when it ends
    check = next(check for check in record.checks if check.name == "pools as before")
    assert check.verdict == "BAD"
    assert "free slots: 2, before 3" in check.found


def test_a_place_that_a_vanished_client_keeps_is_counted(monkeypatch):
    place, is_measured, held = Gate.place, [], []

    @contextmanager
    def keeping(self, name):
        try:
            with place(self, name):
                yield
        finally:
            if is_measured and not held:
                held.append(1)
                self.num_inside += 1

    monkeypatch.setattr(Gate, "place", keeping)
    with served(parrot(), max_waiting=20) as server:
        record = soak(
            subject_of(server),
            SoakSettings(**QUICK),
            tell=lambda words: is_measured.append(1) if words.startswith("measured") else None,
        )
        server.server.api.gate.num_inside -= len(held)
    check = next(check for check in record.checks if check.name == "pools as before")
    assert check.verdict == "BAD"
    assert "requests inside the server: 1, before 0" in check.found


def test_pools_of_ranks_must_agree_with_what_the_engine_believes():
    before = {"pages kept": 2, "pages kept on pp0 tp0": 2, "pictures held on pp0 tp0": 0, "cache bytes on pp0 tp0": 9}
    assert not pool_faults(before, before, max_pages=2)
    stale = {**before, "pages kept on pp0 tp0": 3}
    assert "the engine counts 2" in pool_faults(before, stale, max_pages=4)[0]
    assert "at most 1" in pool_faults(before, before, max_pages=1)[0]
    assert pool_faults(before, {**before, "pictures held on pp0 tp0": 1}, max_pages=2)
    assert pool_faults(before, {**before, "cache bytes on pp0 tp0": 8}, max_pages=2)
    assert pool_faults({"threads, rank 0": 4}, {"pages kept": 0, "threads, rank 0": 9}, max_pages=0)
    assert not pool_faults({"threads, rank 0": 4}, {"pages kept": 0, "threads, rank 0": 3}, max_pages=0)


def test_memory_that_grows_is_told_from_memory_that_rises_once_and_from_noise():
    rng, mib = random.Random(3), 1 << 20

    def series(size_at):
        times = tuple(float(n) for n in range(100))
        return MemorySeries(
            name="rank 0",
            pid=7,
            times_s=times,
            num_bytes=tuple(int(size_at(t) + rng.uniform(-1, 1) * mib) for t in times),
        )

    assert memory_trend(series(lambda _: 300 * mib)).is_flat
    assert memory_trend(series(lambda t: 300 * mib + min(t, 30) * 5 * mib)).is_flat, "caches fill in the first half"
    leak = memory_trend(series(lambda t: 300 * mib + t * mib / 2))
    assert leak.is_flat is False
    assert leak.bytes_per_s == pytest.approx(mib / 2, rel=0.1)
    short = MemorySeries(name="rank 0", pid=7, times_s=(0.0, 1.0), num_bytes=(1, 10**9))
    assert memory_trend(short).is_flat is None


def test_a_rank_that_lived_a_short_time_is_not_judged_and_its_successor_is():
    def trend(name: str, num_samples: int, growth_mib: float) -> MemoryTrend:
        return MemoryTrend(
            name=name, num_samples=num_samples, median_bytes=3e8, bytes_per_s=1e3, growth_bytes=growth_mib * 2**20
        )

    killed = SoakSettings(kill_after_s=60.0)
    server, old, new = trend("server", 120, 0.1), trend("rank 0", 30, 50.0), trend("rank 0", 90, 0.2)
    check = _memory_check([server, old, new], killed)
    assert (check.verdict, check.found) == ("good", "a minute: server 60 kB, rank 0 60 kB")
    assert _memory_check([server, old, trend("rank 0", 90, 50.0)], killed).verdict == "BAD"
    assert _memory_check([server, trend("rank 0", 120, 50.0)], SoakSettings()).verdict == "BAD"
    assert _memory_check([server, trend("rank 0", 10, 0.0)], SoakSettings()).verdict == "not shown"
    assert _memory_check([], killed).verdict == "not shown"


def test_a_list_that_grows_with_every_step_shows_in_the_memory_of_its_process():
    class Hoarder(ParrotRunner):
        def step(self, inputs):
            self.hoard = [*getattr(self, "hoard", []), bytearray(os.urandom(1 << 10) * 256)]
            return super().step(inputs)

    with served(Hoarder(num_slots=3, max_tokens=1200), max_waiting=20) as server:
        record, checks = soaked(server, seconds=3.0)
        steps = len(server.service.model.hoard)
    assert steps > 200, "too few steps to hoard anything"
    assert checks["memory flat"].verdict == "BAD", record.render()
    assert "server grew by" in checks["memory flat"].found
    assert "<svg" in draw_svg(memory_over_time(record.to_json()))


def test_a_runner_that_fails_in_the_middle_fails_requests_and_is_no_outage():
    runner = FailingRunner(num_slots=1, max_tokens=1200, is_intact=True)
    runner.every = 7
    with served(runner, max_waiting=20) as server:
        subject = subject_of(server)
        ledger = Ledger()
        ledger.failed(DeploymentError("503"), asked_s=1.0)
        assert ledger.failures, "no rank was killed: nobody has an excuse"
        runner.is_bad = True
        with pytest.raises(DeploymentError, match="single question"):
            soak(subject, SoakSettings(**QUICK))


def test_errors_are_excused_only_between_a_kill_and_the_first_right_answer():
    now = [10.0]
    ledger, (question, _) = Ledger(clock=lambda: now[0]), _questions(2)
    ledger.killed_s = 5.0
    ledger.failed(DeploymentError("503"), asked_s=4.0)
    ledger.failed(DeploymentError("503"), asked_s=6.0)
    ledger.failed(RequestError("400"), asked_s=6.0)
    assert len(ledger.failures) == 1, "a refusal is no outage"
    ledger.answered(question.kind, 4.0, is_right=True)
    ledger.answered(question.kind, 7.0, is_right=False)
    assert ledger.back_s is None, "asked before the kill, or wrong"
    ledger.answered(question.kind, 7.0, is_right=True)
    assert ledger.back_s == 10.0
    ledger.failed(DeploymentError("503"), asked_s=11.0)
    assert len(ledger.failures) == 2
    subject = Subject(service=None, url="", place="", num_inside=lambda: 0)  # type: ignore[arg-type]
    outage = _outage(subject, ledger, start_s=1.0)
    assert outage is not None
    assert (outage.killed_after_s, outage.answered_s) == (4.0, 5.0)
    assert _outage_check(outage, SoakSettings(restart_within_s=4.9)).verdict == "BAD"
    assert _outage_check(outage, SoakSettings(restart_within_s=5.1)).verdict == "good"
    ledger.back_s = None
    late = _outage(subject, ledger, start_s=1.0)
    assert late is not None
    assert _outage_check(late, SoakSettings()).found == "no answer any more"


def test_what_did_not_come_about_is_not_called_good():
    with served(ParrotRunner(num_slots=2, max_tokens=600, has_vision=False), max_waiting=20) as server:
        record, checks = soaked(server, seconds=0.05, cancel_share=0.0, disconnect_share=1e-9)
    assert checks["company was there"].verdict == "not shown"
    assert checks["memory flat"].verdict == "not shown"
    assert not record.ok


@pytest.mark.parametrize(
    "wrong", [{"num_streams": 0}, {"cancel_share": 0.6, "disconnect_share": 0.4}, {"seconds": 5, "kill_after_s": 5}]
)
def test_settings_that_make_no_run_are_refused(wrong):
    with pytest.raises(ConfigError):
        SoakSettings(**wrong)


def test_nobody_is_killed_where_there_are_no_ranks_and_short_slots_are_refused():
    with served(ParrotRunner(num_slots=2, max_tokens=60)) as server:
        with pytest.raises(ConfigError, match="nobody to kill"):
            soak(subject_of(server), SoakSettings(kill_after_s=1.0))
        with pytest.raises(RequestError, match="too short"):
            draw_questions(server.service, SoakSettings())


def _questions(number: int):
    with served(ParrotRunner(max_tokens=400)) as server:
        questions = draw_questions(server.service, SoakSettings(num_streams=number, questions_per_stream=1))
    assert len({question.secret for question in questions}) == number
    return questions


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(1800)
def test_two_ranks_one_killed_in_the_middle_no_wrong_answer_and_everything_given_back(tmp_path):
    from workbench.deployment import RestartingDeployment, RestartPolicy
    from workbench.placement import Layout
    from workbench.serving import open_service
    from workbench.serving.http import HttpServer, ServerSettings

    root = Path(__file__).resolve().parents[2] / "data" / "k3-tiny"
    events: list = []
    settings = SoakSettings(
        num_streams=6, seconds=30.0, max_answer_tokens=12, kill_after_s=6.0, restart_within_s=1500.0, timeout_s=900.0
    )
    with (
        RestartingDeployment.start(
            root,
            Layout(tp=2),
            precision="fp32",
            num_slots=4,
            max_tokens=700,
            has_spare=True,
            policy=RestartPolicy(backoff_s=0.05),
            on_event=lambda event: events.append((Subject.__dataclass_fields__["clock"].default(), event)),
        ) as deployment,
        open_service(deployment, root, prefix_pages=4, page_tokens=32) as service,
        HttpServer(service, ServerSettings(model="tiny", port=0)) as server,
    ):
        pids = deployment.pids
        subject = Subject.of(deployment, service, server, place="k3-tiny, tp2", prefix_pages=4, events=events)
        record = soak(subject, settings)
        assert not set(pids) & set(deployment.pids)
    checks = {check.name: check.verdict for check in record.checks}
    assert record.outage is not None
    assert {"spare ranks", "libraries", "joining", "weights", "cache"} <= set(record.outage.phases), record.render()
    for name in ("no secret in another's answer", "answers as alone", "no request fails", "pools as before"):
        assert checks[name] == "good", record.render()
    assert checks["service back after a kill"] == "good"
    assert record.counts["clear errors while ranks were replaced"] > 0
    assert all(not _is_there(pid) for pid in pids)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIG_DFL)
    except ProcessLookupError:
        return False
    return True
