"""Waiting for all ranks to report, whoever started them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue

from workbench.base import DeploymentError, WorkerDiedError
from workbench.deployment.control import Member
from workbench.deployment.protocol import PROTOCOL, Hello
from workbench.deployment.supervise import WatchedRank

__all__ = ["gather_ranks"]

HELLO_WAIT_S = 10.0


def gather_ranks(
    entries: SimpleQueue[Connection], world_size: int, timeout_s: float, ranks: Sequence[WatchedRank]
) -> list[Member]:
    """The ranks as they report. Raises WorkerDiedError for one that ends first, DeploymentError after `timeout_s`."""
    members: dict[int, Member] = {}
    deadline = time.monotonic() + timeout_s
    try:
        while len(members) < world_size:
            for rank in ranks:
                if (how := rank.exit_text()) is not None:
                    raise WorkerDiedError(f"rank {rank.rank} ended before it reported: {how}\n{rank.describe()}")
            if time.monotonic() > deadline:
                missing = sorted(set(range(world_size)) - set(members))
                details = "".join(f"\n{rank.describe()}" for rank in ranks if rank.rank in missing)
                raise DeploymentError(f"ranks {missing} did not report within {timeout_s:g} s{details}")
            try:
                connection = entries.get(timeout=0.1)
            except Empty:
                continue
            try:
                hello = _hello(connection)
            except (EOFError, OSError):  # it ended meanwhile: the next look at the ranks says how
                connection.close()
                continue
            if hello.world_size != world_size or not 0 <= hello.rank < world_size or hello.rank in members:
                raise DeploymentError(
                    f"a process reported as rank {hello.rank} of {hello.world_size}",
                    expected=f"each rank of {world_size} once",
                )
            process = next((rank for rank in ranks if rank.rank == hello.rank), None)
            members[hello.rank] = Member(hello, connection, process)
    except BaseException:
        for member in members.values():
            member.connection.close()
        raise
    return list(members.values())


def _hello(connection: Connection) -> Hello:
    hello: object = connection.recv() if connection.poll(HELLO_WAIT_S) else None
    if not isinstance(hello, Hello) or hello.protocol != PROTOCOL:
        raise DeploymentError(
            "a process with the right key did not report as a rank of this version", found=type(hello).__name__
        )
    return hello
