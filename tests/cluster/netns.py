"""Two hosts on one machine for tests: network namespaces, joined by a link of a set rate and a set delay.

    host 0 ── TAP ── tbf ──▶ relay: holds every frame for the delay ──▶ TAP ── host 1      and the same way back

The rate is the kernel's token bucket on either end. The kernel here has no netem, so the delay is a process of this
file that reads frames from one TAP device and writes them to the other when their time has come. Everything is gone
when the `with` block ends, however it ends; what a killed test run left behind is removed by the next one.

    with shaped_pair(bits_per_s=200e6, delay_s=0.005) as hosts:
        process = hosts[1].start([sys.executable, "-m", "module"], environment)
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import os
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

DEVICE = "shaped0"  # the name of the link in both namespaces
MTU = 9000
QUEUE_BYTES, BURST_BYTES = 16 << 20, 32 << 10
RUN_DIR = Path("/run/netns")
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
CLONE_NEWNET = 0x40000000
_numbers = itertools.count()  # several pairs may be up at once


@dataclass(slots=True)
class Host:
    """A network namespace with its own loopback and one end of the link."""

    name: str
    address: str
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, log: IO[Any] | None = None
    ) -> subprocess.Popen[str]:
        """A process that sees only this host's network; it is ended with the link at the latest."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *command],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if log is None else log,
            stderr=subprocess.PIPE if log is None else subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process


def why_not() -> str:
    """Why namespaces and shaped links cannot be had here; "" where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"no {' and no '.join(missing)} here"
    if not Path("/dev/net/tun").exists():
        return "no /dev/net/tun here"
    try:
        with contextlib.ExitStack() as stack:
            name = stack.enter_context(_namespace("probe"))
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("tc", "-n", name, "qdisc", "add", "dev", "lo", "root", *_shape(1e9))
    except RuntimeError as error:
        return str(error)
    return ""


@contextlib.contextmanager
def shaped_pair(*, bits_per_s: float, delay_s: float) -> Iterator[tuple[Host, Host]]:
    """Two hosts whose link carries `bits_per_s` each way and takes `delay_s` one way. Raises RuntimeError with the
    kernel's words where it cannot be made."""
    _remove_leftovers()
    with contextlib.ExitStack() as stack:
        names = [stack.enter_context(_namespace(str(side))) for side in range(2)]
        relay = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), *names, repr(delay_s)],
            stdin=subprocess.PIPE,  # its end, also by a kill of this process, is the end of the relay
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.callback(_end, relay)
        assert relay.stdout is not None
        if relay.stdout.readline().strip() != "ready":
            raise RuntimeError(f"the relay ended with {relay.wait()}")
        hosts = tuple(Host(name, f"10.77.0.{side + 1}") for side, name in enumerate(names))
        for host in hosts:
            stack.callback(_end_all, host)
            _run("ip", "-n", host.name, "link", "set", "lo", "up")
            _run("ip", "-n", host.name, "link", "set", DEVICE, "mtu", str(MTU), "txqueuelen", "4096")
            _run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", DEVICE)
            _run("ip", "-n", host.name, "link", "set", DEVICE, "up")
            _run("tc", "-n", host.name, "qdisc", "add", "dev", DEVICE, "root", *_shape(bits_per_s))
            # A connection that rested must not start slowly again: links of a cluster are not measured that way.
            knob = "/proc/sys/net/ipv4/tcp_slow_start_after_idle"
            _run("ip", "netns", "exec", host.name, "sh", "-c", f"echo 0 > {knob}")
        yield hosts[0], hosts[1]


def _shape(bits_per_s: float) -> list[str]:
    return ["tbf", "rate", f"{bits_per_s:.0f}bit", "burst", str(BURST_BYTES), "limit", str(QUEUE_BYTES)]


@contextlib.contextmanager
def _namespace(label: str) -> Iterator[str]:
    name = f"shaped-{os.getpid()}-{next(_numbers)}-{label}"
    _run("ip", "netns", "add", name)
    try:
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _remove_leftovers() -> None:
    """Namespaces of test runs that are no more, and the processes in them."""
    for path in RUN_DIR.glob("shaped-*") if RUN_DIR.is_dir() else ():
        match = re.fullmatch(r"shaped-(\d+)-\d+-\w+", path.name)
        if match is not None and not Path(f"/proc/{match[1]}").exists():
            held = subprocess.run(["ip", "netns", "pids", path.name], capture_output=True, text=True).stdout
            for pid in map(int, held.split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", path.name], capture_output=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")


def _end_all(host: Host) -> None:
    for process in host.processes:
        _end(process, group=True)


def _end(process: subprocess.Popen[str], *, group: bool = False) -> None:
    with contextlib.suppress(ProcessLookupError):
        if group:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()


# ---------------------------------------------------------------------------------- the relay, a process of its own


def _relay(names: Sequence[str], delay_s: float) -> None:
    """Pass frames between the TAP devices of two namespaces, each `delay_s` after it was read."""
    ends = [_open_tap(name) for name in names]
    with contextlib.suppress(OSError):
        os.nice(-10)  # frames that wait for this process are delay that nobody set
    print("ready", flush=True)
    waiting: tuple[deque[tuple[float, bytes]], ...] = (deque(), deque())  # to be written to that end
    while True:
        due = [queue[0][0] for queue in waiting if queue]
        wait_s = max(0.0, min(due) - time.monotonic()) if due else None
        readable, _, _ = select.select([*ends, sys.stdin], [], [], wait_s)
        if sys.stdin in readable:
            return  # whoever made the link has gone
        for fd in readable:
            queue = waiting[1 - ends.index(fd)]
            with contextlib.suppress(BlockingIOError):
                while True:
                    frame = os.read(fd, 1 << 17)
                    queue.append((time.monotonic() + delay_s, frame))
        now = time.monotonic()
        for fd, queue in zip(ends, waiting, strict=True):
            while queue and queue[0][0] <= now:
                with contextlib.suppress(OSError):  # a device that is down drops what comes, as any would
                    os.write(fd, queue.popleft()[1])


def _open_tap(namespace: str) -> int:
    """A TAP device that is made in `namespace` and read and written from here."""
    libc = ctypes.CDLL(None, use_errno=True)
    with (RUN_DIR / namespace).open() as handle:
        if libc.setns(handle.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TAP | IFF_NO_PI))
    return fd


if __name__ == "__main__":
    _relay(sys.argv[1:3], float(sys.argv[3]))
