"""Two hosts with a slow link between them: what is measured is what was set, the planner reads it, decoding confirms.

Both hosts are network namespaces of this machine; ranks are started on each by torchrun, as on a real cluster.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent))
import netns

from workbench.base import Quantity
from workbench.cluster import Topology, read_topology
from workbench.placement import Layout
from workbench.planner import Objective, plan
from workbench.spec import read_spec

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "data" / "k3-tiny"
BITS_PER_S, DELAY_S = 200e6, 0.005
# Of 9014 bytes on the link 8948 are payload: Ethernet 14, IPv4 20, TCP 32 with time stamps.
PAYLOAD_BPS = BITS_PER_S / 8 * 8948 / 9014
LAYOUTS = ("tp2xep2", "pp2")
NUM_TOKENS = 12
WORKER_PORT, CONTROL_PORT = 29_511, 29_512
LIMIT_S = 240

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(why := netns.why_not()), reason=f"two hosts on one machine: {why}"),
]

Hosts = tuple[netns.Host, netns.Host]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with netns.shaped_pair(bits_per_s=BITS_PER_S, delay_s=DELAY_S) as pair:
        yield pair


@pytest.fixture(scope="module")
def topology(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Topology:
    """Measured by the command, one rank on each host, under torchrun."""
    out = tmp_path_factory.mktemp("topology") / "topology.json"
    run_ranks(hosts, ["-m", "workbench.cli", "topology", "--device", "cpu", "--no-rates", "--out", str(out)])
    return read_topology(out)


@pytest.fixture
def calm() -> None:
    """Skips where other work would be what is measured: the relay of the link is a process like any other."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > 2 * cores:
        pytest.skip(f"load {load:.1f} on {cores} cores: times taken now would be those of other work")


def start_ranks(hosts: Hosts, command: list[str]) -> list[subprocess.Popen[str]]:
    """One rank per host: torchrun on both, as two nodes."""
    environment = {
        "GLOO_SOCKET_IFNAME": netns.DEVICE,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    return [
        host.start(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
                *(f"--node-rank={node}", f"--master-addr={hosts[0].address}", f"--master-port={WORKER_PORT}"),
                *command,
            ],
            environment,
        )
        for node, host in enumerate(hosts)
    ]


def run_ranks(hosts: Hosts, command: list[str]) -> None:
    """Both ranks to their end. Fails with what they wrote."""
    for node, process in enumerate(start_ranks(hosts, command)):
        out, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, f"host {node}: {out[-2000:]}\n{errors[-2000:]}"


def with_rates(topology: Topology) -> Topology:
    """The measured links, with stated rates for the devices: only links are the question here."""
    rates = {
        "memory_bandwidth": Quantity(10e9, "B/s", "assumed", "stated by the test"),
        "matmul": {name: Quantity(50e9, "FLOP/s", "assumed", "stated by the test") for name in ("fp32", "bf16")},
    }
    return dataclasses.replace(
        topology, devices=tuple(dataclasses.replace(device, **rates) for device in topology.devices)
    )


def planned(topology: Topology) -> dict[str, float]:
    """Seconds per token of one sequence by layout, cheapest first."""
    report = plan(
        read_spec(MODEL),
        topology,
        Objective(context=64, concurrency=1, image_patches=0),
        precisions=("fp32",),
        layouts=[Layout.parse(text) for text in LAYOUTS],
    )
    assert report.best is not None, report.explain()
    # pp2 comes with stages that were cut for it, which its short name leaves out.
    return {f"pp{x.layout.pp}" if x.layout.pp > 1 else str(x.layout): x.per_token.value for x in report.candidates}


