"""The control thread over ranks that are played by threads: who answers what, and what goes wrong."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from workbench.base import DeploymentError, LoadError, RequestError, WorkerDiedError
from workbench.deployment import control as control_module
from workbench.deployment.control import Control, Member
from workbench.deployment.protocol import Command, Done, Failed, Hello, Progress, Status, portable

pytestmark = pytest.mark.timeout(60)

Script = Callable[[Connection, int, Command], None]


def answer(value: object) -> Script:
    return lambda connection, rank, command: connection.send(Done(id=command.id, rank=rank, value=value))


def fail(error: Exception) -> Script:
    def script(connection: Connection, rank: int, command: Command) -> None:
        connection.send(Failed(id=command.id, rank=rank, error=portable(error, rank), traceback="at line 7"))

    return script


def silent(_connection: Connection, _rank: int, _command: Command) -> None:
    """Never answers."""


def die(connection: Connection, _rank: int, _command: Command) -> None:
    connection.close()


def status_of(rank: int, command: Command) -> Status:
    text = f"#{rank + 4} all_reduce"
    return Status(id=command.id, rank=rank, operation="step", collective=text, num_collectives=rank + 5, stack="")


def play(connection: Connection, rank: int, script: Script) -> None:
    try:
        while True:
            command = connection.recv()
            if command.name == "status":
                connection.send(status_of(rank, command))
            elif command.name == "shutdown":
                connection.close()
                return
            else:
                script(connection, rank, command)
    except (EOFError, OSError):
        return


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setattr(control_module, "GRACE_S", 1.0)
    monkeypatch.setattr(control_module, "STATUS_WAIT_S", 1.0)
    made: list[Control] = []

    def start(*scripts: Script) -> Control:
        members = []
        for rank, script in enumerate(scripts):
            ours, theirs = Pipe()
            threading.Thread(target=play, args=(theirs, rank, script), daemon=True).start()
            members.append(Member(Hello(rank=rank, world_size=len(scripts), pid=40 + rank, host="h"), ours, None))
        made.append(Control(list(reversed(members))))
        return made[-1]

    yield start
    for control in made:
        control.close()


def test_answers_come_in_order_of_rank_whatever_order_the_ranks_have(make):
    def slow(connection, rank, command):
        time.sleep(0.05)
        answer("slow")(connection, rank, command)

    control = make(slow, answer("fast"), answer("third"))
    assert control.request("x", timeout_s=5) == ["slow", "fast", "third"]


def test_arguments_may_differ_by_rank(make):
    def echo(connection, rank, command):
        connection.send(Done(id=command.id, rank=rank, value=command.args["n"]))

    control = make(echo, echo)
    assert control.request("x", {"n": 3}, timeout_s=5) == [3, 3]
    assert control.request("x", [{"n": 5}, {"n": 6}], timeout_s=5) == [5, 6]


def test_progress_reaches_the_caller_in_its_own_thread_and_holds_off_the_timeout(make):
    def loading(connection, rank, command):
        for part in range(4):
            time.sleep(0.3)
            connection.send(Progress(id=command.id, rank=rank, value=part))
        answer("loaded")(connection, rank, command)

    seen = []
    control = make(loading)
    values = control.request("load", timeout_s=0.9, on_progress=lambda v: seen.append((v, threading.get_ident())))
    assert values == ["loaded"]
    assert seen == [(part, threading.get_ident()) for part in range(4)]


def test_answers_to_an_abandoned_command_are_dropped(make):
    def stray(connection, rank, command):
        connection.send(Done(id=command.id - 100, rank=rank, value="old"))
        connection.send(Status(id=-1, rank=rank, operation="", collective="", num_collectives=0, stack=""))
        answer("new")(connection, rank, command)

    control = make(stray, stray)
    assert [control.request("x", timeout_s=5) for _ in range(3)] == [["new", "new"]] * 3


def test_an_error_keeps_its_type_names_the_rank_and_leaves_the_ranks_usable(make):
    calls = iter([True, False])

    def sometimes(connection, rank, command):
        if next(calls):
            fail(LoadError("no bytes", where="shard-2", next_step="Look"))(connection, rank, command)
        else:
            answer("fine")(connection, rank, command)

    control = make(answer(0), sometimes)
    with pytest.raises(LoadError, match=r"^shard-2: rank 1: no bytes\. Look") as info:
        control.request("load", timeout_s=5)
    assert "at line 7" in info.value.__notes__[0]
    assert control.request("load", timeout_s=5) == [0, "fine"]


def test_a_foreign_exception_becomes_a_deployment_error_with_its_name(make):
    with pytest.raises(DeploymentError, match="rank 0: ZeroDivisionError: by zero"):
        make(fail(ZeroDivisionError("by zero"))).request("x", timeout_s=5)


def test_ranks_that_wait_for_a_failed_one_do_not_hold_up_its_error(make):
    control = make(silent, fail(RequestError("bad ids")))
    with pytest.raises(RequestError, match="rank 1: bad ids"):
        control.request("step", timeout_s=300)  # whoever waits for the silent one meets the time limit of these tests
    with pytest.raises(RequestError, match="bad ids"):
        control.request("step", timeout_s=30)


def test_a_dead_rank_is_named_with_what_the_others_were_doing_and_stays_the_reason(make):
    control = make(silent, die, silent)
    for command in ("step", "ping"):
        with pytest.raises(WorkerDiedError) as info:
            control.request(command, timeout_s=30)
        text = str(info.value)
        assert text.startswith("rank 1 (process 41 on h) died during 'step'")
        assert "rank 0: in step; last collective entered: #4 all_reduce" in text
        assert "rank 2: in step" in text


def test_death_outranks_the_errors_it_causes_in_other_ranks(make):
    def late_death(connection, rank, command):
        time.sleep(0.1)
        die(connection, rank, command)

    control = make(fail(RuntimeError("connection closed by peer")), late_death)
    with pytest.raises(WorkerDiedError, match="rank 1 "):
        control.request("step", timeout_s=30)


def test_a_rank_that_dies_while_nothing_is_asked_is_reported_at_the_next_command(make):
    def leave_later(connection, rank, command):
        answer(1)(connection, rank, command)
        connection.close()

    control = make(leave_later)
    assert control.request("x", timeout_s=5) == [1]
    deadline = time.monotonic() + 5
    while control.broken is None and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(WorkerDiedError, match="nothing was asked of it"):
        control.request("x", timeout_s=5)


def test_a_hang_names_the_rank_that_lags_first_and_what_each_waits_in(make):
    control = make(silent, answer(1), silent)
    with pytest.raises(DeploymentError) as info:
        control.request("step", timeout_s=0.3)
    text = str(info.value)
    assert text.startswith("no answer to 'step' within 0.3 s from rank 0, 2")
    assert "rank 0 (process 40 on h): in step; last collective entered: #4 all_reduce" in text


def test_a_rank_that_does_not_react_at_all_comes_first(make):
    block = threading.Event()

    def stopped(_connection, _rank, _command):
        block.wait(10)

    control = make(silent, stopped)
    with pytest.raises(DeploymentError, match="from rank 1, 0") as info:
        control.request("step", timeout_s=0.3)
    assert "rank 1 (process 41 on h): does not react at all" in str(info.value)
    block.set()


def test_closing_twice_is_harmless_and_a_closed_control_refuses(make):
    control = make(answer(1), answer(2))
    control.close()
    control.close()
    with pytest.raises(DeploymentError, match="closed"):
        control.request("x", timeout_s=5)


def test_a_closed_control_has_no_file_open_though_something_holds_on_to_it(make):
    control = make(answer(1), answer(2))
    control.close()
    files = (control._wake_reader, control._wake_writer, *(member.connection for member in control.members))
    assert all(file.closed for file in files)


def test_many_threads_may_ask_at_once(make):
    def echo(connection, rank, command):
        connection.send(Done(id=command.id, rank=rank, value=command.args["n"]))

    control = make(echo, echo)
    results: dict[int, object] = {}

    def ask(n: int) -> None:
        results[n] = control.request("x", {"n": n}, timeout_s=5)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert results == {n: [n, n] for n in range(24)}


def step_status(rank: int, entered: dict, *, is_between: bool = True) -> Status:
    return Status(
        id=-1, rank=rank, operation="", collective=f"#9 of rank {rank}", num_collectives=0, stack="",
        entered=entered, is_between=is_between,
    )  # fmt: skip


TP, PP = ("tp", (0, 1)), (0, 2)


@pytest.mark.parametrize(
    ("entered", "words"),
    [
        ([{TP: 4}, {TP: 4}], ""),
        ([{}, {}], ""),
        ([{TP: 4}, {TP: 3}], r"group tp entered by rank: \{0: 4, 1: 3\}"),
        ([{TP: 1}, {}], r"\{0: 1, 1: 0\}"),
        ([{TP: 4}, {TP: 4}, {("tp", (2, 3)): 7}, {("tp", (2, 3)): 6}], r"\{2: 7, 3: 6\}"),
        ([{("pp/send", PP): 2}, {}, {("pp/receive", PP): 2}], ""),
        ([{("pp/send", PP): 2}, {}, {("pp/receive", PP): 1}], r"2 messages were sent over \[0, 2\], 1 received"),
        ([{("pp/send", PP): 1}, {}, {}], "1 messages were sent"),
    ],
)
def test_ranks_that_stand_at_different_places_of_a_group_are_out_of_step(entered, words):
    statuses = {rank: step_status(rank, each) for rank, each in enumerate(entered)}
    found = control_module._out_of_step(statuses)
    assert bool(found) == bool(words)
    assert re.search(words, found)


def test_a_rank_that_left_a_collective_unfinished_is_out_of_step():
    statuses = {0: step_status(0, {TP: 4}), 1: step_status(1, {TP: 4}, is_between=False)}
    assert control_module._out_of_step(statuses) == "rank 1 left #9 of rank 1 unfinished"


def test_a_failure_that_leaves_the_ranks_out_of_step_ends_the_deployment(make, monkeypatch):
    monkeypatch.setattr(
        control_module, "_out_of_step", lambda statuses: f"{len(statuses)} asked" if len(statuses) == 2 else ""
    )
    control = make(answer(0), fail(RequestError("bad picture")))
    with pytest.raises(DeploymentError, match=r"rank 1: bad picture; after that the ranks are out of step: 2 asked"):
        control.request("encode", timeout_s=5)
    assert control.broken is not None
