"""One thread that talks to all ranks: sends each command, gathers the answers, and says exactly what went wrong.

Only this thread touches the connections, so an interrupt in a notebook can cut no message in half: the caller stops
waiting, the thread finishes the exchange, and the next command queues behind it.
"""

from __future__ import annotations

import copy
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from queue import Empty, SimpleQueue

from workbench.base import DeploymentError, WorkbenchError, WorkerDiedError
from workbench.deployment.protocol import Command, Done, Failed, Hello, Message, Progress, Status
from workbench.deployment.supervise import WatchedRank, kill_ranks

__all__ = ["Control", "Member"]

GRACE_S = 5.0  # how long the other ranks may take to answer once one has failed
EXIT_WAIT_S = 3.0  # how long a rank may take to be gone once its connection is
STATUS_WAIT_S = 2.0  # how long a rank may take to say what it is doing
STATUS_ID = -1
TICK_S = 0.5  # how often the ranks are looked at
STOPPED_S = 3.0  # how long a signal may hold a rank before it counts as hung


@dataclass(eq=False, slots=True)
class Member:
    """One rank as the handle knows it. `process` is None where somebody else started it, and nobody watches it."""

    hello: Hello
    connection: Connection
    process: WatchedRank | None

    @property
    def rank(self) -> int:
        return self.hello.rank

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.hello.pid} on {self.hello.host})"


@dataclass(eq=False, slots=True)
class _Job:
    name: str
    args: Sequence[Mapping[str, object]]
    timeout_s: float
    events: SimpleQueue[tuple[str, object]] = field(default_factory=SimpleQueue)


