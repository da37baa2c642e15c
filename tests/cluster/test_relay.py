"""Two nodes that torchrun started, on one host: one topology, told by rank 0, with links between the nodes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from workbench.base import ConfigError
from workbench.cluster import read_topology
from workbench.cluster.relay import is_torchrun, measure_torchrun_topology

FAULTY = Path(__file__).with_name("faulty_link_worker.py")
MEASURE = """
import sys
from workbench.cluster import link_survey
from workbench.cluster.relay import measure_torchrun_topology
link_survey.COVERAGE_DTYPES = ("float32",)
topology = measure_torchrun_topology(
    device="cpu", sizes=(1 << 10, 1 << 16), dtypes=("float32",), rates=False, time_limit_s=LIMIT, command=COMMAND
)
if topology is not None:
    topology.save(sys.argv[1])
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_two_nodes(tmp_path: Path, command: tuple[str, ...], limit_s: float) -> Path:
    script, out = tmp_path / "measure.py", tmp_path / "topology.json"
    script.write_text(MEASURE.replace("LIMIT", str(limit_s)).replace("COMMAND", repr(command)))
    port = free_port()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    nodes = []
    try:
        for node in range(2):
            launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}"]
            launch += ["--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}", str(script), str(out)]
            with (tmp_path / f"node{node}.log").open("w") as log:
                nodes.append(
                    subprocess.Popen(
                        launch, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                    )
                )
        codes = [node.wait(240) for node in nodes]
    finally:
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
                node.wait()
    logs = "\n".join((tmp_path / f"node{node}.log").read_text() for node in range(2))
    assert codes == [0, 0], logs
    return out


@pytest.mark.slow
@pytest.mark.ranks
def test_two_nodes_become_one_topology(tmp_path: Path) -> None:
    topology = read_topology(run_two_nodes(tmp_path, (sys.executable, "-m", "workbench.cluster.link_worker"), 30.0))
    assert topology.claims == ()
    assert topology.num_devices == 2
    assert len(topology.hosts) == 2, "nodes of one name are told apart"
    assert topology.spans_hosts((0, 1))
    assert [(link.a, link.b) for link in topology.pairs] == [(0, 1)]
    assert topology.collective_time("all_reduce", 4096, (0, 1)).basis == "measured"


@pytest.mark.ranks
@pytest.mark.slow
def test_a_rank_that_hangs_on_the_other_node_is_ended_there_and_the_rest_measured(tmp_path: Path) -> None:
    topology = read_topology(run_two_nodes(tmp_path, (sys.executable, str(FAULTY), "hang before", "all_gather"), 8.0))
    assert "rank 1 began and did not enter within 8 s; rank 0 entered and did not come back" in topology.claims[0]
    assert "all_gather" not in {fit.operation for fit in topology.collectives}
    assert "broadcast" in {fit.operation for fit in topology.collectives}, "measured by the ranks that came after"


def test_outside_torchrun_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert not is_torchrun()
    with pytest.raises(ConfigError, match="not started by torchrun"):
        measure_torchrun_topology()
