"""Ranks that are replaced: how often, after which pauses, and what those who asked are told meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from multiprocessing import Pipe

import pytest
from rank_helpers import wait_gone
from serving_fakes import EchoRunner, echo_of, placed_image

from workbench.base import DeploymentError, LoadError, ModelRestartingError, WorkerDiedError
from workbench.deployment import RestartEvent, RestartingDeployment, RestartPolicy
from workbench.deployment import control as control_module
from workbench.deployment.control import Control, Member
from workbench.deployment.protocol import Hello
from workbench.deployment.supervise import RankProcess
from workbench.placement import Layout
from workbench.serving import Engine, GenerationRequest, SamplingParams

pytestmark = pytest.mark.timeout(300)


def request(prompt, max_tokens=4, **options) -> GenerationRequest:
    return GenerationRequest(token_ids=tuple(prompt), sampling=SamplingParams(max_tokens=max_tokens), **options)


def tokens_of(generation) -> list[int]:
    return [event.token_id for event in generation]


def until(condition, limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)


class FakeDeployment:
    def __init__(self) -> None:
        self.failure: DeploymentError | None = None
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


# the policy


def made(results, **options):
    """A restarting deployment whose starts give `results` one after another, and the pauses it made."""
    steps = iter(results)

    def make(_progress):
        result = next(steps)
        if isinstance(result, Exception):
            raise result
        return result

    deployment = RestartingDeployment(make, **options)
    pauses: list[float] = []
    deployment._pause = lambda seconds, _is_wanted: pauses.append(seconds)
    return deployment, pauses


def test_restarts_are_bounded_within_a_window_and_pauses_double_up_to_a_limit():
    now = [0.0]
    policy = RestartPolicy(max_restarts=4, window_s=100, backoff_s=1, max_backoff_s=3)
    fakes = [FakeDeployment() for _ in range(7)]
    deployment, pauses = made(fakes, policy=policy, clock=lambda: now[0])
    for n in range(4):
        now[0] += 10
        deployment.current.failure = WorkerDiedError(f"rank {n} died")
        deployment.recover()
    assert pauses == [1, 2, 3, 3]
    assert [fake.is_closed for fake in fakes] == [True] * 4 + [False] * 3
    deployment.current.failure = WorkerDiedError("rank 9 died")
    with pytest.raises(DeploymentError, match=r"not started again after 4 restarts in 100 s .*rank 9 died"):
        deployment.recover()
    now[0] = 115.0  # the first of them is too long ago to count
    deployment.recover()
    assert (deployment.num_restarts, deployment.current) == (5, fakes[5])


def test_a_restart_that_fails_counts_and_is_told():
    events: list[RestartEvent] = []
    last = FakeDeployment()
    starts = [FakeDeployment(), LoadError("shard-3 is gone"), last]
    deployment, pauses = made(starts, on_event=events.append)
    deployment.current.failure = WorkerDiedError("rank 0 died")
    deployment.recover()
    assert deployment.current is last
    assert [(event.kind, event.attempt) for event in events] == [
        ("broken", 0), ("restart failed", 1), ("restarted", 2),
    ]  # fmt: skip
    assert str(events[0].error) == "rank 0 died"
    assert str(events[1].error) == "shard-3 is gone"
    assert pauses == [1, 2]


@pytest.mark.parametrize("how", ["close", "unwanted"])
def test_a_pause_ends_when_nobody_wants_the_restart(how):
    is_wanted = [True]
    deployment = RestartingDeployment(lambda _progress: FakeDeployment(), policy=RestartPolicy(backoff_s=60))
    errors: list[Exception] = []

    def recover() -> None:
        try:
            deployment.recover(lambda: is_wanted[0])
        except DeploymentError as error:
            errors.append(error)

    thread = threading.Thread(target=recover)
    thread.start()
    if how == "close":
        deployment.close()
    is_wanted[0] = how == "close"
    thread.join(20)
    assert not thread.is_alive()
    assert "called off" in str(errors[0])


def test_loading_is_interrupted_when_nobody_wants_it():
    starts = []

    def make(progress):
        starts.append(True)
        if len(starts) == 2:
            deployment._closing.set()
            progress(None)
        return FakeDeployment()

    deployment = RestartingDeployment(make, policy=RestartPolicy(backoff_s=0))
    with pytest.raises(DeploymentError, match="called off"):
        deployment.recover()
    assert len(starts) == 2


# the engine


class MendingRunner(EchoRunner):
    """Breaks when told to, and is empty after it has been mended, which waits for `go`."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.go = threading.Event()
        self.num_recovered = 0
        self.is_hopeless = False

    def recover(self, is_wanted) -> None:
        while not self.go.wait(0.01):
            if not is_wanted():
                raise DeploymentError("called off")
        if self.is_hopeless:
            raise DeploymentError("given up")
        self.num_recovered += 1
        self.failure = None
        self.gate = None
        self.slots.clear()
        self.prompt_sizes.clear()
        self.features, self.pages = [{}], [{}]