class Control:
    """Commands to all ranks, one after another.

    `broken` holds the error after which the ranks are gone: a rank that died or hung takes the others with it, because
    they would wait for it in a collective.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = sorted(members, key=lambda member: member.rank)
        self.broken: WorkbenchError | None = None
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._wake_reader, self._wake_writer = Pipe(duplex=False)
        self._waking = threading.RLock()  # a number of a closed file may belong to another one a moment later
        self._ids = itertools.count()
        self._is_closed = False
        self._closing = threading.Lock()
        self._stopped_since: dict[int, float] = {}
        self._thread = threading.Thread(target=self._run, name="workbench-control", daemon=True)
        self._thread.start()

    def request(
        self,
        name: str,
        args: Mapping[str, object] | Sequence[Mapping[str, object]] = (),
        *,
        timeout_s: float,
        on_progress: Callable[[object], None] | None = None,
    ) -> list[object]:
        """Answers of all ranks to a command, in order of rank. `args` are the same for all, or one mapping per rank.

        `timeout_s` runs anew with every sign of progress; `on_progress` gets those, in the caller's thread. Raises a
        rank's own error with the rank named, WorkerDiedError where one died, DeploymentError where one does not answer.
        """
        per_rank = [args] * len(self.members) if isinstance(args, Mapping) else list(args) or [{}] * len(self.members)
        assert len(per_rank) == len(self.members), (len(per_rank), len(self.members))
        job = _Job(name, per_rank, timeout_s)
        self._enqueue(job)
        while True:
            try:
                kind, value = job.events.get(timeout=1.0)
            except Empty:
                if not self._thread.is_alive() and job.events.empty():
                    raise self.broken or DeploymentError("the deployment is closed") from None
                continue
            if kind == "progress":
                if on_progress is not None:
                    on_progress(value)
            elif kind == "failed":
                assert isinstance(value, WorkbenchError)
                raise value
            else:
                assert isinstance(value, list)
                return value

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Ask the ranks to end, then end those that do not. Safe to call more than once and from any thread."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            self._jobs.put(None)
            self._wake()
            if self.broken is None:
                self._thread.join(timeout_s)
            processes = [member.process for member in self.members if member.process is not None]
            kill_ranks(processes)
            self._thread.join(timeout_s)
            for member in self.members:
                member.connection.close()
            if not self._thread.is_alive():  # not left to the collector: an error may hold on to all this for long
                with self._waking:
                    self._wake_writer.close()
                    self._wake_reader.close()

    def _enqueue(self, job: _Job) -> None:
        if self._is_closed:
            raise DeploymentError("the deployment is closed", next_step="Start another one")
        self._jobs.put(job)
        self._wake()

    def _wake(self) -> None:
        with self._waking:
            if not self._wake_writer.closed:
                self._wake_writer.send_bytes(b"")

    def _run(self) -> None:
        try:
            while True:
                ready = wait([self._wake_reader, *self._connections()], timeout=self._tick_s)
                if (stopped := self._long_stopped()) is not None:
                    self._break(self._stop(stopped, "nothing was asked of it"))
                    continue
                for member in self.members:
                    if member.connection in ready and self.broken is None:
                        self._receive(member)  # nothing is asked: a stray, or the end of a rank
                if self._wake_reader in ready:
                    self._wake_reader.recv_bytes()
                    job = self._jobs.get()
                    if job is None:
                        self._shut_down()
                        return
                    self._perform(job)
        except _Gone as gone:
            self._break(self._death(gone.member, "nothing was asked of it"))
            self._drain()
        except BaseException as error:
            self._break(DeploymentError(f"the control thread failed: {type(error).__name__}: {error}"))
            raise

    def _drain(self) -> None:
        """After a death between commands: answer every command with it until the handle is closed."""
        while (job := self._jobs.get()) is not None:
            job.events.put(("failed", copy.copy(self.broken)))

    def _perform(self, job: _Job) -> None:
        if self.broken is not None:
            job.events.put(("failed", copy.copy(self.broken)))
            return
        try:
            job.events.put(("done", self._exchange(job)))
        except _Gone as gone:
            job.events.put(("failed", self._break(self._death(gone.member, job.name))))
        except WorkbenchError as error:
            job.events.put(("failed", error))

    def _exchange(self, job: _Job) -> list[object]:
        command_id = next(self._ids)
        for member, args in zip(self.members, job.args, strict=True):
            self._send(member, Command(id=command_id, name=job.name, args=dict(args)), job)
        values: dict[int, object] = {}
        failures: list[Failed] = []
        answered: set[int] = set()
        deadline = time.monotonic() + job.timeout_s
        while len(answered) < len(self.members):
            left = max(0.0, deadline - time.monotonic())
            ready = wait(self._connections(), timeout=min(left, TICK_S))
            if (stopped := self._long_stopped()) is not None:
                raise self._break(self._stop(stopped, job.name))
            if not ready:
                if time.monotonic() < deadline:
                    continue
                if failures:
                    # The others wait for the failed rank inside a collective and will not come back.
                    raise self._break(_raised(failures[0]))
                raise self._break(self._hang(job, answered))
            for member in self.members:
                if member.connection not in ready:
                    continue
                message = self._receive(member)
                if message is None or message.id != command_id:
                    continue
                if isinstance(message, Progress):
                    job.events.put(("progress", message.value))
                    deadline = max(deadline, time.monotonic() + job.timeout_s)
                    continue
                answered.add(member.rank)
                if isinstance(message, Done):
                    values[member.rank] = message.value
                elif isinstance(message, Failed):
                    failures.append(message)
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if failures:
            self._check_in_step(failures[0])
            raise _raised(failures[0])
        return [values[member.rank] for member in self.members]

    def _check_in_step(self, failure: Failed) -> None:
        """A rank has failed, and all have answered. They may go on only where nobody is ahead of anybody.

        A rank that failed before a message that another has sent, or inside a collective that others have left, would
        take the next one for it and go on with the wrong numbers.
        """
        statuses = self._statuses(exclude=set())
        silent = [member.rank for member in self.members if member.rank not in statuses]
        text = f"ranks {silent} do not say where they are" if silent else _out_of_step(statuses)
        if text:
            broken = DeploymentError(f"{failure.error}; after that the ranks are out of step: {text}")
            broken.add_note(f"traceback of rank {failure.rank}:\n{failure.traceback}")
            raise self._break(broken)

    def _send(self, member: Member, command: Command, job: _Job) -> None:
        try:
            member.connection.send(command)
        except BlockingIOError:
            raise self._break(self._hang(job, {m.rank for m in self.members} - {member.rank})) from None
        except OSError:
            raise _Gone(member) from None

    def _receive(self, member: Member) -> Message | None:
        """The next message; None for one that the socket announced but did not hold. Raises _Gone at its end."""
        try:
            message: Message = member.connection.recv()
            return message
        except (EOFError, OSError):
            raise _Gone(member) from None

    @property
    def _tick_s(self) -> float | None:
        return TICK_S if self.broken is None else None

    def _long_stopped(self) -> Member | None:
        """A rank that a signal has held for STOPPED_S: it would keep the others waiting for ever.

        Ranks that were started elsewhere cannot be seen from here; those show in the time limit of a command.
        """
        if self.broken is not None:
            return None
        now = time.monotonic()
        for member in self.members:
            if member.process is None or not member.process.is_stopped:
                self._stopped_since.pop(member.rank, None)
            elif now - self._stopped_since.setdefault(member.rank, now) >= STOPPED_S:
                return member
        return None

    def _stop(self, member: Member, command: str) -> DeploymentError:
        """Error for a rank that a signal holds."""
        assert member.process is not None
        statuses = self._statuses(exclude={member.rank})
        alive = [f"rank {rank}: {_status_text(status)}" for rank, status in sorted(statuses.items())]
        text = f"{member} hangs during {command!r}: stopped by a signal for {STOPPED_S:g} s"
        return DeploymentError("\n".join([text, member.process.describe(), *alive]))

    def _connections(self) -> list[Connection]:
        return [] if self.broken is not None else [member.connection for member in self.members]

    def _death(self, member: Member, command: str) -> WorkerDiedError:
        """Error for a rank whose connection ended. It names the first that died, if several did at once."""
        how = member.process.exit_text(EXIT_WAIT_S) if member.process is not None else None
        if member.process is not None and how is None:
            how = f"closed its connection but is still {member.process.state()}"
        text = f"{member} died during {command!r}: {how or 'its connection ended'}"
        if member.process is not None and (hint := member.process.hint()):
            text += f"; {hint}"
        others = [m for m in self.members if m is not member and m.process is not None and m.process.exit_text()]
        if others:
            text += "; also gone: " + ", ".join(f"{m} ({m.process.exit_text()})" for m in others if m.process)
        details = member.process.describe() if member.process is not None else "its log is where it was started"
        statuses = self._statuses(exclude={member.rank, *(m.rank for m in others)})
        alive = [f"rank {rank}: {_status_text(status)}" for rank, status in sorted(statuses.items())]
        return WorkerDiedError("\n".join([text, details, *alive]))

    def _hang(self, job: _Job, answered: set[int]) -> DeploymentError:
        """Error for ranks that did not answer in time; the one that holds up the others comes first."""
        missing = [member for member in self.members if member.rank not in answered]
        statuses = self._statuses(exclude=answered)
        lines = []

        def standing(member: Member) -> tuple[bool, bool, int]:
            """Stopped before running, mute before talking, then by collectives entered."""
            is_stopped = member.process is not None and member.process.state() == "stopped"
            status = statuses.get(member.rank)
            return (not is_stopped, status is not None, status.num_collectives if status is not None else 0)

        order = sorted(missing, key=standing)
        for member in order:
            state = f", {member.process.state()}" if member.process is not None else ""
            if member.rank in statuses:
                lines.append(f"{member}{state}: {_status_text(statuses[member.rank])}")
            else:
                details = f"\n{member.process.describe()}" if member.process is not None else ""
                lines.append(f"{member}{state}: does not react at all{details}")
        return DeploymentError(
            f"no answer to {job.name!r} within {job.timeout_s:g} s from rank "
            + ", ".join(str(member.rank) for member in order)
            + "\n"
            + "\n".join(lines)
        )

    def _statuses(self, *, exclude: set[int]) -> dict[int, Status]:
        """What ranks say they are doing right now; those that say nothing are left out."""
        asked = []
        for member in self.members:
            if member.rank in exclude:
                continue
            try:
                member.connection.send(Command(id=STATUS_ID, name="status", args={}))
                asked.append(member)
            except OSError:
                continue
        statuses: dict[int, Status] = {}
        deadline = time.monotonic() + STATUS_WAIT_S
        while len(statuses) < len(asked) and (left := deadline - time.monotonic()) > 0:
            ready = wait([member.connection for member in asked], timeout=left)
            for member in list(asked):
                if member.connection in ready:
                    try:
                        message = member.connection.recv()
                    except (EOFError, OSError):
                        asked.remove(member)
                        continue
                    if isinstance(message, Status):
                        statuses[member.rank] = message
        return statuses

    def _break(self, error: WorkbenchError) -> WorkbenchError:
        """Remember the error and end all ranks; the rest of the deployment is of no use."""
        self.broken = error
        kill_ranks([member.process for member in self.members if member.process is not None])
        for member in self.members:
            member.connection.close()  # ranks started elsewhere end by themselves when the connection does
        return error

    def _shut_down(self) -> None:
        if self.broken is not None:
            return
        try:
            for member in self.members:
                member.connection.send(Command(id=next(self._ids), name="shutdown", args={}))
            deadline = time.monotonic() + 2.0
            open_members = list(self.members)
            while open_members and (left := deadline - time.monotonic()) > 0:
                for member in [m for m in open_members if m.connection in wait([m.connection], timeout=left)]:
                    try:
                        member.connection.recv()
                    except (EOFError, OSError):
                        open_members.remove(member)
        except OSError:
            return


class _Gone(Exception):
    """A rank's connection ended."""

    def __init__(self, member: Member) -> None:
        super().__init__(str(member))
        self.member = member