def decode(hosts: Hosts, layout: str, folder: Path) -> dict[str, object]:
    """One sequence decoded by one rank on each host; the handle stands on the first."""
    key_file = folder / f"key-{layout}"
    key_file.touch(mode=0o600)
    key_file.write_text(secrets.token_bytes(32).hex())
    address = hosts[0].address
    handle = hosts[0].start(
        [
            *(sys.executable, str(Path(__file__).with_name("shaped_decode.py")), str(MODEL), layout),
            *(address, str(CONTROL_PORT), str(key_file), str(NUM_TOKENS)),
        ],
        {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    controller = ["--controller", f"{address}:{CONTROL_PORT}", "--authkey-file", str(key_file)]
    ranks = start_ranks(hosts, ["-m", "workbench.deployment.worker", *controller])
    out, errors = handle.communicate(timeout=LIMIT_S)
    if handle.returncode:
        tails = [(process.kill(), process.communicate()[1][-1500:])[1] for process in ranks]
        pytest.fail(f"{errors[-2000:]}\nranks:\n" + "\n".join(tails))
    for process in ranks:
        process.communicate(timeout=LIMIT_S)
    found: dict[str, object] = json.loads(out.splitlines()[-1])
    return found


@pytest.mark.slow
def test_link_is_what_was_set_by_a_plain_socket(hosts: Hosts, calm: None) -> None:
    """The link itself, without torch: round trips of a byte, and a stream."""
    server = (
        "import socket; s = socket.create_server(('0.0.0.0', 5001)); print('up', flush=True)\n"
        "c, _ = s.accept(); c.setsockopt(6, 1, 1)\n"
        "while size := int.from_bytes(c.recv(8), 'big'):\n"
        "    while size: size -= len(c.recv(min(size, 1 << 20)))\n"
        "    c.sendall(b'x')\n"
    )
    client = (
        "import json, socket, sys, time; c = socket.create_connection((sys.argv[1], 5001)); c.setsockopt(6, 1, 1)\n"
        "times = {}\n"
        "for size in [1] * 20 + [1 << 22] * 5 + [1 << 23] * 5:\n"
        "    data = size.to_bytes(8, 'big') + bytes(size); start = time.perf_counter(); c.sendall(data); c.recv(1)\n"
        "    times.setdefault(size, []).append(time.perf_counter() - start)\n"
        "c.sendall(bytes(8)); print(json.dumps(times))\n"
    )
    listening = hosts[0].start([sys.executable, "-c", server])
    assert listening.stdout is not None
    listening.stdout.readline()
    out, errors = hosts[1].start([sys.executable, "-c", client, hosts[0].address]).communicate(timeout=LIMIT_S)
    assert out, errors
    times = {int(size): statistics.median(seconds) for size, seconds in json.loads(out).items()}
    assert times[1] / 2 == pytest.approx(DELAY_S, rel=0.15)
    assert (1 << 22) / (times[1 << 23] - times[1 << 22]) == pytest.approx(PAYLOAD_BPS, rel=0.15)


@pytest.mark.slow
def test_measured_bandwidth_and_latency_are_those_that_were_set(calm: None, topology: Topology) -> None:
    assert topology.num_devices == 2
    assert topology.spans_hosts((0, 1))
    assert topology.claims == ()
    link = topology.link(0, 1)
    assert link is not None
    assert link.bandwidth.basis == "measured"
    assert link.bandwidth.value == pytest.approx(PAYLOAD_BPS, rel=0.15)
    assert link.alpha.value == pytest.approx(DELAY_S, rel=0.15)


@pytest.mark.slow
def test_collectives_cost_round_trips_of_the_slow_link(calm: None, topology: Topology) -> None:
    small = topology.collective_time("all_reduce", 1024, (0, 1))
    assert small.basis == "measured"
    assert DELAY_S < small.value < 12 * DELAY_S


@pytest.mark.slow
def test_planner_prefers_a_pipeline_over_tensor_parallelism_across_the_slow_link(topology: Topology) -> None:
    costs = planned(with_rates(topology))
    assert list(costs) == ["pp2", "tp2xep2"]
    assert costs["tp2xep2"] > 3 * costs["pp2"]


@pytest.mark.slow
def test_decoding_confirms_the_order(hosts: Hosts, topology: Topology, tmp_path: Path) -> None:
    found = {layout: decode(hosts, layout, tmp_path) for layout in LAYOUTS}
    assert found["tp2xep2"]["tokens"] == found["pp2"]["tokens"]
    seconds = {layout: float(str(run["token_s"])) for layout, run in found.items()}
    assert seconds["tp2xep2"] > 3 * seconds["pp2"], seconds
    # The planner counts what the model exchanges; the handle's own messages across the link come on top.
    for layout, predicted in planned(with_rates(topology)).items():
        print(f"{layout}: {predicted * 1e3:.1f} ms per token predicted, {seconds[layout] * 1e3:.1f} ms decoded")


def test_namespaces_and_relay_are_gone_after_a_failure() -> None:
    names: list[str] = []
    sleepers: list[subprocess.Popen[str]] = []

    def fail() -> None:
        with netns.shaped_pair(bits_per_s=1e9, delay_s=0.001) as pair:
            names.extend(host.name for host in pair)
            sleepers.append(pair[1].start(["sleep", "600"]))
            raise ArithmeticError("as a test might")

    with pytest.raises(ArithmeticError):
        fail()
    assert sleepers[0].returncode is not None
    assert not any((netns.RUN_DIR / name).exists() for name in names)
    assert subprocess.run(["pgrep", "-f", names[0]], capture_output=True, text=True).stdout == ""


def test_killed_test_run_leaves_no_relay_and_the_next_one_clears_up() -> None:
    """Nothing of this process runs when it is killed: the relay notices, and the namespaces are cleared by name."""
    code = (
        "import netns, os, signal\n"
        "with netns.shaped_pair(bits_per_s=1e9, delay_s=0.001) as pair:\n"
        "    pair[0].start(['sleep', '600'])\n"
        "    print(pair[0].name, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=60
    )
    name = killed.stdout.strip()
    assert (netns.RUN_DIR / name).exists(), killed.stderr
    netns._remove_leftovers()
    assert not (netns.RUN_DIR / name).exists()
    deadline = time.monotonic() + 10
    while subprocess.run(["pgrep", "-f", name], capture_output=True).stdout:
        assert time.monotonic() < deadline, "the relay is still there"
        time.sleep(0.05)
