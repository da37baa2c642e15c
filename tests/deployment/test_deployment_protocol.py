"""Meeting at the door, last words, exit reasons, and that nothing here touches a device."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from multiprocessing import Pipe
from queue import Empty, SimpleQueue

import pytest

from workbench.base import CheckpointError, DeploymentError, LoadError, WorkerDiedError
from workbench.deployment.gather import gather_ranks
from workbench.deployment.handle import Deployment, Timeouts
from workbench.deployment.protocol import Door, connect, parse_address, portable
from workbench.deployment.slate import LastWords, Slate, read_slate
from workbench.deployment.supervise import exit_text, log_tail
from workbench.deployment.worker import read_key
from workbench.placement import Layout

pytestmark = pytest.mark.timeout(60)

KEY = b"k" * 32


@pytest.fixture(params=["unix", "tcp"])
def door(request, tmp_path):
    entries: SimpleQueue = SimpleQueue()
    address = str(tmp_path / "door.sock") if request.param == "unix" else ("127.0.0.1", 0)
    opened = Door(address, KEY, entries.put, send_timeout_s=0.2)
    opened.entries = entries
    yield opened
    opened.close()


def test_who_knows_the_key_comes_in_and_messages_pass(door):
    outside = connect(door.address, KEY)
    inside = door.entries.get(timeout=5)
    inside.send({"a": 1})
    assert outside.recv() == {"a": 1}
    outside.close()
    with pytest.raises(EOFError):
        inside.recv()


def test_a_wrong_key_is_refused_on_both_sides(door):
    with pytest.raises(DeploymentError, match="refuses the key"):
        connect(door.address, b"wrong", timeout_s=2)
    with pytest.raises(Empty):
        door.entries.get(timeout=0.1)


def test_a_stranger_who_says_nothing_keeps_nobody_waiting(door):
    stranger = socket.socket(socket.AF_UNIX if isinstance(door.address, str) else socket.AF_INET)
    stranger.connect(door.address)
    connect(door.address, KEY, timeout_s=5).close()
    door.entries.get(timeout=5)
    stranger.close()


def test_a_peer_that_reads_nothing_cannot_block_a_sender_for_ever(door):
    outside = connect(door.address, KEY)
    inside = door.entries.get(timeout=5)
    with pytest.raises(BlockingIOError):
        inside.send_bytes(bytes(64 << 20))
    outside.close()


def test_nobody_there_is_an_error_after_the_timeout(tmp_path):
    with pytest.raises(DeploymentError, match=r"no controller at .*absent within 0\.2 s"):
        connect(str(tmp_path / "absent"), KEY, timeout_s=0.2)


class EndsSoon:
    """A rank that is seen to have ended at the second look."""

    rank, num_looks = 0, 0

    def exit_text(self, wait_s: float = 0.0) -> str | None:
        self.num_looks += 1
        return "exit code 3" if self.num_looks > 1 else None

    def describe(self) -> str:
        return "its last words"


def test_a_rank_that_ends_between_the_door_and_its_first_message_is_named_with_its_end():
    entries: SimpleQueue = SimpleQueue()
    inside, outside = Pipe()
    outside.close()
    entries.put(inside)
    with pytest.raises(WorkerDiedError, match="rank 0 ended before it reported: exit code 3\nits last words"):
        gather_ranks(entries, 1, 30.0, [EndsSoon()])
    assert inside.closed


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.2:5555", ("10.0.0.2", 5555)),
        ("node-1:1", ("node-1", 1)),
        ("[::1]:80", ("::1", 80)),
        ("/tmp/x.sock", "/tmp/x.sock"),
    ],
)
def test_addresses_are_parsed(text, address):
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "host", "host:", ":5", "host:70000", "host:-1"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(DeploymentError, match="not an address"):
        parse_address(text)


class OwnArguments(CheckpointError):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def test_errors_travel_with_type_place_and_rank():
    error = pickle.loads(pickle.dumps(portable(CheckpointError("torn", where="f", found=3, expected=4), 2)))
    assert type(error) is CheckpointError
    assert str(error) == "f: rank 2: torn (found 3, expected 4)"
    other = portable(OwnArguments(1, 2), 0)
    assert type(other) is DeploymentError
    assert "rank 0: OwnArguments: 1 and 2" in str(other)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (LoadError("2 problems", where="rank 1"), "rank 1: 2 problems"),
        (LoadError("changed", where="f", found="offset 7, rank 1"), "f: changed (found offset 7, rank 1)"),
        (portable(LoadError("torn", where="shard-2"), 1), "shard-2: rank 1: torn"),
        (DeploymentError("rank 1 (process 5 on a) is gone"), "rank 1 (process 5 on a) is gone"),
        (LoadError("2 problems", where="rank 11"), "rank 11: rank 1: 2 problems"),
        (DeploymentError("rank 0: torn"), "rank 1: rank 0: torn"),
        (ValueError("rank 1 is no matrix"), "rank 1: ValueError: rank 1 is no matrix"),
    ],
)
def test_an_error_that_names_its_rank_is_not_told_twice(error, text):
    assert str(portable(error, 1)) == text


def test_last_words_survive_a_kill(tmp_path):
    path = tmp_path / "slate"
    code = (
        "import os, signal, sys; from pathlib import Path; from workbench.deployment.slate import Slate\n"
        "s = Slate(Path(sys.argv[1])); s.operation('step 7'); s.collective('#0 all_reduce')\n"
        "s.collective('#1 ' + 'é' * 900)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    process = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert exit_text(process.returncode) == "SIGKILL (signal 9)"
    words = read_slate(path)
    assert (words.operation, words.num_collectives) == ("step 7", 2)
    assert words.collective.startswith("#1 éé")
    assert len(words.collective) < 300


def test_absent_or_torn_last_words_are_empty(tmp_path):
    (tmp_path / "torn").write_bytes(b"xy")
    assert read_slate(tmp_path / "torn") == read_slate(tmp_path / "absent") == LastWords()
    Slate(tmp_path / "new")
    assert read_slate(tmp_path / "new") == LastWords()


@pytest.mark.parametrize(
    ("code", "text"), [(0, "exit code 0"), (3, "exit code 3"), (-11, "SIGSEGV (signal 11)"), (None, None)]
)
def test_exits_are_described(code, text):
    assert exit_text(code) == text


def test_only_the_last_lines_of_a_log_are_shown(tmp_path):
    (tmp_path / "log").write_text("".join(f"line {i}\n" for i in range(5000)))
    lines = log_tail(tmp_path / "log").splitlines()
    assert lines[-1] == "    line 4999"
    assert len(lines) == 15


def test_a_rank_that_cannot_even_start_is_named_with_its_exit_and_log(golden_root, tmp_path):
    with pytest.raises(WorkerDiedError) as info:
        Deployment.start(golden_root, env={"PYTHONHOME": str(tmp_path / "nowhere")}, timeouts=Timeouts(start_s=300))
    assert "rank 0 ended before it reported: exit code 1" in str(info.value)
    assert "encodings" in str(info.value), "the interpreter's own complaint, from the log"


TRAP = """
import sys
class Trap:
    hits = []
    def find_spec(self, name, path=None, target=None):
        if name == "torch" or name.startswith("torch."):
            Trap.hits.append(name)
            raise ImportError("torch is off limits here")