def _raised(failure: Failed) -> WorkbenchError:
    failure.error.add_note(f"traceback of rank {failure.rank}:\n{failure.traceback}")
    return failure.error


def _out_of_step(statuses: Mapping[int, Status]) -> str:
    """Where ranks that have all answered stand at different places of the same group; "" where they do not."""
    for rank, status in sorted(statuses.items()):
        if not status.is_between:
            return f"rank {rank} left {status.collective} unfinished"
    for name, ranks in sorted({key for status in statuses.values() for key in status.entered}):
        counts = {rank: statuses[rank].entered.get((name, ranks), 0) for rank in ranks if rank in statuses}
        if name.endswith("/receive"):
            continue
        if name.endswith("/send"):
            received = (name.removesuffix("send") + "receive", ranks)
            num_received = sum(status.entered.get(received, 0) for status in statuses.values())
            if sum(counts.values()) != num_received:
                return f"{sum(counts.values())} messages were sent over {list(ranks)}, {num_received} received"
        elif len(set(counts.values())) > 1:
            return f"operations of group {name} entered by rank: {counts}"
    return ""


def _status_text(status: Status) -> str:
    text = f"in {status.operation or 'no operation'}; last collective entered: {status.collective or 'none'}"
    return f"{text}\n{status.stack}" if status.stack else text
