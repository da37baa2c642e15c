"""One rank as a process: joins its handle, then does what it is told until told to stop or left alone.

    python -m workbench.deployment.worker --controller SOCKET --folder DIR --parent PID   started by Deployment.start
    torchrun --nproc-per-node=2 -m workbench.deployment.worker --controller HOST:PORT --authkey-file FILE

RANK, WORLD_SIZE and LOCAL_RANK come from the environment, as torchrun sets them. A thread reads the control connection
and nothing else: it notices at once when the handle goes away, also while the rank computes or waits in a collective,
and ends the process then. (The kernel's parent-death signal would not do: it fires when the *thread* that started the
rank ends.) torch is imported by the first command that needs it.
"""

from __future__ import annotations

import argparse
import os
import pickle
import shutil
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from workbench.base import DeploymentError
from workbench.deployment.protocol import (
    Command,
    Done,
    Failed,
    Hello,
    Progress,
    Status,
    connect,
    parse_address,
    portable,
)
from workbench.deployment.records import Phase
from workbench.deployment.slate import Slate

if TYPE_CHECKING:
    from workbench.parallel.collectives import CollectiveLog, CollectiveRecord

__all__ = ["PhaseClock", "Worker", "main"]

ORPHAN_POLL_S = 1.0
STACK_FRAMES = 6


class PhaseClock:
    """Where a rank's time goes from its start on, in phases by name."""

    def __init__(self) -> None:
        self.phases: dict[str, Phase] = {}
        self._wall_s, self._processor_s = time.perf_counter() - _age_s(), 0.0

    def end(self, name: str) -> None:
        """A phase ends here, and the next one begins."""
        wall_s, processor_s = time.perf_counter(), time.process_time()
        self.phases[name] = Phase(seconds=wall_s - self._wall_s, processor_s=processor_s - self._processor_s)
        self.begin()

    def begin(self) -> None:
        """What was since the last phase belongs to none."""
        self._wall_s, self._processor_s = time.perf_counter(), time.process_time()