sys.meta_path.insert(0, Trap())
"""


@pytest.mark.parametrize(
    ("statement", "touches"),
    [
        ("import workbench", False),
        ("import workbench.deployment, workbench.serving; workbench.serving.MultimodalInferenceService", False),
        ("import workbench.serving.runner", True),
    ],
)
def test_importing_the_handle_loads_no_torch_and_so_touches_no_accelerator(statement, touches):
    code = f"{TRAP}\ntry:\n    {statement}\nexcept ImportError:\n    pass\nprint(bool(Trap.hits))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == str(touches)


def test_a_worker_without_a_proper_key_says_so():
    result = subprocess.run(
        [sys.executable, "-m", "workbench.deployment.worker", "--controller", "127.0.0.1:1"],
        input="not hex\n",
        capture_output=True,
        text=True,
        env={**os.environ, "RANK": "0"},
        check=False,
    )
    assert result.returncode == 1
    assert "the key is not hexadecimal" in result.stderr


def test_a_key_file_that_others_may_read_is_refused(tmp_path):
    path = tmp_path / "key"
    path.touch(mode=0o600)
    path.write_text("00ff")
    assert read_key(path) == b"\x00\xff"
    path.chmod(0o640)
    with pytest.raises(DeploymentError, match="others may read this key"):
        read_key(path)


def test_a_layout_that_would_flood_the_machine_starts_no_process(golden_root):
    with pytest.raises(DeploymentError, match=r"too many ranks for one machine \(found 60000"):
        Deployment.start(golden_root, Layout(dp=60_000))
