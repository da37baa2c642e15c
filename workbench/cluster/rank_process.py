"""One rank of a link measurement as a child of this process: started, told things, heard, and ended for certain."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import workbench
from workbench.cluster.child import MARK

__all__ = ["WORKER", "LocalRank", "Rank"]

WORKER = (sys.executable, "-m", "workbench.cluster.link_worker")
TAIL_CHARS = 300
Put = Callable[[dict[str, Any] | None], None]  # takes each event; None once the rank has ended


class Rank(Protocol):
    """A rank, wherever it runs. `start` may be called again after `kill`."""

    def start(self, who: Mapping[str, Any], put: Put) -> None: ...
    def tell(self, message: Mapping[str, Any]) -> None: ...
    def last_words(self) -> str: ...
    def kill(self) -> None: ...


class LocalRank:
    """A child on this host. `environment` adds to this process's own."""

    def __init__(self, command: Sequence[str] = WORKER, environment: Mapping[str, str] | None = None) -> None:
        self._command, self._environment = tuple(command), dict(environment or {})
        self._child: subprocess.Popen[str] | None = None
        self._stderr: IO[str] | None = None

    def start(self, who: Mapping[str, Any], put: Put) -> None:
        assert self._child is None, "kill comes before another start"
        root = str(Path(workbench.__file__).parents[1])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        rank = str(who["rank"])
        # torchrun's own variables would send the ranks to its store instead of theirs.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed by kill)
        self._child = subprocess.Popen(
            self._command,
            env={**inherited, "OMP_NUM_THREADS": "1", **self._environment, "PYTHONPATH": path, "RANK": rank},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        threading.Thread(target=_forward, args=(self._child.stdout, put), daemon=True).start()
        self.tell(who)

    def tell(self, message: Mapping[str, Any]) -> None:
        if self._child is None or self._child.stdin is None:
            return
        with contextlib.suppress(OSError):  # it has died; its missing answer says so
            self._child.stdin.write(json.dumps(message) + "\n")
            self._child.stdin.flush()

    def last_words(self) -> str:
        """How it ended: "ended with SIGSEGV", with the last line it wrote. Waits for the end, which is near."""
        if self._child is None or self._stderr is None:
            return "was not started"
        code = self._child.wait()
        how = f"exit code {code}"
        if code < 0:
            try:
                how = signal.Signals(-code).name
            except ValueError:
                how = f"signal {-code}"
        self._stderr.seek(0)
        lines = self._stderr.read()[-TAIL_CHARS:].strip().splitlines()
        return f"ended with {how}" + (f": {lines[-1]}" if lines else "")

    def kill(self) -> None:
        """End it, with whatever it started."""
        child, self._child = self._child, None
        if child is None:
            return
        if child.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(5.0)
        for stream in (child.stdin, child.stdout, self._stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def _forward(stream: IO[str], put: Put) -> None:
    with contextlib.suppress(ValueError, OSError):  # closed under our hands
        for line in stream:
            if line.startswith(MARK):
                put(json.loads(line.removeprefix(MARK)))
    put(None)
