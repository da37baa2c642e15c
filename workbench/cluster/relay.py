"""Links over several hosts: torchrun starts one launcher per rank, and each launcher keeps its rank as a child.

    torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT \
             -m workbench.cli topology --out topology.json

The launcher of rank 0 leads the survey; the others pass what it says on to their child and back. Launchers never enter
a collective, so a rank that hangs is ended by its own launcher and the survey goes on. They meet through torchrun's
store, then talk JSON over TCP, each proving to know a random key from that store; nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from workbench.base import ConfigError, DeploymentError
from workbench.cluster.links import (
    FIT_DTYPES,
    JOIN_SECONDS,
    STEP_SECONDS,
    assemble,
    describe_devices,
    message_sizes,
    survey_links,
    used_devices,
)
from workbench.cluster.rank_pool import RankPool
from workbench.cluster.rank_process import WORKER, LocalRank, Put, Rank
from workbench.cluster.strict import Fields
from workbench.cluster.topology import Topology, TopologyDevice
from workbench.cluster.topology_json import device_from_json, device_to_json
from workbench.cluster.torchrun import TorchrunPlace, free_port, is_torchrun, torchrun_store

__all__ = ["is_torchrun", "measure_torchrun_topology"]

MAX_MESSAGE = 1 << 20
DOOR_KEY, DOOR_PORT = "workbench/links/key", "workbench/links/port"


def measure_torchrun_topology(
    *,
    device: str | None = None,
    sizes: Sequence[int] | None = None,
    dtypes: Sequence[str] = FIT_DTYPES,
    rates: bool = True,
    time_limit_s: float = STEP_SECONDS,
    join_limit_s: float = JOIN_SECONDS,
    command: Sequence[str] = WORKER,
    on_step: Callable[[str], None] | None = None,
) -> Topology | None:
    """The topology of all ranks that torchrun started, on rank 0; None on the others once rank 0 is done.

    Arguments as for `measure_topology`. Raises ConfigError outside torchrun, DeploymentError if launchers stay away.
    """
    place = TorchrunPlace.of_environment()
    store = torchrun_store()
    say = on_step or (lambda what: None)
    used = used_devices(place.local_size, device)
    own: tuple[TopologyDevice, ...] = ()
    if place.local_rank == 0:  # one launcher speaks for its host
        own = describe_devices(used, platform.node() or "host", rates, say, first_rank=place.rank)
    name = used[place.local_rank].torch_name
    if place.rank > 0:
        key, port = store.get(DOOR_KEY), int(store.get(DOOR_PORT))
        with Client((place.leader, port), authkey=key) as connection:
            hello = {"rank": place.rank, "node": place.node, "name": name, "devices": [device_to_json(x) for x in own]}
            connection.send_bytes(json.dumps(hello).encode())
            serve_rank(connection, LocalRank(command, {"LOCAL_RANK": str(place.local_rank)}))
        return None
    key = os.urandom(32)
    with Listener(("", 0), authkey=key, backlog=place.world_size) as door:
        store.set(DOOR_KEY, key)
        store.set(DOOR_PORT, str(door.address[1]))
        guests = _welcome(door, place.world_size - 1, join_limit_s)
    try:
        devices = _all_devices(own, guests, place.world_size)
        local = LocalRank(command, {"LOCAL_RANK": str(place.local_rank)})
        ranks: list[Rank] = [local, *(guest.rank for guest in guests)]
        names = [name, *(guest.name for guest in guests)]

        def new_pool() -> RankPool:
            meeting = f"tcp://{place.leader}:{free_port()}"
            return RankPool(ranks, names, init_method=meeting, time_limit_s=time_limit_s)

        findings = survey_links(
            new_pool,
            devices,
            sizes=message_sizes(used[0].type, sizes),
            dtypes=tuple(dtypes),
            join_limit_s=join_limit_s,
            say=say,
        )
    finally:
        for guest in guests:
            guest.rank.close()
    hosts = len({x.host for x in devices})
    return assemble(f"{place.world_size} ranks on {hosts} hosts", devices, findings)


class RelayedRank:
    """A rank that another launcher keeps. What it says of a child that was ended meanwhile is dropped."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._generation = 0
        self._put: Put = lambda event: None
        self._words = ""
        self._sending = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()

    def start(self, who: Mapping[str, Any], put: Put) -> None:
        self._generation += 1
        self._put = put
        self._send({"do": "start", "generation": self._generation, "who": who})

    def tell(self, message: Mapping[str, Any]) -> None:
        self._send({"do": "tell", "message": message})

    def last_words(self) -> str:
        return self._words

    def kill(self) -> None:
        self._send({"do": "kill"})

    def close(self) -> None:
        """End the launcher's duty; it ends its child, and the end of the connection ends the reader."""
        self._send({"do": "end"})

    def _send(self, message: Mapping[str, Any]) -> None:
        with self._sending, contextlib.suppress(OSError, ValueError):  # gone: the reader says so
            self._connection.send_bytes(json.dumps(message).encode())

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError, ValueError, TypeError):
            while True:
                message = json.loads(self._connection.recv_bytes(MAX_MESSAGE))
                if message["generation"] == self._generation:
                    self._words = message["words"]
                    self._put(message["event"])
        self._words = "is gone: the connection to its launcher ended"
        self._connection.close()
        self._put(None)


