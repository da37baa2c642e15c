"""What the work on the published Kimi K3 costs on this machine: seconds and peak memory against what was asked.

    python tests/benchmarks/bench_published.py [--repeats 3] [--only inspect trace search audit]

`inspect`: the published config and index are read, counted and mapped. `trace`: what one rank runs in a chunk and in a
decode step, of four layouts of up to 512 ranks, and in the last chunk of 2^20 tokens. `search`: every layout for 512
devices is judged. `audit`: the ghost of all 96 files is audited (headers and sizes are real, values are holes). `plan`:
the reads of one rank of an EP64 layout are laid out. Each job runs in a fresh process that imports everything anew; the
seconds are of the job on the clock and of the processor, medians over repeats. Leaves with 1 where a median is over its
limit. All but `trace` and `search` need the published config and index (WORKBENCH_REFERENCE, tests/k3_published.py).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

import k3_published  # noqa: E402

from workbench.base import Table  # noqa: E402
from workbench.checkpoint import write_ghost  # noqa: E402

# What each job does with `root`; what it returns is printed, so that a job that did nothing is seen.
JOBS = {
    "inspect": """
from workbench.checkpoint import inspect_checkpoint
def job(root):
    report = inspect_checkpoint(root)
    return f"{report.names.num_matched:,} of {report.names.num_names:,} names"
""",
    "trace": """
from k3_published import SIZES, TOKENS
from workbench.checkpoint import k3_config
from workbench.operators import Workload, trace_inventory
from workbench.placement import Layout
from workbench.spec import parse_config
def job(root):
    spec = parse_config(k3_config(sizes=SIZES, tokens=TOKENS))
    chunk, decode = Workload(phase="prefill", new_tokens=4096), Workload(phase="decode", num_sequences=64, context=8192)
    last = Workload(phase="prefill", new_tokens=2048, context=2**20 - 2048)
    layouts = ("tp16xep16", "dp8xtp8xep64", "pp4xtp8xep8", "dp64xtp8xep128:all_to_all")
    asked = [(text, workload) for text in layouts for workload in (chunk, decode)] + [("tp16xep16", last)]
    found = [trace_inventory(spec, Layout.parse(text), workload, precision="mxfp4") for text, workload in asked]
    return f"{len(found)} inventories, {sum(len(x.operators) for x in found):,} kinds of calls"
""",
    "search": """
from k3_published import SIZES, TOKENS
from workbench.checkpoint import k3_config
from workbench.cluster import Topology, read_hardware
from workbench.planner import Objective, plan
from workbench.spec import parse_config
def job(root):
    spec = parse_config(k3_config(sizes=SIZES, tokens=TOKENS))
    report = plan(spec, Topology.of_hardware(read_hardware("h200"), 512), Objective(context=8192, concurrency=512))
    return f"{report.num_layouts:,} layouts, best {report.best.layout}"
""",
    "audit": """
from workbench.checkpoint import audit
def job(root):
    report = audit(root)
    return f"{report.num_tensors:,} tensors, {report.tensor_bytes:,} B, {'sound' if report.ok else 'not sound'}"
""",
    "plan": """
from workbench.loading import prepare_load
from workbench.checkpoint import Checkpoint
from workbench.placement import Layout
from workbench.rehearsal import read_plan
def job(root):
    prepared = prepare_load(Checkpoint.open(root), Layout.parse("tp8xdp8xep64"), 11, precision="mxfp4")
    found = read_plan(prepared, "mxfp4")
    return f"{found.num_bytes:,} B in {found.num_reads:,} reads"
""",
}
RUN = """
import json, sys, time
from workbench.base import peak_resident_bytes
wall, cpu = time.perf_counter(), time.process_time()
result = job(sys.argv[1])
print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu, peak_resident_bytes(), result]))
"""
LIMITS = {
    "inspect": (10, 2 << 30),
    "trace": (10, 2 << 30),
    "search": (10, 2 << 30),
    "audit": (60, 2 << 30),
    "plan": (30, 2 << 30),
}
WITHOUT_FILES = {"trace", "search"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=JOBS, default=list(JOBS))
    args = parser.parse_args()
    has_files = k3_published.CONFIG.is_file() and k3_published.INDEX.is_file()
    rows: list[tuple[object, ...]] = []
    with tempfile.TemporaryDirectory(prefix="published-") as folder:
        roots = make_roots(Path(folder), args.only) if has_files else {}
        for name in args.only:
            if not has_files and name not in WITHOUT_FILES:
                print(f"{name}: not run, no published files at {k3_published.REFERENCE}", file=sys.stderr)
                continue
            rows.append(measured(name, roots.get(name, Path(folder)), args.repeats))
    columns = ("job", "result", "wall s", "cpu s", "limit s", "peak MiB", "limit MiB", "within")
    title = f"published Kimi K3, medians of {args.repeats}"
    print(Table(title=title, columns=columns, rows=tuple(rows)).render())
    print(json.dumps([dict(zip(columns, row, strict=True)) for row in rows]))
    sys.exit(0 if all(row[-1] == "yes" for row in rows) else 1)


def make_roots(folder: Path, names: list[str]) -> dict[str, Path]:
    roots = {}
    if "inspect" in names:
        roots["inspect"] = folder / "published"
        roots["inspect"].mkdir()
        shutil.copyfile(k3_published.CONFIG, roots["inspect"] / "config.json")
        shutil.copyfile(k3_published.INDEX, roots["inspect"] / k3_published.INDEX.name)
    if {"audit", "plan"} & set(names):
        ghost = write_ghost(k3_published.CONFIG, folder / "ghost", index=k3_published.INDEX).root
        roots["audit"] = roots["plan"] = ghost
    return roots


def measured(name: str, root: Path, repeats: int) -> tuple[object, ...]:
    runs = []
    for _ in range(repeats):
        done = subprocess.run(
            [sys.executable, "-c", JOBS[name] + RUN, str(root)],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": f"{TESTS}:{TESTS.parent}"},
        )
        if done.returncode:
            sys.exit(f"{name} failed:\n{done.stderr}")
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    walls, cpus, peaks, results = zip(*runs, strict=True)
    limit_s, limit_bytes = LIMITS[name]
    wall_s, peak = statistics.median(walls), max(peaks)
    verdict = "yes" if wall_s < limit_s and peak < limit_bytes else "no"
    return (
        name,
        results[0],
        round(wall_s, 2),
        round(statistics.median(cpus), 2),
        limit_s,
        peak >> 20,
        limit_bytes >> 20,
        verdict,
    )


if __name__ == "__main__":
    main()