def test_requests_in_flight_fail_at_once_and_later_ones_are_answered_by_empty_slots():
    runner = MendingRunner(num_slots=2)
    engine = Engine(runner, prefix_pages=8, page_tokens=2).start()
    images = [placed_image("a", 0, 3)]
    prompt = [5, 6, 7, 8, 9]
    first = engine.submit(request(prompt, 3, images=tuple(images)))
    expected = tokens_of(first)
    died = WorkerDiedError("rank 1 died")

    def gate():
        if len(runner.steps) > 9:
            runner.failure = died
            raise died

    runner.gate = gate
    generations = [engine.submit(request([n, n + 1], 2000)) for n in range(4)]
    for generation in generations:  # before anything is mended
        with pytest.raises(WorkerDiedError, match="rank 1 died"):
            tokens_of(generation)
    assert engine.is_recovering
    assert engine.error is None
    with pytest.raises(ModelRestartingError, match="starting again"):
        engine.submit(request([1]))
    runner.go.set()
    until(lambda: not engine.is_recovering)
    again = [engine.submit(request(prompt, 3, images=tuple(images))), engine.submit(request([3, 4], 5))]
    assert [tokens_of(generation) for generation in again] == [expected, echo_of([3, 4], 5)]
    assert again[0].num_cached == 0, "no page of the old ranks is taken for one of the new"
    assert engine.stats().num_restarts == runner.num_recovered == 1
    engine.stop()


def test_a_runner_that_breaks_while_nothing_is_asked_is_noticed_and_mended():
    runner = MendingRunner()
    engine = Engine(runner).start()
    runner.failure = WorkerDiedError("rank 0 died while idle")
    until(lambda: engine.is_recovering)
    runner.go.set()
    until(lambda: not engine.is_recovering)
    assert tokens_of(engine.submit(request([1, 2]))) == [1, 2, 1, 2]
    engine.stop()


def test_an_idle_engine_without_a_way_to_mend_its_runner_fails():
    runner = EchoRunner()
    engine = Engine(runner).start()
    runner.failure = WorkerDiedError("rank 0 died while idle")
    until(lambda: engine.error is not None)
    with pytest.raises(WorkerDiedError, match="while idle"):
        engine.submit(request([1]))
    engine.stop()


def test_an_engine_whose_runner_cannot_be_mended_says_so_to_all_that_come():
    runner = MendingRunner()
    runner.is_hopeless = True
    engine = Engine(runner).start()
    runner.failure = WorkerDiedError("rank 0 died")
    runner.go.set()
    until(lambda: engine.error is not None)
    with pytest.raises(DeploymentError, match="given up"):
        engine.submit(request([1]))
    engine.stop()


def test_an_engine_that_is_stopped_while_its_runner_is_being_mended_comes_to_an_end():
    runner = MendingRunner()
    engine = Engine(runner).start()
    runner.failure = WorkerDiedError("rank 0 died")
    until(lambda: engine.is_recovering)
    engine.stop()
    assert not engine.is_recovering


