"""Real processes over gloo for tests: started once, reused for every world size up to their number.

    results = shared_ranks().run(task, arg, world_size=4)      # [task(arg) on rank 0, ...], in rank order

`task` is a top-level function of a file that imports without pytest; it runs with the default process group of
`world_size` ranks in place. An exception on any rank is raised here with that rank's traceback; a rank that does not
answer in time is killed and named, with the last lines it wrote.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

__all__ = ["RankError", "Ranks", "shared_ranks"]

MOST_RANKS = 4
GRACE_S = 5.0  # what the other ranks get after the first one failed: most of them hang in a collective


class RankError(AssertionError):
    """A task failed on some ranks."""


class Ranks:
    """Worker processes that wait for tasks."""

    def __init__(self, number: int = MOST_RANKS, timeout_s: float = 120.0) -> None:
        self.number, self.timeout_s = number, timeout_s
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._world_size = 0
        self._epoch = 0  # counts the worlds: a rank joins anew whenever it hears a new one

    def run(
        self, task: Callable[..., Any], *args: Any, world_size: int = MOST_RANKS, timeout_s: float | None = None
    ) -> list[Any]:
        """Results of `task(*args)` on every rank of a world of `world_size`."""
        assert 1 <= world_size <= self.number
        if not self._processes:
            self._start()
        if world_size != self._world_size:
            self._world_size, self._epoch = world_size, self._epoch + 1
        source = Path(task.__code__.co_filename).resolve()
        rendezvous = str(Path(self._folder.name) / f"rendezvous-{self._epoch}")
        order = pickle.dumps((str(source), task.__name__, args, world_size, self._epoch, rendezvous))
        for connection in self._connections[:world_size]:
            connection.send_bytes(order)
        return self._collect(world_size, time.monotonic() + (timeout_s or self.timeout_s))

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.wait()
        self._connections, self._processes, self._world_size = [], [], 0

    def kill(self) -> None:
        """End every process by force; a run under way fails at once, as when they had died."""
        for process in self._processes:
            process.kill()

    def log_tail(self, rank: int, lines: int = 15) -> str:
        text = (Path(self._folder.name) / f"rank-{rank}.log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def _start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        for rank in range(self.number):
            ours, theirs = Pipe()
            command = [sys.executable, str(Path(__file__).resolve()), str(rank), str(theirs.fileno())]
            with (Path(self._folder.name) / f"rank-{rank}.log").open("wb") as log:
                process = subprocess.Popen(
                    command, env=environment, stdout=log, stderr=subprocess.STDOUT, pass_fds=[theirs.fileno()]
                )
            theirs.close()  # so that the end of the process is the end of the pipe
            self._processes.append(process)
            self._connections.append(ours)

    def _collect(self, world_size: int, deadline: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while len(results) + len(failures) < world_size:
            pending = {self._connections[r]: r for r in range(world_size) if r not in results and r not in failures}
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = pending[connection]
                try:
                    is_ok, value = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    is_ok, value = False, f"ended with {self._processes[rank].wait()}\n{self.log_tail(rank)}"
                (results if is_ok else failures)[rank] = value
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        silent = [r for r in range(world_size) if r not in results and r not in failures]
        if failures or silent:
            tails = {r: self.log_tail(r) for r in silent}
            self.close()  # the group is broken: the next run starts new processes
            texts = [f"rank {r}:\n{text}" for r, text in sorted(failures.items())]
            texts += [f"rank {r} did not answer; its last lines:\n{tail}" for r, tail in tails.items()]
            raise RankError("\n".join(texts))
        return [results[rank] for rank in range(world_size)]


_shared: Ranks | None = None


def shared_ranks() -> Ranks:
    """The processes of this test session; they end with it."""
    global _shared
    if _shared is None:
        _shared = Ranks()
        atexit.register(_shared.close)
    return _shared


def _load_task(source: str, name: str) -> Callable[..., Any]:
    module = sys.modules.get(Path(source).stem)
    if module is None:
        sys.path.insert(0, str(Path(source).parent))
        spec = importlib.util.spec_from_file_location(Path(source).stem, source)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return getattr(module, name)


def _work(rank: int, connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    from workbench.parallel import join_processes

    torch.set_num_threads(1)
    joined = 0  # epoch of the world this process is part of
    while True:
        try:
            source, name, args, world_size, epoch, rendezvous = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            if joined != epoch:
                if dist.is_initialized():
                    dist.destroy_process_group()
                join_processes(rank, world_size, init_method=f"file://{rendezvous}", timeout_s=60)
                joined = epoch
            answer = (True, _load_task(source, name)(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    _work(int(sys.argv[1]), Connection(int(sys.argv[2])))
