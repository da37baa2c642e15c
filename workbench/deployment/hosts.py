"""Ranks on several hosts: torchrun starts a launcher for each, and that of rank 0 tells the others what to start.

    torchrun --nnodes=2 --node-rank=0 --nproc-per-node=8 --master-addr=HEAD -m workbench.cli serve DIR
    torchrun --nnodes=2 --node-rank=1 --nproc-per-node=8 --master-addr=HEAD -m workbench.cli serve DIR

The launcher of rank 0 runs the command; the others wait here. Each keeps its ranks as children, so that deployments may
come one after another, and ranks that died be started again. Launchers meet through torchrun's store, where the key
lies with which they prove themselves to each other, as ranks then do to their handle; nothing is encrypted, and whoever
reaches that store may read it: use a private network.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType

from workbench.base import DeploymentError, WorkbenchError
from workbench.cluster.torchrun import TorchrunPlace, free_port, torchrun_store
from workbench.deployment.control import Control
from workbench.deployment.gather import gather_ranks
from workbench.deployment.protocol import Door, connect
from workbench.deployment.started import StartedRanks, Timeouts, starting_on
from workbench.deployment.supervise import WORKER, RankProcess, WatchedRank, kill_ranks, start_rank

__all__ = ["Hosts", "RemoteRank", "follow", "leading"]

DOOR_KEY, DOOR_PORT = "workbench/deployment/key", "workbench/deployment/port"
JOIN_S = 300.0  # the other hosts may still be starting
LOOK_S = 0.2  # how often a launcher looks at its ranks, and whether torchrun is there
HELLO_S = 10.0
REPORT_S = 60.0  # how long a launcher may take to say that it has started a rank


@dataclass(frozen=True, kw_only=True, slots=True)
class LauncherHello:
    """First message of a launcher."""

    place: TorchrunPlace
    host: str
    pid: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StartRank:
    """Start a rank, known by `id` from now on. `threads` None: the cores of the host, divided among its ranks."""

    id: int
    address: str
    authkey: bytes
    threads: int | None
    env: Mapping[str, str]
    module: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EndRank:
    id: int


@dataclass(frozen=True, slots=True)
class Leave:
    """All is done, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankNews:
    """What a launcher sees of a rank, told whenever it changes; `exit_text` once it has ended."""

    id: int
    pid: int = 0
    state: str = "running as far as is known"
    is_stopped: bool = False
    exit_text: str | None = None
    hint: str = ""
    words: str = ""  # last operation, collective and log lines, with the end


@dataclass(frozen=True, kw_only=True, slots=True)
class LauncherGone:
    """A launcher says why it leaves."""

    reason: str


@dataclass(eq=False)
class RemoteRank:
    """A rank that a launcher keeps; `news` is the last that was heard of it."""

    rank: int
    launcher: _Launcher
    news: RankNews
    changed: threading.Condition = field(default_factory=threading.Condition)

    def exit_text(self, wait_s: float = 0.0) -> str | None:
        with self.changed:
            self.changed.wait_for(lambda: self._end is not None, wait_s)
            return self._end

    @property
    def _end(self) -> str | None:
        return self.news.exit_text or self.launcher.lost

    def hint(self) -> str:
        return self.news.hint

    @property
    def is_stopped(self) -> bool:
        return self.news.is_stopped

    def state(self) -> str:
        return self.news.state

    def describe(self) -> str:
        return self.news.words or f"its log is on {self.launcher.hello.host}"

    def log_text(self) -> str:
        raise DeploymentError(f"the log of rank {self.rank} is on {self.launcher.hello.host}", where="its launcher")

    def kill(self) -> None:
        if self._end is None:
            self.launcher.send(EndRank(id=self.news.id))

    def reap(self, wait_s: float) -> None:
        self.exit_text(wait_s)
        self.launcher.forget(self.news.id)

    def hear(self, news: RankNews | None) -> None:
        """More of it; None where its launcher is lost."""
        with self.changed:
            self.news = news or self.news
            self.changed.notify_all()


class _Launcher:
    """The launcher of one rank, as the leader knows it. `lost` says how it ended, once it has."""

    def __init__(self, hello: LauncherHello, connection: Connection) -> None:
        self.hello, self._connection = hello, connection
        self.lost: str | None = None
        self._sending = threading.Lock()
        self._ranks: dict[int, RemoteRank] = {}
        threading.Thread(target=self._read, name="workbench-launcher", daemon=True).start()

    def __str__(self) -> str:
        place = self.hello.place
        return f"launcher of rank {place.rank} (process {self.hello.pid} on {self.hello.host}, node {place.node})"

    def start(self, order: StartRank) -> RemoteRank:
        """Raises DeploymentError where the launcher is lost."""
        if self.lost is not None:
            raise DeploymentError(f"rank {self.hello.place.rank} cannot be started: {self.lost}")
        rank = RemoteRank(self.hello.place.rank, self, RankNews(id=order.id))
        self._ranks[order.id] = rank
        self.send(order)
        return rank

    def send(self, message: object) -> None:
        with self._sending, contextlib.suppress(OSError, ValueError):  # gone: the reader says so
            self._connection.send(message)

    def forget(self, rank_id: int) -> None:
        self._ranks.pop(rank_id, None)

    def _read(self) -> None:
        reason = f"its {self} is gone"
        try:
            while True:
                message = self._connection.recv()
                if isinstance(message, RankNews) and (rank := self._ranks.get(message.id)) is not None:
                    rank.hear(message)
                elif isinstance(message, LauncherGone):
                    reason = message.reason
                    break
        except (EOFError, OSError):
            pass
        self.lost = reason
        for rank in list(self._ranks.values()):
            rank.hear(None)


