"""Messages between a handle and its ranks, and the authenticated way they meet.

Every message is tagged with the id of the command it belongs to, so that what arrives late, after an interrupt or an
error, is recognised and dropped.

Trust boundary: messages are pickles, and whoever can send one can run code. Both sides prove to each other that they
know a random key before the first message is read (HMAC challenge of `multiprocessing.connection`). Locally the socket
lies in a folder only its owner may enter, and the key reaches the ranks through a pipe, so neither the command line nor
the environment shows it. Over TCP the key keeps strangers out, but nothing is encrypted: use a private network.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from pathlib import Path

from workbench.base import DeploymentError, WorkbenchError, error_text

__all__ = [
    "PROTOCOL",
    "Address",
    "Command",
    "Done",
    "Door",
    "Failed",
    "Hello",
    "Message",
    "Progress",
    "Status",
    "connect",
    "parse_address",
    "portable",
]

PROTOCOL = 1
Address = str | tuple[str, int]  # path of a UNIX socket, or host and port


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """First message of a rank."""

    rank: int
    world_size: int
    pid: int
    host: str
    protocol: int = PROTOCOL


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """What a rank is to do. `status` is answered at once, between or during other commands."""

    id: int
    name: str
    args: dict[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    id: int
    rank: int
    value: object


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    id: int
    rank: int
    value: object


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """A command raised; `traceback` is that of the rank."""

    id: int
    rank: int
    error: WorkbenchError
    traceback: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """What a rank is doing at this moment: operation, last collective, and where in the code it is.

    `entered` counts the operations of each (group, its ranks) since loading; messages count as groups of their own,
    "GROUP/send" and "GROUP/receive". `is_between` says that the last one entered has come to its end.
    """

    id: int
    rank: int
    operation: str
    collective: str
    num_collectives: int
    stack: str
    entered: Mapping[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)
    is_between: bool = True


Message = Progress | Done | Failed | Status


def portable(error: BaseException, rank: int) -> WorkbenchError:
    """The error as it can travel: the same type where it is one of ours, else a DeploymentError; it names the rank, in
    front of its message where it does not do so itself."""
    if not isinstance(error, WorkbenchError):
        return DeploymentError(f"rank {rank}: {error_text(error)}")
    lead = "" if _names_rank(error, f"rank {rank}") else f"rank {rank}: "
    try:
        named = type(error)(
            lead + error.message,
            where=error.where,
            found=error.found,
            expected=error.expected,
            next_step=error.next_step,
        )
        pickle.loads(pickle.dumps(named))
        return named
    except Exception:  # a subclass with a constructor of its own: its text has to do
        return DeploymentError(lead + error_text(error))


def _names_rank(error: WorkbenchError, name: str) -> bool:
    is_found = name in (error.found or "").split(", ")
    return error.where == name or error.message.startswith((f"{name} ", f"{name}:")) or is_found


def parse_address(text: str) -> Address:
    """ "HOST:PORT" or the path of a socket. Raises DeploymentError for anything else."""
    host, colon, port = text.rpartition(":")
    if colon and host and port.isdecimal() and int(port) < 1 << 16:
        return (host.strip("[]"), int(port))
    if "/" in text:
        return text
    raise DeploymentError("not an address", found=repr(text), expected="HOST:PORT or the path of a socket")


def connect(
    address: Address, authkey: bytes, *, timeout_s: float = 60.0, is_wanted: Callable[[], bool] = lambda: True
) -> Connection:
    """Connection to a handle that may still be starting. Raises DeploymentError in the end, for a wrong key, or once
    `is_wanted` says that the handle will never come."""
    family = "AF_UNIX" if isinstance(address, str) else "AF_INET"
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return Client(address, family=family, authkey=authkey)
        except AuthenticationError as error:
            raise DeploymentError(f"the controller at {address} refuses the key: {error}") from error
        except (OSError, EOFError) as error:
            if not is_wanted():
                raise DeploymentError(f"the controller at {address} is gone", found=str(error)) from error
            if time.monotonic() > deadline:
                raise DeploymentError(f"no controller at {address} within {timeout_s:g} s", found=str(error)) from error
            time.sleep(0.1)


class Door:
    """A listening socket that lets in who knows the key; `on_entry` gets each connection, in a thread of its own.

    Each newcomer is challenged in its own thread, so one that says nothing keeps nobody else waiting.
    """

    def __init__(
        self, address: Address, authkey: bytes, on_entry: Callable[[Connection], None], *, send_timeout_s: float
    ) -> None:
        self._authkey, self._on_entry, self._send_timeout_s = authkey, on_entry, send_timeout_s
        try:
            if isinstance(address, str):
                self._socket = socket.socket(socket.AF_UNIX)
                self._socket.bind(address)
                self._socket.listen(64)
            else:
                self._socket = socket.create_server(address, backlog=64)
        except OSError as error:
            raise DeploymentError(f"cannot listen at {address}: {error}") from error
        self.address: Address = self._socket.getsockname() if isinstance(address, tuple) else address
        threading.Thread(target=self._accept, name="workbench-door", daemon=True).start()

    def close(self) -> None:
        # Shutting it down wakes the thread in accept(); closing alone would leave it there for ever.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if isinstance(self.address, str):
            Path(self.address).unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._challenge, args=(peer,), daemon=True).start()

    def _challenge(self, peer: socket.socket) -> None:
        peer.settimeout(None)
        if peer.family != socket.AF_UNIX:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # A stopped rank reads nothing; without a limit a large message to it would block the handle for ever.
        seconds, fraction = divmod(self._send_timeout_s, 1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(fraction * 1e6)))
        connection = Connection(peer.detach())
        try:
            deliver_challenge(connection, self._authkey)
            answer_challenge(connection, self._authkey)
        except (AuthenticationError, OSError, EOFError):
            connection.close()
            return
        self._on_entry(connection)