def test_the_server_is_alive_but_not_ready_while_its_model_starts_again():
    pytest.importorskip("uvicorn")
    from http_served import ask, served

    runner = MendingRunner()
    with served(runner) as server:
        assert server.get("/ready").status == 200
        runner.failure = WorkerDiedError("rank 0 died")
        until(lambda: server.get("/ready").status == 503)
        assert server.get("/ready").json == {"status": "restarting"}
        assert (server.get("/health").status, server.get("/health").json) == (200, {"status": "restarting"})
        got = server.post(ask())
        assert (got.status, got.error["code"]) == (503, "model_restarting")
        assert int(got.headers["retry-after"]) >= 1
        runner.go.set()
        until(lambda: server.get("/ready").status == 200)
        assert server.post(ask(max_tokens=2)).status == 200
        assert b"workbench_restarts_total 1.0" in server.get("/metrics").body


# ranks


@pytest.mark.parametrize("moment", ["idle", "asked"])
def test_a_rank_that_a_signal_holds_is_named_whether_it_is_asked_or_not(tmp_path, monkeypatch, moment):
    monkeypatch.setattr(control_module, "STOPPED_S", 0.3)
    monkeypatch.setattr(control_module, "TICK_S", 0.05)
    monkeypatch.setattr(control_module, "STATUS_WAIT_S", 0.1)
    sleeper = subprocess.Popen(["sleep", "60"], start_new_session=True)
    ours, theirs = Pipe()
    rank = RankProcess(0, sleeper, tmp_path / "log", tmp_path / "slate")
    control = Control([Member(Hello(rank=0, world_size=1, pid=sleeper.pid, host="h"), ours, rank)])
    try:
        os.kill(sleeper.pid, signal.SIGSTOP)
        if moment == "asked":
            with pytest.raises(DeploymentError, match="hangs during 'step'"):
                control.request("step", timeout_s=60)
        until(lambda: control.broken is not None)
        words = "nothing was asked of it" if moment == "idle" else "step"
        assert f"rank 0 (process {sleeper.pid} on h) hangs during '{words}': stopped by a signal" in str(control.broken)
        with pytest.raises(DeploymentError, match="stopped by a signal"):
            control.request("ping", timeout_s=5)
        assert sleeper.wait(5) == -signal.SIGKILL
    finally:
        control.close()
        theirs.close()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("layout", "sent"),
    [
        (Layout(), signal.SIGKILL),
        pytest.param(Layout(tp=2), signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param(Layout(tp=2), signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(Layout(), signal.SIGSTOP, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_rank_that_dies_or_hangs_in_mid_answer_is_named_replaced_and_answers_again(
    golden_root, prompts, layout, sent
):
    events: list[RestartEvent] = []
    prompt = prompts["p7"]
    asked = request(prompt["token_ids"], len(prompt["greedy_fp32"]))
    with RestartingDeployment.start(
        golden_root,
        layout,
        precision="fp32",
        num_slots=3,
        max_tokens=2000,
        policy=RestartPolicy(backoff_s=0.05),
        on_event=events.append,
    ) as deployment:
        engine = Engine(deployment).start()
        assert tokens_of(engine.submit(asked)) == prompt["greedy_fp32"]
        pids, victim = deployment.pids, layout.world_size - 1
        generations = [engine.submit(request([n, 5], 1900)) for n in range(3)]
        for generation in generations:
            next(iter(generation))
        os.kill(pids[victim], sent)
        for generation in generations:
            with pytest.raises(DeploymentError) as info:
                tokens_of(generation)
            assert f"rank {victim} (process {pids[victim]}" in str(info.value)
            assert "'step'" in str(info.value)
            assert "last operation: " in str(info.value)
        until(lambda: not engine.is_recovering, 120)
        assert engine.error is None
        assert tokens_of(engine.submit(asked)) == prompt["greedy_fp32"]
        wait_gone(pids, 1)
        assert not set(pids) & set(deployment.pids)
        assert [event.kind for event in events] == ["broken", "restarted"]
        engine.stop()
    assert not deployment.current.folder.exists()
