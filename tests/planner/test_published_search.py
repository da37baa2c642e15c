"""The whole search for the published model on many devices, with the real tracer: quick and small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from planner_samples import published

from workbench.cluster import Topology, read_hardware
from workbench.planner import Objective, plan

SEARCH = """
import json
from planner_samples import published
from workbench.base import peak_resident_bytes
from workbench.cluster import Topology, read_hardware
from workbench.planner import Objective, plan
report = plan(published(), Topology.of_hardware(read_hardware("h200"), 512), Objective(context=8192, concurrency=512))
print(json.dumps({
    "peak": peak_resident_bytes(),
    "best": None if report.best is None else str(report.best),
    "considered": report.num_layouts,
    "devices": None if report.best is None else report.best.num_devices,
}))
"""


def test_a_search_over_512_devices_stays_under_two_gigabytes() -> None:
    """In a fresh process, the import of torch included; its seconds: tests/benchmarks/bench_published.py."""
    folder = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", SEARCH],
        capture_output=True,
        text=True,
        timeout=600,
        env={"PYTHONPATH": f"{folder}:{folder.parent}", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["considered"] > 1500
    assert found["devices"] >= 16
    assert found["peak"] < 2 << 30, found


def test_traced_from_the_real_model_the_plan_leaves_and_rejoins_cross_node_tensor_parallelism() -> None:
    """Two nodes of H200 by their datasheet, one sequence; then the network twenty times slower, and fast again."""
    fast = Topology.of_hardware(read_hardware("h200"), 16)
    slow = fast.with_inter_node(1 / 20)
    chosen = []
    for topology in (fast, slow, slow.with_inter_node(20)):
        report = plan(published(), topology, Objective(context=8192, concurrency=1))
        assert report.best is not None
        chosen.append((report.best.layout.pp, report.best.layout.tp))
    assert chosen == [(1, 16), (2, 8), (1, 16)]
