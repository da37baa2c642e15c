"""Ranks that die or hang, handles that vanish, checkpoints that are broken: named at once, and nothing is left over."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rank_helpers import is_alive, wait_gone
from serving_fakes import byte_tokenizer

import workbench
from workbench.base import (
    CheckpointError,
    DeploymentError,
    ImageError,
    LoadError,
    RequestFailedError,
    WorkerDiedError,
)
from workbench.deployment import Deployment, Timeouts
from workbench.placement import Layout
from workbench.serving import Engine, GenerationRequest, MultimodalInferenceService, SamplingParams
from workbench.serving.service import placed_request

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]


def test_a_rank_killed_in_mid_answer_fails_every_request_with_its_name_and_signal(golden_root):
    deployment = Deployment.start(golden_root, Layout(tp=2), precision="fp32", num_slots=2, max_tokens=2000)
    tokenizer = byte_tokenizer(deployment.info.vocab_size, deployment.spec.tokens.bos)
    with MultimodalInferenceService(deployment, tokenizer) as service:
        replies = [service.stream(f"question {n}", max_tokens=1500) for n in range(4)]
        while len(replies[0]._events) < 3:
            next(replies[0])
        os.kill(deployment.pids[1], signal.SIGKILL)
        assert deployment.timeouts.command_s > 120, "a death that is not noticed as such outlasts the limit of the test"
        for reply in replies:
            with pytest.raises(WorkerDiedError) as info:
                reply.result()
        text = str(info.value)
        assert f"rank 1 (process {deployment.pids[1]}" in text
        assert "died during 'step': SIGKILL (signal 9)" in text
        assert "the kernel was out of memory" in text
        assert "last operation: " in text
        assert "last collective entered: #" in text
        assert "over tp ranks [0, 1]" in text
        assert "bytes of weights" in text, "the last lines of its log"
        with pytest.raises(WorkerDiedError, match="rank 1"):
            service.infer("another")
    with pytest.raises(WorkerDiedError, match="rank 1"):
        deployment.ping()
    wait_gone(deployment.pids, 1)
    assert "broken" in repr(deployment)
    deployment.close()
    assert not deployment.folder.exists()


def test_a_stopped_rank_is_a_timeout_that_names_it_first_and_ends_them_all(golden_root):
    with Deployment.start(
        golden_root, Layout(tp=2), precision="fp32", num_slots=1, max_tokens=50, timeouts=Timeouts(command_s=2)
    ) as deployment:
        os.kill(deployment.pids[1], signal.SIGSTOP)
        with pytest.raises(DeploymentError) as info:
            deployment.generate([1, 2, 3])
        text = str(info.value)
        assert "no answer to 'step' within 2 s from rank 1, 0" in text
        assert f"rank 1 (process {deployment.pids[1]}" in text
        assert "stopped: does not react at all" in text
        assert "rank 0" in text
        assert "all_reduce" in text, "where the other one waits"
        wait_gone(deployment.pids, 3)


HANDLE = """
import os, sys, time
from workbench.deployment import Deployment
from workbench.placement import Layout
deployment = Deployment.start(sys.argv[1], Layout(tp=int(sys.argv[2])), precision="fp32", num_slots=1, max_tokens=4000)
if sys.argv[3] == "fork" and os.fork() == 0:
    time.sleep(60)
    os._exit(0)
print(*deployment.pids, deployment.folder, flush=True)
from workbench.serving import SamplingParams
while True:
    deployment.generate([1, 2, 3], SamplingParams(max_tokens=3000))
"""


@pytest.mark.parametrize(
    ("tp", "how"),
    [(2, "fork"), *(pytest.param(*other, marks=pytest.mark.slow) for other in ((2, "plain"), (1, "fork")))],
)
def test_a_handle_killed_in_mid_answer_takes_its_ranks_with_it(golden_root, tp, how):
    """Also where a child that the handle forked keeps the sockets open."""
    handle = subprocess.Popen(
        [sys.executable, "-c", HANDLE, str(golden_root), str(tp), how],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        *pids, folder = handle.stdout.readline().split()
        assert len(pids) == tp
        time.sleep(0.3)
        assert all(is_alive(int(pid)) for pid in pids)
        handle.kill()
        wait_gone(map(int, pids), 5)
        deadline = time.monotonic() + 2
        while os.path.exists(folder) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not os.path.exists(folder)
    finally:
        os.killpg(handle.pid, signal.SIGKILL)
        handle.wait()
        handle.stdout.close()


STARTER = """
import os, secrets, sys
from pathlib import Path
from workbench.deployment.supervise import start_ranks

