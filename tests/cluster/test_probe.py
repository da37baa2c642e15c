"""The probe child: a task that hangs, crashes or ends the process costs its own answer and no other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from workbench.cluster.child import MARK
from workbench.cluster.probe import run_probe

# A child of the same protocol whose tasks misbehave by name.
CHILD = f"""
import json, os, signal, sys, time
request = json.load(sys.stdin)
def say(event): print({MARK!r} + json.dumps(event), flush=True)
say({{"event": "ready"}})
print("a library's own line on standard output", flush=True)
for kind, argument in request["tasks"]:
    say({{"event": "start", "kind": kind, "argument": argument}})
    if argument == "hang": time.sleep(60)
    if argument == "crash": os.kill(os.getpid(), signal.SIGSEGV)
    if argument == "exit": sys.exit("driver says: no")
    say({{"event": "done", "kind": kind, "argument": argument, "value": os.getpid(), "error": "", "seconds": 0.5}})
"""


@pytest.fixture
def child(tmp_path: Path) -> list[str]:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    return [sys.executable, str(script)]


def test_results_come_back_in_order_from_one_child(child: list[str]) -> None:
    results = run_probe([("t", "a"), ("t", "b"), ("t", "c")], command=child)
    assert [x.argument for x in results] == ["a", "b", "c"]
    assert len({x.value for x in results}) == 1
    assert not any(x.error for x in results)


@pytest.mark.timeout(50)  # less than the task sleeps
def test_a_hanging_task_times_out_and_the_rest_runs_in_a_fresh_child(child: list[str]) -> None:
    before, hung, after = run_probe([("t", "a"), ("t", "hang"), ("t", "b")], command=child, time_limit_s=2.0)
    assert hung.error == "timed out after 2 s"
    assert hung.value is None
    assert before.error == after.error == ""
    assert before.value != after.value, "the hanging child was kept"


def test_a_crash_is_named_by_its_signal(child: list[str]) -> None:
    crashed, after = run_probe([("t", "crash"), ("t", "b")], command=child)
    assert crashed.error == "child ended with SIGSEGV"
    assert after.error == ""


def test_a_child_that_ends_early_leaves_its_last_words(child: list[str]) -> None:
    (ended,) = run_probe([("t", "exit")], command=child)
    assert ended.error == "child ended with exit code 1: driver says: no"


def test_a_child_that_cannot_start_answers_for_every_task() -> None:
    results = run_probe([("t", "a"), ("t", "b")], command=["/nonexistent/python"])
    assert len(results) == 2
    assert all(x.error.startswith("child did not start") for x in results)


def test_an_unknown_task_is_an_error_of_that_task() -> None:
    unknown, known = run_probe([("juggle", "3"), ("accelerators", "")])
    assert "unknown task 'juggle'" in unknown.error
    assert known.error == ""
    assert isinstance(known.value, list)


def slow_to_load(tmp_path: Path, seconds: float) -> list[str]:
    """A child that takes so long for what comes before its first task."""
    script = tmp_path / "slow.py"
    tasks = 'for kind, argument in request["tasks"]:'
    script.write_text(CHILD.replace(tasks, f"time.sleep({seconds})\n{tasks}"))
    return [sys.executable, str(script)]


def test_loading_does_not_count_against_the_first_task(tmp_path: Path) -> None:
    command = slow_to_load(tmp_path, 2.0)
    first, hung = run_probe([("t", "a"), ("t", "hang")], command=command, time_limit_s=1.0, load_limit_s=60.0)
    assert first.error == ""
    assert hung.error == "timed out after 1 s"


def test_a_child_that_never_loads_answers_for_every_task_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, started = slow_to_load(tmp_path, 60.0), list[object]()
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **options: started.append(args) or popen(*args, **options))
    results = run_probe([("t", "a"), ("t", "b"), ("t", "c")], command=command, load_limit_s=1.0)
    assert [x.error for x in results] == ["child did not start: still loading after 1 s"] * 3
    assert len(started) == 1


def test_an_error_without_a_message_still_has_a_text() -> None:
    child = "from workbench.cluster.child import answer_tasks\ndef perform(*_): raise NotImplementedError\n"
    (answer,) = run_probe([("t", "a")], command=[sys.executable, "-c", child + "answer_tasks(lambda: perform)"])
    assert answer.error == "NotImplementedError: (no message)"