def _age_s() -> float:
    """Seconds since this process began; 0 where the system does not tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0


class Worker:
    """Reads commands in one thread and carries them out in another, the main one."""

    def __init__(
        self,
        connection: Connection,
        *,
        rank: int,
        world_size: int,
        local_rank: int,
        folder: Path | None,
        owns_folder: bool = False,
    ) -> None:
        """`owns_folder`: no other rank's words go to `folder`."""
        self.rank, self.world_size, self.local_rank, self.folder = rank, world_size, local_rank, folder
        self.slate = Slate(folder / f"rank{rank}.slate" if folder is not None else None)
        self._owns_folder = owns_folder or rank == 0
        self._connection = connection
        self._sending = threading.Lock()
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._parent = os.getppid()
        self._progress_id = -1
        self.phases = PhaseClock()
        self._log: CollectiveLog | None = None
        self._entered: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def run(self) -> None:
        """Serve until "shutdown"; the process then ends without torch's own teardown, which may wait for dead peers."""
        self._send(Hello(rank=self.rank, world_size=self.world_size, pid=os.getpid(), host=socket.gethostname()))
        threading.Thread(target=self._read, name="control", daemon=True).start()
        self.phases.end("package")
        handler = None
        while True:
            command = self._commands.get()
            if command.name == "shutdown":
                self._leave(0)
            self.phases.begin()
            try:
                if handler is None:
                    from workbench.deployment.commands import RankCommands

                    handler = RankCommands(self)
                    self.phases.end("libraries")
                self.slate.operation(f"{command.name} (command {command.id})")
                self._progress_id = command.id
                value = handler.carry_out(command.name, command.args)
                message: Done | Failed = Done(id=command.id, rank=self.rank, value=value)
            except Exception as error:
                traceback.print_exc()  # into this rank's log as well
                message = self._failure(command, error)
            self.slate.operation(f"waiting for a command after {command.name} (command {command.id})")
            try:
                self._send(message)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                self._send(self._failure(command, DeploymentError(f"the answer cannot be sent: {error}")))

    def watch(self, log: CollectiveLog) -> None:
        """Note every operation that `log` records from now on."""
        self._log = log
        log.listener = self._enter

    def _enter(self, record: CollectiveRecord) -> None:
        self.slate.collective(str(record))
        # The two ends of a message name it differently, so each end is counted for itself.
        is_message = record.name in ("send", "receive")
        self._entered[f"{record.group}/{record.name}" if is_message else record.group, record.ranks] += 1

    def progress(self, value: object) -> None:
        """Report progress of the command in hand."""
        self._send(Progress(id=self._progress_id, rank=self.rank, value=value))

    def _failure(self, command: Command, error: Exception) -> Failed:
        text = "".join(traceback.format_exception(error))
        return Failed(id=command.id, rank=self.rank, error=portable(error, self.rank), traceback=text)

    def _send(self, message: object) -> None:
        with self._sending:
            self._connection.send(message)

    def _read(self) -> None:
        main_thread = threading.main_thread().ident
        try:
            while True:
                # A child that the handle forked keeps its sockets open after its death, so the end of the connection
                # alone is not enough where the handle started us.
                if not self._connection.poll(ORPHAN_POLL_S):
                    if self.folder is not None and os.getppid() != self._parent:
                        break
                    continue
                command: Command = self._connection.recv()
                if command.name == "status":
                    self._send(self._status(command.id, main_thread))
                else:
                    self._commands.put(command)
        except (EOFError, OSError):
            pass
        except BaseException:
            traceback.print_exc()
        print(f"rank {self.rank}: the handle is gone, leaving", file=sys.stderr, flush=True)
        if self.folder is not None and self._owns_folder:
            shutil.rmtree(self.folder, ignore_errors=True)  # nobody is left to read it
        self._leave(1)

    def _status(self, command_id: int, main_thread: int | None) -> Status:
        frame = sys._current_frames().get(main_thread or 0)
        frames = traceback.format_stack(frame)[-STACK_FRAMES:] if frame is not None else []
        words = self.slate.words
        return Status(
            id=command_id,
            rank=self.rank,
            operation=words.operation,
            collective=words.collective,
            num_collectives=words.num_collectives,
            stack="".join(frames).rstrip(),
            entered=dict(self._entered),
            is_between=self._log is None or self._log.is_last_finished,
        )

    def _leave(self, code: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m workbench.deployment.worker", description=__doc__)
    parser.add_argument("--controller", required=True, help="HOST:PORT of the handle, or the path of its socket")
    parser.add_argument("--authkey-file", type=Path, help="file with the key in hexadecimal; default: a line on stdin")
    parser.add_argument("--folder", type=Path, help="where logs and last words go; set by Deployment.start")
    parser.add_argument("--owns-folder", action="store_true", help="no other rank uses that folder; set by launchers")
    parser.add_argument("--parent", type=int, help="process that started this one; set by Deployment.start")
    parser.add_argument("--connect-timeout", type=float, default=120.0, metavar="S", help="wait so long for the handle")
    options = parser.parse_args(argv)
    authkey = read_key(options.authkey_file)
    rank = int(os.environ.get("RANK", "0"))
    try:
        connection = connect(
            parse_address(options.controller),
            authkey,
            timeout_s=options.connect_timeout,
            is_wanted=lambda: options.parent is None or os.getppid() == options.parent,
        )
    except DeploymentError:
        if options.folder is not None and os.getppid() != options.parent:
            shutil.rmtree(options.folder, ignore_errors=True)  # nobody is left to read it
        raise
    Worker(
        connection,
        rank=rank,
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        local_rank=int(os.environ.get("LOCAL_RANK", str(rank))),
        folder=options.folder,
        owns_folder=options.owns_folder,
    ).run()


def read_key(path: Path | None) -> bytes:
    """The key in hexadecimal, from a file or a line on stdin. Raises DeploymentError for one that others may read."""
    if path is not None and path.stat().st_mode & 0o077:
        raise DeploymentError(
            "others may read this key", where=path, found=f"mode {path.stat().st_mode & 0o777:o}", next_step="chmod 600"
        )
    text = path.read_text() if path is not None else sys.stdin.readline()
    try:
        return bytes.fromhex(text.strip())
    except ValueError:
        raise DeploymentError("the key is not hexadecimal", where=path or "stdin") from None


if __name__ == "__main__":
    main()
