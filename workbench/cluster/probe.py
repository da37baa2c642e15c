"""Asking a child process about a device, with a time limit: a driver that hangs or crashes costs one answer, not us."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from workbench.cluster.child import MARK

__all__ = ["ProbeResult", "run_probe"]

DEFAULT_COMMAND = (sys.executable, "-m", "workbench.cluster.child")
LOAD_SECONDS = 300.0  # torch, and the plug-in of a device, which may compile itself the first time
STDERR_TAIL = 300  # characters of a dead child's last words that are kept


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeResult:
    """Answer to one task. `error` is "" where it worked, else the device's words, "timed out" or the child's signal."""

    kind: str
    argument: str
    value: object
    error: str
    seconds: float


def run_probe(
    tasks: Sequence[tuple[str, str]],
    *,
    device: str = "cpu",
    time_limit_s: float = 60.0,
    load_limit_s: float = LOAD_SECONDS,
    command: Sequence[str] = DEFAULT_COMMAND,
) -> list[ProbeResult]:
    """Results of `tasks` (kind, argument), in order, each given `time_limit_s` from the moment it starts.

    A task that hangs or takes the child down is recorded as failed, and the rest runs in a fresh child. What comes
    before the first task (torch, a device's plug-in) has `load_limit_s`; a child that does not get beyond that answers
    for all tasks.
    """
    results: list[ProbeResult] = []
    while len(results) < len(tasks):
        remaining = list(tasks[len(results) :])
        finished, failure = _run_child(remaining, device, time_limit_s, load_limit_s, command)
        results.extend(finished)
        if len(finished) < len(remaining):
            kind, argument = remaining[len(finished)]
            results.append(ProbeResult(kind=kind, argument=argument, value=None, error=failure, seconds=time_limit_s))
            if not finished and failure.startswith("child did not start"):  # it never will: do not try once per task
                results.extend(
                    ProbeResult(kind=k, argument=a, value=None, error=failure, seconds=0.0) for k, a in remaining[1:]
                )
    return results


def _run_child(
    tasks: list[tuple[str, str]], device: str, time_limit_s: float, load_limit_s: float, command: Sequence[str]
) -> tuple[list[ProbeResult], str]:
    """(results so far, why it stopped early). The reason is "" where all tasks were answered."""
    finished: list[ProbeResult] = []
    with tempfile.TemporaryFile("w+", errors="replace") as stderr:
        try:
            child = subprocess.Popen(
                list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, errors="replace"
            )
        except OSError as error:
            return finished, f"child did not start: {error}"
        assert child.stdin is not None
        assert child.stdout is not None
        lines: queue.Queue[str | None] = queue.Queue()
        reader = threading.Thread(target=_forward, args=(child.stdout, lines), daemon=True)
        reader.start()
        is_loaded = False
        try:
            try:
                child.stdin.write(json.dumps({"device": device, "tasks": tasks}))
                child.stdin.close()
            except OSError:
                pass  # it died before reading; its exit code below says how
            while len(finished) < len(tasks):
                try:
                    line = lines.get(timeout=time_limit_s if is_loaded else load_limit_s)
                except queue.Empty:
                    if is_loaded:
                        return finished, f"timed out after {time_limit_s:g} s"
                    return finished, f"child did not start: still loading after {load_limit_s:g} s"
                if line is None:
                    lost = "" if is_loaded else "child did not start: "
                    return finished, lost + _last_words(child, stderr)
                event = json.loads(line)
                kind = event.pop("event")
                is_loaded = is_loaded or kind == "start"
                if kind == "done":
                    finished.append(ProbeResult(**event))
            return finished, ""
        finally:
            child.kill()
            child.wait()
            reader.join(timeout=5)
            child.stdout.close()


def _forward(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        if line.startswith(MARK):
            lines.put(line.removeprefix(MARK))
    lines.put(None)


def _last_words(child: subprocess.Popen[str], stderr: IO[str]) -> str:
    code = child.wait()
    how = f"exit code {code}"
    if code < 0:
        try:
            how = signal.Signals(-code).name
        except ValueError:
            how = f"signal {-code}"
    stderr.seek(0)
    tail = stderr.read()[-STDERR_TAIL:].strip()
    return f"child ended with {how}" + (f": {tail}" if tail else "")