class Hosts:
    """The hosts that torchrun has given this process, which leads them. `close` ends all launchers."""

    def __init__(self, place: TorchrunPlace, launchers: list[_Launcher], store: object) -> None:
        self._place, self._launchers = place, launchers
        self._store = store  # it may be this very process that keeps it for the others
        self._ids = itertools.count()

    @classmethod
    def gather(cls, place: TorchrunPlace, *, join_s: float = JOIN_S) -> Hosts:
        """Wait for the launchers of all other ranks. Raises DeploymentError for those that stay away."""
        store, key = torchrun_store(), secrets.token_bytes(32)
        entries: SimpleQueue[Connection] = SimpleQueue()
        door = _door(place, key, entries)
        launchers: dict[int, _Launcher] = {}
        until = time.monotonic() + join_s
        try:
            store.set(DOOR_KEY, key.hex())
            store.set(DOOR_PORT, str(door.address[1]))
            while len(launchers) < place.world_size - 1:
                try:
                    connection = entries.get(timeout=max(0.0, until - time.monotonic()))
                except Empty:
                    missing = sorted(set(range(1, place.world_size)) - set(launchers))
                    raise DeploymentError(
                        f"the launchers of ranks {missing} did not come within {join_s:g} s",
                        next_step="Start the same command with torchrun on every host",
                    ) from None
                hello: object = None
                with contextlib.suppress(EOFError, OSError):  # it ended meanwhile
                    hello = connection.recv() if connection.poll(HELLO_S) else None
                if not isinstance(hello, LauncherHello) or hello.place.rank in launchers:
                    raise DeploymentError("a process with the right key did not report as a launcher of this version")
                launchers[hello.place.rank] = _Launcher(hello, connection)
        except BaseException:
            for launcher in launchers.values():
                launcher.send(Leave())
            raise
        finally:
            door.close()
        return cls(place, [launchers[rank] for rank in sorted(launchers)], store)

    @property
    def world_size(self) -> int:
        return self._place.world_size

    def start(
        self, *, timeouts: Timeouts, threads: int | None, env: Mapping[str, str] | None, module: str = WORKER
    ) -> StartedRanks:
        """As `StartedRanks.start`, a rank at each launcher, ours included."""
        place, authkey = self._place, secrets.token_bytes(32)
        folder = Path(tempfile.mkdtemp(prefix="workbench-"))
        entries: SimpleQueue[Connection] = SimpleQueue()
        ranks: list[WatchedRank] = []
        try:
            door = _door(place, authkey, entries, send_timeout_s=timeouts.command_s)
            try:
                address = f"{place.leader}:{door.address[1]}"
                order = StartRank(
                    id=next(self._ids), address=address, authkey=authkey, threads=threads, env=dict(env or {}),
                    module=module,
                )  # fmt: skip
                for launcher in self._launchers:
                    ranks.append(launcher.start(order))  # one by one: those started before one is lost are ended, too
                ranks.insert(0, _start_here(place, order, folder))
                members = gather_ranks(entries, place.world_size, timeouts.start_s, ranks)
            finally:
                door.close()
        except BaseException:
            kill_ranks(ranks)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return StartedRanks(Control(members), folder, init_method=f"tcp://{place.leader}:{free_port()}")

    def close(self) -> None:
        for launcher in self._launchers:
            launcher.send(Leave())


@contextlib.contextmanager
def leading(*, join_s: float = JOIN_S) -> Iterator[Hosts]:
    """On rank 0 of torchrun: inside the block, deployments of as many ranks as it has started go to its hosts.

    Raises ConfigError outside of torchrun, DeploymentError where launchers of other ranks stay away. Should torchrun
    end, this process gets a SIGTERM of its own.
    """
    place = TorchrunPlace.of_environment()
    hosts = Hosts.gather(place, join_s=join_s)
    done = threading.Event()

    def watch() -> None:
        while not done.wait(LOOK_S):
            if os.getppid() != place.agent:
                print(f"torchrun (process {place.agent}) is gone, ending", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGTERM)
                return

    threading.Thread(target=watch, name="workbench-torchrun", daemon=True).start()
    try:
        with starting_on(hosts):
            yield hosts
    finally:
        done.set()
        hosts.close()


