"""Pools of ranks, here as small children without torch: who hangs, dies or fails is told apart, near and far."""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
from multiprocessing.connection import Pipe
from pathlib import Path

import pytest

from workbench.cluster.child import MARK
from workbench.cluster.rank_pool import RankPool
from workbench.cluster.rank_process import LocalRank
from workbench.cluster.relay import RelayedRank, serve_rank

# Speaks a rank's protocol and misbehaves as the step says, on the ranks it names.
CHILD = f"""
import json, os, signal, sys, time
def say(event): print({MARK!r} + json.dumps(event), flush=True)
who = json.loads(sys.stdin.readline())
print("a library's own line", flush=True)
if who["init_method"] == "silent" and who["rank"] == 1: time.sleep(60)
say({{"event": "joined"}})
for line in sys.stdin:
    step = json.loads(line)
    struck = who["rank"] in step["on"]
    if struck and step["fault"] == "deaf": time.sleep(60)
    say({{"event": "start", "step": step["step"]}})
    if struck and step["fault"] == "prepare": time.sleep(60)
    say({{"event": "enter", "step": step["step"]}})
    if struck and step["fault"] == "hang": time.sleep(60)
    if struck and step["fault"] == "crash": os.kill(os.getpid(), signal.SIGBUS)
    if struck and step["fault"] == "exit": sys.exit("driver says: no")
    error = "RuntimeError: no such dtype\\nmore" if struck and step["fault"] == "raise" else ""
    say({{"event": "done", "step": step["step"], "error": error, "pid": os.getpid(), "device": who["device"]}})
"""


@pytest.fixture
def command(tmp_path: Path) -> tuple[str, ...]:
    script = tmp_path / "rank.py"
    script.write_text(CHILD)
    return (sys.executable, str(script))


def pool_of(command: tuple[str, ...], *, meeting: str = "here", limit_s: float = 2.0, size: int = 3) -> RankPool:
    ranks = [LocalRank(command) for _ in range(size)]
    return RankPool(ranks, [f"npu:{i}" for i in range(size)], init_method=meeting, time_limit_s=limit_s)


def step(fault: str = "", *on: int) -> dict[str, object]:
    return {"fault": fault, "on": list(on)}


def test_every_rank_answers_and_knows_its_device(command: tuple[str, ...]) -> None:
    pool = pool_of(command, limit_s=30)
    try:
        assert pool.start(join_limit_s=60).failure == ""
        for _ in range(3):
            outcome = pool.run(step(), "sum")
            assert (outcome.failure, outcome.is_broken) == ("", False)
        assert [outcome.answers[rank]["device"] for rank in range(3)] == ["npu:0", "npu:1", "npu:2"]
    finally:
        pool.close()


@pytest.mark.timeout(50)  # less than a rank of these sleeps
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("deaf", "step 1, sum: rank 1 did not answer within 2 s; ranks 0 2 came back"),
        ("prepare", "step 1, sum: rank 1 began and did not enter within 2 s; ranks 0 2 came back"),
        ("hang", "step 1, sum: rank 1 entered and did not come back within 2 s; ranks 0 2 came back"),
        ("crash", "step 1, sum: rank 1 ended with SIGBUS"),
        ("exit", "step 1, sum: rank 1 ended with exit code 1: driver says: no"),
    ],
)
def test_who_is_missing_is_named_with_how_far_it_came(command: tuple[str, ...], fault: str, words: str) -> None:
    pool = pool_of(command)
    try:
        assert pool.start(join_limit_s=60).failure == ""
        pool._time_limit_s = 30.0
        assert pool.run(step(), "first").failure == ""
        pool._time_limit_s = 2.0
        outcome = pool.run(step(fault, 1), "sum")
    finally:
        pool.close()
    assert outcome.failure == words
    assert outcome.is_broken


def test_an_error_on_one_rank_is_told_once_and_breaks_nothing(command: tuple[str, ...]) -> None:
    pool = pool_of(command, limit_s=30)
    try:
        pool.start(join_limit_s=60)
        outcome = pool.run(step("raise", 0, 2), "sum")
        assert outcome.failure == "step 0, sum: ranks 0 2: RuntimeError: no such dtype"
        assert not outcome.is_broken
        assert pool.run(step(), "sum").failure == ""
    finally:
        pool.close()


def test_ranks_that_do_not_meet_are_named_and_ended(command: tuple[str, ...]) -> None:
    pool = pool_of(command, meeting="silent", size=2)
    try:
        outcome = pool.start(join_limit_s=3)
        children = [rank._child for rank in pool._ranks]  # type: ignore[attr-defined]
    finally:
        pool.close()
    assert "did not answer within 3 s" in outcome.failure
    assert "1" in outcome.failure
    assert outcome.is_broken
    assert all(child.poll() is not None for child in children), "a rank was left behind"


def test_a_command_that_cannot_start_is_told() -> None:
    pool = pool_of((sys.executable, "-c", "raise SystemExit('broken installation')"), size=2)
    try:
        outcome = pool.start(join_limit_s=60)
    finally:
        pool.close()
    assert "rank 0 ended with exit code 1: broken installation" in outcome.failure
    assert outcome.is_broken


def far_rank(command: tuple[str, ...]) -> tuple[RelayedRank, LocalRank, threading.Thread]:
    """A rank behind a launcher, which is a thread here."""
    ours, theirs = Pipe()
    local = LocalRank(command)
    thread = threading.Thread(target=serve_rank, args=(theirs, local), daemon=True)
    thread.start()
    return RelayedRank(ours), local, thread


def test_far_ranks_are_driven_like_near_ones_and_start_again_after_a_kill(command: tuple[str, ...]) -> None:
    far, local, thread = far_rank(command)
    pids = []
    for _ in range(2):
        pool = RankPool([LocalRank(command), far], ["cpu", "cpu"], init_method="here", time_limit_s=30)
        assert pool.start(join_limit_s=60).failure == ""
        outcome = pool.run(step(), "sum")
        assert outcome.failure == ""
        pids.append(outcome.answers[1]["pid"])
        pool.close()
    assert pids[0] != pids[1], "the old rank was kept"
    far.close()
    thread.join(20)
    assert not thread.is_alive()
    assert local._child is None


def test_the_last_words_of_a_far_rank_travel(command: tuple[str, ...]) -> None:
    far, _, _ = far_rank(command)
    pool = RankPool([LocalRank(command), far], ["cpu", "cpu"], init_method="here", time_limit_s=30)
    try:
        pool.start(join_limit_s=60)
        outcome = pool.run(step("exit", 1), "sum")
    finally:
        pool.close()
        far.close()
    assert outcome.failure == "step 0, sum: rank 1 ended with exit code 1: driver says: no"


def test_a_launcher_that_goes_away_ends_its_rank_and_is_told(command: tuple[str, ...]) -> None:
    ours, theirs = Pipe()
    far, events = RelayedRank(ours), queue.Queue()
    far.start({"rank": 1}, events.put)
    theirs.close()
    assert events.get(timeout=20) is None
    assert "the connection to its launcher ended" in far.last_words()

    ours, theirs = Pipe()
    local = LocalRank(command)
    thread = threading.Thread(target=serve_rank, args=(theirs, local), daemon=True)
    thread.start()
    far = RelayedRank(ours)
    far.start({"rank": 0, "init_method": "here", "device": "cpu"}, events.put)
    assert events.get(timeout=60) == {"event": "joined"}
    child = local._child
    assert child is not None
    with socket.socket(fileno=os.dup(ours.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)  # as when the leader's process ends
    child.wait(20)
    thread.join(20)
    assert not thread.is_alive()
