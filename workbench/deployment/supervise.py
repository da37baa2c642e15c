"""Worker processes on this machine: started, watched, described when dead, and ended for certain."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import workbench
from workbench.base import DeploymentError
from workbench.deployment.slate import read_slate

__all__ = ["RankProcess", "WatchedRank", "exit_text", "kill_ranks", "start_rank", "start_ranks"]

WORKER = "workbench.deployment.worker"
TAIL_LINES = 15
RANKS_PER_CORE, MIN_RANKS_ALLOWED = 8, 64  # far above what is of use; a mistyped layout must not flood the machine
TAIL_BYTES = 4096
HINTS: dict[int, str] = {
    signal.SIGKILL: "if nobody sent it, the kernel was out of memory",
    signal.SIGBUS: "a mapped file or shared memory segment was cut or could not be read",
}


class WatchedRank(Protocol):
    """A rank whose process can be looked at and ended, here or by a launcher on its host."""

    rank: int

    def exit_text(self, wait_s: float = 0.0) -> str | None: ...
    def hint(self) -> str: ...
    @property
    def is_stopped(self) -> bool: ...
    def state(self) -> str: ...
    def describe(self) -> str: ...
    def log_text(self) -> str: ...
    def kill(self) -> None: ...
    def reap(self, wait_s: float) -> None: ...


@dataclass(eq=False, slots=True)
class RankProcess:
    """One rank started here, with its log and its last words."""

    rank: int
    process: subprocess.Popen[bytes]
    log_path: Path
    slate_path: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def exit_text(self, wait_s: float = 0.0) -> str | None:
        """How it ended ("SIGKILL (signal 9)", "exit code 3"), None while it runs."""
        try:
            return exit_text(self.process.wait(wait_s) if wait_s else self.process.poll())
        except subprocess.TimeoutExpired:
            return None

    def hint(self) -> str:
        """What usually lies behind the signal that ended it; "" where there is nothing to say."""
        code = self.process.poll()
        return HINTS.get(-code, "") if code is not None else ""

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped it (SIGSTOP, SIGTSTP); one that a debugger holds for a look does not count."""
        return self._state_letter() == "T"

    def _state_letter(self) -> str:
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return ""

    def state(self) -> str:
        """What the system says of the running process: "running", "sleeping", "stopped", ..."""
        names = {
            "R": "running",
            "S": "sleeping",
            "D": "waiting for a device",
            "T": "stopped",
            "t": "stopped",
            "Z": "dead",
        }
        letter = self._state_letter()
        return names.get(letter, letter or "unknown")

    def describe(self) -> str:
        """Last operation, last collective and last log lines."""
        words = read_slate(self.slate_path)
        lines = [f"last operation: {words.operation or 'none'}"]
        lines.append(f"last collective entered: {words.collective or 'none'}")
        tail = log_tail(self.log_path)
        lines.append(f"last lines of its log:\n{tail}" if tail else "its log is empty")
        return "\n".join(lines)

    def log_text(self) -> str:
        """Everything it has printed."""
        return self.log_path.read_text(errors="replace")

    def kill(self) -> None:
        """End it with everything it started; stopped processes included."""
        if self.process.poll() is not None:
            return  # reaped: its number may belong to somebody else by now
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def reap(self, wait_s: float) -> None:
        """Wait until it is gone. One that is still there sits in an uninterruptible wait for a device; the kernel ends
        it when that returns."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(wait_s)


def start_ranks(
    world_size: int,
    address: str,
    authkey: bytes,
    folder: Path,
    *,
    threads: int,
    env: Mapping[str, str] | None = None,
    module: str = WORKER,
) -> list[RankProcess]:
    """Start `world_size` workers that report to the socket `address`; logs and last words go to `folder`.

    `module` is what a rank runs: the worker, or one that ends in its `main`.

    Each is the leader of its own session: an interrupt of a notebook kernel or a terminal does not reach it, and it can
    be ended together with whatever it started. The key goes through a pipe. Raises DeploymentError for more workers
    than a machine can be meant to run.
    """
    most = max(MIN_RANKS_ALLOWED, RANKS_PER_CORE * (os.cpu_count() or 1))
    if world_size > most:
        raise DeploymentError(
            "too many ranks for one machine",
            found=world_size,
            expected=f"at most {most}",
            next_step="Choose a smaller layout, or start the ranks on several hosts with torchrun",
        )
    ranks: list[RankProcess] = []
    # All ranks are on this host, so what they say need not leave it.
    local = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    try:
        for rank in range(world_size):
            ranks.append(
                start_rank(
                    rank,
                    address,
                    authkey,
                    folder,
                    env={**local, "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank), **(env or {})},
                    threads=threads,
                    module=module,
                )
            )
    except BaseException:
        kill_ranks(ranks)
        raise
    return ranks


def start_rank(
    rank: int,
    address: str,
    authkey: bytes,
    folder: Path,
    *,
    threads: int,
    env: Mapping[str, str],
    module: str = WORKER,
    options: Sequence[str] = (),
) -> RankProcess:
    """One worker of `start_ranks`. `env` has WORLD_SIZE and LOCAL_RANK; `options` are further ones of the worker."""
    root = str(Path(workbench.__file__).parents[1])
    common = {
        # The workers find this very package, and nothing a notebook has set for itself.
        "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
    }
    # torchrun's own variables would send the ranks to its store instead of theirs.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    log_path, slate_path = folder / f"rank{rank}.log", folder / f"rank{rank}.slate"
    worker = [sys.executable, "-m", module, "--controller", address, "--folder", str(folder)]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*worker, "--parent", str(os.getpid()), *options],
            env={**inherited, **common, "RANK": str(rank), **env},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    started = RankProcess(rank, process, log_path, slate_path)
    try:
        assert process.stdin is not None
        process.stdin.write(authkey.hex().encode() + b"\n")
        process.stdin.close()
    except BaseException:
        kill_ranks([started])
        raise
    return started


def kill_ranks(ranks: Sequence[WatchedRank], *, wait_s: float = 5.0) -> None:
    """End whatever still runs, with everything it started; stopped processes included."""
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.reap(wait_s)


def exit_text(returncode: int | None) -> str | None:
    """A return code in words, None for a process that runs."""
    if returncode is None:
        return None
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"{signal.Signals(-returncode).name} (signal {-returncode})"
    except ValueError:
        return f"signal {-returncode}"


def log_tail(path: Path) -> str:
    """The last lines of a log, indented; "" where there are none."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return "\n".join(f"    {line}" for line in lines[-TAIL_LINES:])
