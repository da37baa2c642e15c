"""Ranks on this machine that have reported and hold no model yet: the first half of a deployment's start."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

from workbench.deployment.control import Control
from workbench.deployment.gather import gather_ranks
from workbench.deployment.protocol import Door
from workbench.deployment.supervise import WORKER, RankProcess, kill_ranks, start_ranks
from workbench.placement import Layout

__all__ = ["Elsewhere", "StartedRanks", "Timeouts", "current_hosts", "end_ranks", "starting_on"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """Seconds without any sign of life after which something counts as hung.

    `start_s`: until all ranks have reported. `load_s`: between two signs of progress. `step_s`: a step, an image to
    encode, a ping; None as any other command, which may take `command_s`. `collective_s`: what the collective library
    itself waits; larger than the others, so that the handle speaks first.
    """

    start_s: float = 120.0
    load_s: float = 600.0
    command_s: float = 300.0
    step_s: float | None = None
    collective_s: float = 900.0


class Elsewhere(Protocol):
    """Hosts that ranks can be started on, this one among them."""

    @property
    def world_size(self) -> int: ...

    def start(
        self, *, timeouts: Timeouts, threads: int | None, env: Mapping[str, str] | None, module: str
    ) -> StartedRanks: ...


_current: Elsewhere | None = None


def current_hosts() -> Elsewhere | None:
    """Where deployments that need all of their ranks are started now; None: on this machine."""
    return _current


@contextmanager
def starting_on(hosts: Elsewhere) -> Iterator[None]:
    """Inside the block, deployments of `hosts.world_size` ranks are started there, whoever starts them."""
    global _current
    before, _current = _current, hosts
    try:
        yield
    finally:
        _current = before


class StartedRanks:
    """Processes that wait for a model. They end with this object, unless a deployment has taken them over."""

    def __init__(self, control: Control, folder: Path, *, init_method: str = "") -> None:
        """`init_method`: where the ranks meet each other; by default in a file of their folder."""
        self._control, self._folder = control, folder
        self.init_method = init_method or f"file://{folder / 'rendezvous'}"
        self._finalizer = weakref.finalize(self, end_ranks, control, folder)

    @classmethod
    def start(
        cls,
        layout: Layout,
        *,
        timeouts: Timeouts | None = None,
        threads: int | None = None,
        env: Mapping[str, str] | None = None,
        module: str = WORKER,
    ) -> StartedRanks:
        """One worker per rank of `layout`; options and errors as of `Deployment.start`.

        On this machine, or where `starting_on` says.
        """
        timeouts = timeouts or Timeouts()
        hosts = current_hosts()
        if hosts is not None and layout.world_size == hosts.world_size > 1:
            return hosts.start(timeouts=timeouts, threads=threads, env=env, module=module)
        folder = Path(tempfile.mkdtemp(prefix="workbench-"))  # only its owner may enter
        address, authkey = str(folder / "control.sock"), secrets.token_bytes(32)
        ranks: list[RankProcess] = []
        try:
            entries: SimpleQueue[Connection] = SimpleQueue()
            door = Door(address, authkey, entries.put, send_timeout_s=timeouts.command_s)
            try:
                threads = threads or max(1, (os.cpu_count() or 1) // layout.world_size)
                ranks = start_ranks(
                    layout.world_size, address, authkey, folder, threads=threads, env=env, module=module
                )
                members = gather_ranks(entries, layout.world_size, timeouts.start_s, ranks)
            finally:
                door.close()
        except BaseException:
            kill_ranks(ranks)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return cls(Control(members), folder)

    @property
    def is_usable(self) -> bool:
        """Whether all ranks are there and nobody has taken them."""
        return self._finalizer.alive and self._control.broken is None

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by rank."""
        return tuple(member.hello.pid for member in self._control.members)

    def warm(self, timeout_s: float = 300.0) -> None:
        """Have every rank load its libraries, most of a small model's start. Raises as `Deployment.ping`."""
        self._control.request("ping", timeout_s=timeout_s)

    def hand_over(self) -> tuple[Control, Path]:
        """The ranks, which are the caller's to end from now on."""
        self._finalizer.detach()
        return self._control, self._folder

    def close(self) -> None:
        """End all ranks. Safe to call more than once."""
        self._finalizer()


def end_ranks(control: Control, folder: Path | None) -> None:
    """End the ranks and remove their folder; must not refer to any handle, or it would never be collected."""
    control.close()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