folder = Path(sys.argv[1])
ranks = start_ranks(2, str(folder / "control.sock"), secrets.token_bytes(32), folder, threads=1)
print(*(rank.pid for rank in ranks), flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_handle_killed_before_its_ranks_have_come_leaves_none_behind(tmp_path):
    folder = tmp_path / "ranks"
    folder.mkdir()
    starter = subprocess.run([sys.executable, "-c", STARTER, str(folder)], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in starter.stdout.split()]
    assert len(pids) == 2
    wait_gone(pids, 20)
    assert not folder.exists()


def test_a_missing_shard_is_an_error_of_the_ranks_that_names_the_file(golden_root, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(golden_root, broken, ignore=shutil.ignore_patterns("golden", "images"))
    lost = sorted(broken.glob("model-*.safetensors"))[3]
    lost.unlink()
    before = threading.active_count()
    with pytest.raises((LoadError, CheckpointError), match=lost.name) as info:
        Deployment.start(broken, Layout(tp=2), precision="fp32")
    assert "rank " in str(info.value)
    assert any("Traceback" in note for note in info.value.__notes__)
    assert threading.active_count() <= before


TORCHRUN = (
    "-m", "torch.distributed.run", "--nproc-per-node=2", "--nnodes=1", "--master-addr=127.0.0.1",
    "--monitor-interval=0.2",
)  # fmt: skip


def test_ranks_that_torchrun_started_join_over_tcp_answer_and_end_with_the_handle(golden_root, prompts, tmp_path):
    authkey = os.urandom(32)
    key_file = tmp_path / "key"
    key_file.touch(mode=0o600)
    key_file.write_text(authkey.hex())
    launched: list[subprocess.Popen] = []

    def launch(address) -> None:
        host, port = address
        worker = [
            "-m",
            "workbench.deployment.worker",
            "--controller",
            f"{host}:{port}",
            "--authkey-file",
            str(key_file),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, *TORCHRUN, f"--master-port={free_port()}", *worker]
        with (tmp_path / "torchrun.log").open("w") as log:
            launched.append(
                subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            )

    try:
        with Deployment.attach(
            ("127.0.0.1", 0),
            authkey,
            golden_root,
            Layout(tp=2),
            precision="fp32",
            device="cpu",
            num_slots=1,
            max_tokens=64,
            on_listening=launch,
        ) as deployment:
            assert deployment.generate(prompts["p7"]["token_ids"]) == prompts["p7"]["greedy_fp32"]
            assert deployment.folder is None
            with pytest.raises(DeploymentError, match="where torchrun was started"):
                deployment.log_text(0)
            pids = deployment.pids
            os.kill(pids[1], signal.SIGKILL)
            with pytest.raises(WorkerDiedError, match=r"rank 1 .* its connection ended"):
                deployment.generate(prompts["p7"]["token_ids"])
            wait_gone(pids, 5)
        assert launched[0].wait(30) != 0, "torchrun reports the rank that was killed"
    finally:
        for process in launched:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def test_an_empty_key_is_refused(golden_root):
    with pytest.raises(DeploymentError, match="empty key"):
        Deployment.attach(("127.0.0.1", 0), b"", golden_root, Layout())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


PLANT = """
import os
from workbench.serving.runner import RankRunner

plain = RankRunner.encode_images

def encode_images(self, images):
    keys = [key for key, _, _ in images]
    if os.environ["RANK"] == "1" and "before" in keys:
        raise ArithmeticError("planted before the work")
    plain(self, images)
    if os.environ["RANK"] == "1" and "after" in keys:
        raise ArithmeticError("planted after the work")

RankRunner.encode_images = encode_images
"""


@pytest.mark.slow
def test_a_picture_whose_encoding_raises_on_a_rank_ends_its_request_unless_the_ranks_fall_out_of_step(
    golden_root, prompts, picture_prompt, tmp_path
):
    """On both ranks, on one of them after the work they share, and before it, where the other one then waits."""
    (tmp_path / "sitecustomize.py").write_text(PLANT)
    path = os.pathsep.join([str(tmp_path), str(Path(workbench.__file__).parents[1])])
    prompt, images, expected = picture_prompt
    said = prompts["p7"]["greedy_fp32"]
    text = GenerationRequest(
        token_ids=tuple(prompts["p7"]["token_ids"]),
        sampling=SamplingParams(max_tokens=len(said)),
    )
    good = placed_request(prompt, images, SamplingParams(max_tokens=len(expected)))

    def renamed(key: str, *, cut: int = 0) -> GenerationRequest:
        first, *rest = good.images
        patches = first.patches[: len(first.patches) - cut]
        return replace(good, images=(replace(first, key=key, patches=patches), *rest))

    with Deployment.start(
        golden_root, Layout(tp=2), precision="fp32", num_slots=3, max_tokens=200, env={"PYTHONPATH": path}
    ) as deployment:
        engine = Engine(deployment).start()
        for bad, words in (
            (renamed("torn", cut=1), "grids and patches differ"),
            (renamed("after"), "planted after the work"),
        ):
            before, failing, whole = (engine.submit(each) for each in (text, bad, good))
            with pytest.raises((ImageError, RequestFailedError), match=words):
                list(failing)
            assert [event.token_id for event in before] == said
            assert [event.token_id for event in whole] == expected
            assert [event.token_id for event in engine.submit(text)] == said
            assert deployment.is_intact
        assert next(iter(deployment.stats())).num_images <= 2, "none of the failed ones is kept"
        failing, other = engine.submit(renamed("before")), engine.submit(text)
        with pytest.raises(DeploymentError, match="planted before the work"):
            list(failing)
        with pytest.raises(DeploymentError, match="planted before the work"):
            list(other)
        assert not deployment.is_intact
        engine.stop()
