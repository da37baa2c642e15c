"""Commands on two hosts, each a torchrun of its own with one rank: the tokens of one process, and whose end it was."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import psutil
import pytest

from workbench.base import DeploymentError
from workbench.cli.hosts import run_on_hosts
from workbench.cluster.torchrun import TorchrunPlace
from workbench.deployment.hosts import (
    EndRank,
    Hosts,
    LauncherGone,
    LauncherHello,
    Leave,
    RankNews,
    RemoteRank,
    StartRank,
    _Follower,
    _Launcher,
)
from workbench.deployment.started import Timeouts

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "data" / "k3-tiny"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
WAIT_S = 180
PROMPTS = ["What is a shard?", "one two three four", "x"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class TwoHosts:
    """Two agents; `out(node)` and `log(node)` have what came from their ranks."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        self.folder = folder
        port = free_port()
        self.agents: list[subprocess.Popen[bytes]] = []
        for node in range(2):
            launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}"]
            launch += ["--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
            launch += ["--monitor-interval=0.2", "-m", "workbench.cli", *command]
            with self._path(node, "out").open("w") as out, self._path(node, "log").open("w") as log:
                self.agents.append(
                    subprocess.Popen(launch, cwd=ROOT, env=ENVIRONMENT, stdout=out, stderr=log, start_new_session=True)
                )

    def _path(self, node: int, kind: str) -> Path:
        return self.folder / f"node{node}.{kind}"

    def out(self, node: int) -> str:
        return self._path(node, "out").read_text()

    def log(self, node: int) -> str:
        return self._path(node, "log").read_text()

    @property
    def logs(self) -> str:
        return "\n".join(f"--- node {node}\n{self.out(node)}\n{self.log(node)}" for node in range(2))

    def wait(self, condition: Callable[[], Any], what: str) -> Any:
        end = time.monotonic() + WAIT_S
        while not (found := condition()):
            assert time.monotonic() < end, f"{what}: not within {WAIT_S} s\n{self.logs}"
            time.sleep(0.05)
        return found

    def ranks(self, node: int) -> list[psutil.Process]:
        """The rank that the launcher of a node keeps."""
        launchers = psutil.Process(self.agents[node].pid).children()
        return [rank for launcher in launchers for rank in launcher.children()]


@contextmanager
def two_hosts(folder: Path, *command: str) -> Iterator[TwoHosts]:
    """Whatever they have started is ended with the block at the latest."""
    hosts, seen = TwoHosts(folder, list(command)), list[psutil.Process]()
    try:
        yield hosts
    finally:
        for agent in hosts.agents:
            if agent.poll() is None:
                seen += psutil.Process(agent.pid).children(recursive=True)
                agent.kill()
                agent.wait()
        for process in seen:
            if process.is_running():
                process.kill()


def ask(url: str, prompt: str) -> str:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "skip_special_tokens": False}
    asked = urllib.request.Request(
        f"{url}/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=120) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def status(url: str, path: str) -> str:
    try:
        with urllib.request.urlopen(url.removesuffix("/v1") + path, timeout=30) as answer:
            return str(json.load(answer)["status"])
    except urllib.error.HTTPError as error:
        return str(json.load(error)["status"])


def served(out: str) -> str:
    """The address that a server has printed; "" where it has not yet."""
    found = re.search(r'"url": ?"([^"]+)"', out)
    return found[1] if found else ""


SERVE = ("serve", str(TINY), "--port", "0", "--json", "--precision", "fp32", "--slots", "2")


@pytest.mark.ranks
@pytest.mark.slow
def test_two_hosts_answer_as_one_process_and_a_rank_is_started_again_and_a_killed_agent_is_named(
    tmp_path: Path,
) -> None:
    with (tmp_path / "one.out").open("w") as out, (tmp_path / "one.log").open("w") as log:
        command = [sys.executable, "-m", "workbench.cli", *SERVE]
        one = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=out, stderr=log)
    try:
        end = time.monotonic() + WAIT_S
        while not (url := served((tmp_path / "one.out").read_text())):
            assert one.poll() is None, (tmp_path / "one.log").read_text()
            assert time.monotonic() < end
            time.sleep(0.05)
        alone = {prompt: ask(url, prompt) for prompt in PROMPTS}
    finally:
        one.terminate()
        one.wait(60)

    with two_hosts(tmp_path, *SERVE, "--layout", "tp2", "--max-restarts", "1") as hosts:
        url = hosts.wait(lambda: served(hosts.out(0)), "the server")
        assert hosts.out(1) == "", "rank 0 alone speaks"
        assert {prompt: ask(url, prompt) for prompt in PROMPTS} == alone
        family = [psutil.Process(agent.pid) for agent in hosts.agents]
        family += [child for agent in family for child in agent.children(recursive=True)]
        assert len(family) == 6, "an agent, a launcher and a rank on each host"

        # A rank of the other host is started again there, by its launcher.
        (rank,) = hosts.ranks(1)
        rank.kill()
        hosts.wait(lambda: status(url, "/ready") == "restarting" or hosts.ranks(1) not in ([], [rank]), "the end")
        hosts.wait(lambda: status(url, "/ready") == "ready", "another rank")
        (again,) = hosts.ranks(1)
        assert again.pid != rank.pid
        family.append(again)
        assert {prompt: ask(url, prompt) for prompt in PROMPTS} == alone

        body = {"prompt": "a b c", "max_tokens": 3000, "ignore_eos": True, "stream": True}
        asked = urllib.request.Request(
            f"{url}/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=WAIT_S) as stream:
            assert stream.readline().startswith(b"data: ")
            hosts.agents[1].kill()
            rest = stream.read().decode()
        assert '"code":"model_failed"' in rest
        assert "[DONE]" not in rest
        hosts.wait(lambda: status(url, "/health") == "failed", "the end of all hope")
        broken = [json.loads(line) for line in hosts.log(0).splitlines() if '"ranks broken"' in line]
        assert f"rank 1 (process {rank.pid}" in broken[0]["error"]
        assert "SIGKILL" in broken[0]["error"]
        assert f"rank 1 (process {again.pid}" in broken[1]["error"]
        assert f"process {hosts.agents[1].pid} on {socket.gethostname()}, node 1" in broken[1]["error"]
        hosts.agents[0].terminate()
        hosts.wait(lambda: hosts.agents[0].poll() is not None, "the end of the first host")
        hosts.agents[1].wait()
        _, alive = psutil.wait_procs([each for each in family if each.pid != hosts.agents[0].pid], timeout=30)
        assert [each for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.ranks
@pytest.mark.slow
def test_a_question_to_two_hosts_is_answered_as_by_one_process_and_all_end_well(tmp_path: Path) -> None:
    asked = ("generate", str(TINY), "What is a shard?", "--max-tokens", "6", "--precision", "fp32", "--json")
    one = subprocess.run(
        [sys.executable, "-m", "workbench.cli", *asked], cwd=ROOT, env=ENVIRONMENT, capture_output=True, timeout=WAIT_S
    )
    with two_hosts(tmp_path, *asked, "--layout", "pp2") as hosts:
        codes = [agent.wait(WAIT_S) for agent in hosts.agents]
        assert codes == [0, 0], hosts.logs
        told, alone = json.loads(hosts.out(0)), json.loads(one.stdout)
        assert (told["text"], told["token_ids"]) == (alone["text"], alone["token_ids"])
        assert hosts.out(1) == ""


PLACE = TorchrunPlace(rank=1, world_size=2, local_rank=0, local_size=1, node=1, leader="127.0.0.1", agent=os.getppid())


def test_what_a_launcher_tells_of_its_rank_is_what_the_handle_sees() -> None:
    ours, theirs = Pipe()
    launcher = _Launcher(LauncherHello(place=PLACE, host="other", pid=7), ours)
    order = StartRank(id=3, address="127.0.0.1:9", authkey=b"k", threads=1, env={}, module="m")
    rank = launcher.start(order)
    assert isinstance(rank, RemoteRank)
    assert theirs.recv() == order
    assert (rank.exit_text(), rank.is_stopped) == (None, False)
    theirs.send(RankNews(id=3, is_stopped=True, state="stopped"))
    while not rank.is_stopped:
        time.sleep(0.005)
    assert rank.state() == "stopped"
    theirs.send(RankNews(id=4, exit_text="of another one"))
    theirs.send(RankNews(id=3, exit_text="SIGKILL (signal 9)", hint="memory", words="last operation: step"))
    assert rank.exit_text(30) == "SIGKILL (signal 9)"
    assert (rank.hint(), rank.describe()) == ("memory", "last operation: step")
    second = launcher.start(StartRank(id=5, address="127.0.0.1:9", authkey=b"k", threads=1, env={}, module="m"))
    theirs.recv()
    theirs.send(LauncherGone(reason="torchrun is gone"))
    assert second.exit_text(30) == "torchrun is gone"
    with pytest.raises(DeploymentError, match="rank 1 cannot be started: torchrun is gone"):
        launcher.start(order)


def test_a_launcher_whose_connection_ends_is_named_with_its_host() -> None:
    ours, theirs = Pipe()
    launcher = _Launcher(LauncherHello(place=PLACE, host="other", pid=7), ours)
    rank = launcher.start(StartRank(id=0, address="127.0.0.1:9", authkey=b"k", threads=1, env={}, module="m"))
    theirs.close()
    assert rank.exit_text(30) == "its launcher of rank 1 (process 7 on other, node 1) is gone"
    rank.kill()
    rank.reap(0)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("node", "num_signals", "agent_is_there", "stays"),
    [(0, 1, True, True), (0, 2, True, False), (0, 0, False, True), (1, 1, True, False), (1, 0, False, False)],
)
def test_a_launcher_beside_rank_0_leaves_with_it_and_one_elsewhere_with_its_torchrun(
    node: int, num_signals: int, agent_is_there: bool, stays: bool
) -> None:
    ours, theirs = Pipe()
    place = replace(PLACE, node=node, agent=os.getppid() if agent_is_there else 1 << 30)
    before, told = signal.getsignal(signal.SIGTERM), list[object]()

    def lead() -> None:
        while num_signals and signal.getsignal(signal.SIGTERM) is before:
            time.sleep(0.005)
        for _ in range(num_signals):
            os.kill(os.getpid(), signal.SIGTERM)
            if ours.poll(0.5):  # it has left after some looks: a further signal would be that of this process
                break
        if ours.poll(1.0 if stays else 30):
            told.append(ours.recv())
        else:
            ours.send(Leave())

    leading = threading.Thread(target=lead, daemon=True)
    leading.start()
    code = _Follower(place, theirs).run()
    leading.join()
    assert signal.getsignal(signal.SIGTERM) is before
    if stays:
        assert (code, told) == (0, [])
    else:
        (gone,) = told
        assert code == 1
        assert isinstance(gone, LauncherGone)
        assert ("SIGTERM" if num_signals else "torchrun") in gone.reason


@pytest.mark.timeout(60)
def test_ranks_that_were_started_are_ended_where_a_later_one_cannot_be() -> None:
    (one, theirs), (two, gone) = Pipe(), Pipe()
    gone.close()
    places = [replace(PLACE, rank=rank, world_size=3) for rank in range(3)]
    launchers = [
        _Launcher(LauncherHello(place=place, host="other", pid=7), connection)
        for place, connection in zip(places[1:], (one, two), strict=True)
    ]
    while launchers[1].lost is None:
        time.sleep(0.005)
    orders: list[object] = []

    def obey() -> None:
        orders.append(theirs.recv())
        if theirs.poll(10):
            orders.append(theirs.recv())
            theirs.send(RankNews(id=0, exit_text="SIGKILL (signal 9)"))

    obeying = threading.Thread(target=obey, daemon=True)
    obeying.start()
    with pytest.raises(DeploymentError, match="rank 2 cannot be started"):
        Hosts(places[0], launchers, None).start(timeouts=Timeouts(), threads=1, env=None)
    obeying.join()
    start, *more = orders
    assert isinstance(start, StartRank)
    assert more == [EndRank(id=start.id)]


def test_commands_that_start_their_ranks_themselves_are_refused_under_torchrun(monkeypatch) -> None:
    from argparse import Namespace

    from workbench.cli.arguments import UsageError

    assert run_on_hosts(Namespace(run=lambda args: 3)) == 3, "a command without ranks runs as it is"
    with pytest.raises(UsageError, match="`soak` starts its ranks itself"):
        run_on_hosts(Namespace(command="soak", spans_hosts=False, run=lambda args: 0))


@pytest.mark.parametrize(
    ("arguments", "words"), [(("--ranks", "3"), "torchrun has started 2"), (("--layout", "tp4"), "needs 4 ranks")]
)
def test_a_layout_of_other_ranks_than_torchrun_has_started_is_refused(arguments: tuple[str, str], words: str) -> None:
    from workbench.base import LayoutError
    from workbench.cli import _parser
    from workbench.cli.arguments import chosen_layout
    from workbench.deployment.started import starting_on

    class Two:
        world_size = 2

        def start(self, **_: object):
            raise AssertionError

    args = _parser().parse_args(["load", str(TINY), *arguments])
    with starting_on(Two()), pytest.raises(LayoutError, match=words):
        chosen_layout(args)
    with starting_on(Two()):
        assert chosen_layout(_parser().parse_args(["load", str(TINY)])).world_size == 2