def serve_rank(connection: Connection, rank: LocalRank) -> None:
    """Keep `rank` for the leader at the other end of `connection`, until it says so or goes away."""
    sending = threading.Lock()

    def heard(generation: int, event: dict[str, Any] | None) -> None:
        words = rank.last_words() if event is None else ""
        message = {"generation": generation, "event": event, "words": words}
        with sending, contextlib.suppress(OSError, ValueError):
            connection.send_bytes(json.dumps(message).encode())

    try:
        while True:
            message = json.loads(connection.recv_bytes(MAX_MESSAGE))
            if message["do"] == "start":
                number = message["generation"]
                rank.start(message["who"], lambda event, number=number: heard(number, event))  # type: ignore[misc]
            elif message["do"] == "tell":
                rank.tell(message["message"])
            elif message["do"] == "kill":
                rank.kill()
            else:
                return
    except (EOFError, OSError):
        return  # the leader has gone
    finally:
        rank.kill()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Guest:
    rank_number: int
    node: int
    name: str
    devices: tuple[TopologyDevice, ...]
    rank: RelayedRank


def _welcome(door: Listener, count: int, limit_s: float) -> list[_Guest]:
    """All other launchers, by rank. Raises DeploymentError for those that do not come."""
    arrivals: queue.Queue[_Guest] = queue.Queue()

    def accept() -> None:
        while True:
            try:
                connection = door.accept()
            except AuthenticationError:
                continue  # somebody else
            except (OSError, EOFError):
                return  # the door is closed
            threading.Thread(target=greet, args=(connection,), daemon=True).start()

    def greet(connection: Connection) -> None:
        with contextlib.suppress(EOFError, OSError, ValueError, ConfigError):
            hello = Fields(json.loads(connection.recv_bytes(MAX_MESSAGE)), "", "hello of a launcher")
            guest = _Guest(
                rank_number=hello.count("rank", low=1, high=count),
                node=hello.count("node"),
                name=hello.text("name"),
                devices=tuple(device_from_json(fields) for fields in hello.children("devices")),
                rank=RelayedRank(connection),
            )
            arrivals.put(guest)

    threading.Thread(target=accept, daemon=True).start()
    guests: dict[int, _Guest] = {}
    deadline = time.monotonic() + limit_s
    while len(guests) < count:
        try:
            guest = arrivals.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            missing = [rank for rank in range(1, count + 1) if rank not in guests]
            raise DeploymentError(f"launchers of ranks {missing} did not come within {limit_s:g} s") from None
        guests[guest.rank_number] = guest
    return [guests[rank] for rank in sorted(guests)]


def _all_devices(
    own: Sequence[TopologyDevice], guests: Sequence[_Guest], world_size: int
) -> tuple[TopologyDevice, ...]:
    """Devices by rank. Hosts that share a name (network namespaces, containers) are told apart by torchrun's number."""
    told = [(0, own), *((guest.node, guest.devices) for guest in guests)]
    names: dict[str, set[int]] = {}
    for node, devices in told:
        for device in devices:
            names.setdefault(device.host, set()).add(node)
    found = {
        device.rank: replace(device, host=f"{device.host}/{node}" if len(names[device.host]) > 1 else device.host)
        for node, devices in told
        for device in devices
    }
    if sorted(found) != list(range(world_size)):
        raise DeploymentError("launchers told of other ranks than were started", found=sorted(found))
    return tuple(found[rank] for rank in range(world_size))