def follow(*, join_s: float = JOIN_S) -> int:
    """On every other rank of torchrun: start and end ranks as rank 0 says, until it leaves. Returns the exit code: 0
    where it did so in order. Raises DeploymentError where rank 0 does not come."""
    place = TorchrunPlace.of_environment()
    store = torchrun_store()
    try:
        store.set_timeout(timedelta(seconds=join_s))
        key, port = bytes.fromhex(store.get(DOOR_KEY).decode()), int(store.get(DOOR_PORT))
    except RuntimeError as error:
        raise DeploymentError(
            f"rank 0 did not come within {join_s:g} s: {error}",
            where=f"{place.leader}, node 0",
            next_step="Start the same command with torchrun on every host",
        ) from None
    connection = connect((place.leader, port), key, timeout_s=join_s)
    connection.send(LauncherHello(place=place, host=socket.gethostname(), pid=os.getpid()))
    return _Follower(place, connection).run()


class _Follower:
    """A launcher at work: one thread, which looks at its ranks between two messages."""

    def __init__(self, place: TorchrunPlace, connection: Connection) -> None:
        self._place, self._connection = place, connection
        self._ranks: dict[int, tuple[RankProcess, Path]] = {}
        self._told: dict[int, RankNews] = {}
        self._signals: list[int] = []

    def run(self) -> int:
        def note(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)

        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            return self._obey()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            kill_ranks([rank for rank, _ in self._ranks.values()])
            for _, folder in self._ranks.values():
                shutil.rmtree(folder, ignore_errors=True)
            self._connection.close()

    def _obey(self) -> int:
        try:
            while True:
                if reason := self._reason_to_leave():
                    return self._leave(reason)
                if self._connection.poll(LOOK_S):
                    message = self._connection.recv()
                    if isinstance(message, Leave):
                        return 0
                    self._carry_out(message)
                self._tell_news()
        except (EOFError, OSError):
            print("rank 0 is gone, leaving", file=sys.stderr, flush=True)
            return 1

    def _reason_to_leave(self) -> str:
        """Why it leaves before rank 0 says so; "" while it stays.

        Where rank 0 is on this host, a first signal of their torchrun, or its end, is rank 0's as well: that answers
        what is under way before it leaves, and needs the ranks here until then. A second signal ends them at once.
        """
        host = f"on {socket.gethostname()}, node {self._place.node}"
        if len(self._signals) > self._place.is_beside_leader:
            name = signal.Signals(self._signals[-1]).name
            return f"its launcher (process {os.getpid()} {host}) was told to end by {name}"
        if os.getppid() != self._place.agent and not self._place.is_beside_leader:
            return f"torchrun (process {self._place.agent} {host}), which started it, is gone"
        return ""

    def _leave(self, reason: str) -> int:
        print(reason, file=sys.stderr, flush=True)
        self._connection.send(LauncherGone(reason=reason))
        return 1

    def _carry_out(self, message: object) -> None:
        if isinstance(message, StartRank):
            folder = Path(tempfile.mkdtemp(prefix="workbench-"))
            try:
                self._ranks[message.id] = (_start_here(self._place, message, folder), folder)
            except (OSError, WorkbenchError) as error:
                shutil.rmtree(folder, ignore_errors=True)
                text = f"could not be started: {error}"
                self._connection.send(RankNews(id=message.id, exit_text=text))
        elif isinstance(message, EndRank) and message.id in self._ranks:
            self._ranks[message.id][0].kill()

    def _tell_news(self) -> None:
        for rank_id, (rank, folder) in list(self._ranks.items()):
            end = rank.exit_text()
            news = RankNews(id=rank_id, pid=rank.pid, state=rank.state(), is_stopped=rank.is_stopped)
            if end is not None:
                news = replace(news, exit_text=end, hint=rank.hint(), words=rank.describe())
            if news.is_stopped == self._told.get(rank_id, RankNews(id=rank_id)).is_stopped and end is None:
                continue  # it runs, or sleeps, as it did
            self._told[rank_id] = news
            self._connection.send(news)
            if end is not None:
                del self._ranks[rank_id], self._told[rank_id]
                shutil.rmtree(folder, ignore_errors=True)


def _start_here(place: TorchrunPlace, order: StartRank, folder: Path) -> RankProcess:
    """The rank of this launcher, as its child."""
    return start_rank(
        place.rank,
        order.address,
        order.authkey,
        folder,
        env={"WORLD_SIZE": str(place.world_size), "LOCAL_RANK": str(place.local_rank), **order.env},
        threads=order.threads or max(1, (os.cpu_count() or 1) // place.local_size),
        module=order.module,
        options=("--owns-folder",),
    )


def _door(
    place: TorchrunPlace, key: bytes, entries: SimpleQueue[Connection], *, send_timeout_s: float = REPORT_S
) -> Door:
    """Open to the other hosts, on the address that they know this one by where it is an address of its own."""
    try:
        return Door((place.leader, 0), key, entries.put, send_timeout_s=send_timeout_s)
    except DeploymentError:
        return Door(("", 0), key, entries.put, send_timeout_s=send_timeout_s)
