"""What the profiler costs and how true it is: share of a step, sums of operators, a shaped link, a panel for an hour.

    python tests/benchmarks/bench_profiler.py [--parts cost link panel] [--model data/k3-nano] [--runs 5] [--seconds 30]
                                              [--budget 0.03] [--redraws 36000]

cost    one rank answers greedily. Its hooks alone are on for every other answer of a few seconds, a pair at a time in
        turned order, since the machine drifts by more than they cost; with sampling under the budget and without it
        takes turns by runs of `--seconds`, as long as it takes to pay for a recorded step. Medians of pairs; what the
        profiler says of its own cost; the parts of a recorded step against the whole.
link    two hosts as network namespaces with a link of a set rate (needs root and tc): steps of a set pause and one
        reduction. The share of communication against its closed form, and the same with one rank late on purpose: what
        is late must show as waiting, and the transfer must stay.
panel   as many redraws as an hour brings at ten a second, one behind another instead of in an hour (a faster clock),
        with news before each: growth of the process from the first tenth to the end.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from workbench.base import Cell, Table, human
from workbench.deployment import Deployment
from workbench.placement import Layout
from workbench.profiling import Communication, DeploymentProfile, DeploymentProfiler, split_communication
from workbench.profiling.communication import CollectiveTime
from workbench.serving import SamplingParams
from workbench.view import LoadView

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "cluster"))
PROMPT = tuple(range(20, 36))
CHUNK_TOKENS = 64
PAIR_S, HOOK_PAIRS = 4.0, 4  # of the hooks: seconds of a run, pairs to one of sampling
HOOKS = "hooks alone"
BITS_PER_S, DELAY_S = 200e6, 0.0005
PAYLOAD_BPS = BITS_PER_S / 8 * 8948 / 9014  # Ethernet 14, IPv4 20, TCP 32 of 9014 bytes
NUM_BYTES, NUM_STEPS, LATE_S = 4 << 20, 12, 0.1
PORT = 29_521


def answer_for(ranks: Deployment, seconds: float) -> list[float]:
    """Seconds of a step, one figure a chunk of tokens, for about so long."""
    times, end_s = [], time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        began = time.perf_counter()
        ranks.generate(PROMPT, SamplingParams(max_tokens=CHUNK_TOKENS, stop_ids=()))
        times.append((time.perf_counter() - began) / CHUNK_TOKENS)
    return times


def answer_hooked(ranks: Deployment) -> float:
    """Seconds of a step with the hooks in and nothing recorded beyond the first step, which is no part of it."""
    with DeploymentProfiler(ranks, with_work=False, every=1 << 40, max_steps=1):
        answer_for(ranks, 1e-3)
        return statistics.fmean(answer_for(ranks, PAIR_S))


def measure_cost(model: Path, runs: int, seconds: float, budget: float) -> dict[str, object]:
    sampling = f"sampling, budget {budget:g}"
    options: dict[str, Any] = {"every": 20, "budget": budget, "max_steps": 1 << 20, "max_events": 1 << 40}
    pairs: dict[str, list[tuple[float, float]]] = {HOOKS: [], sampling: []}  # seconds of a step without, and with
    profiles: list[DeploymentProfile] = []
    with Deployment.start(model, Layout(), num_slots=1, max_tokens=len(PROMPT) + CHUNK_TOKENS, threads=1) as ranks:

        def sampled() -> float:
            with DeploymentProfiler(ranks, with_work=False, **options) as profiler:
                own = statistics.fmean(answer_for(ranks, seconds))
            assert profiler.profile is not None
            profiles.append(profiler.profile)
            return own

        with DeploymentProfiler(ranks, with_work=False, max_steps=1):  # starts torch's profiler, once a process
            answer_for(ranks, 1.0)
        ways: dict[str, tuple[Callable[[], float], float]] = {
            HOOKS: (lambda: answer_hooked(ranks), PAIR_S),
            sampling: (sampled, seconds),
        }
        for name, (with_it, length) in ways.items():
            for number in range(runs * (HOOK_PAIRS if name == HOOKS else 1)):
                if number % 2:
                    own = with_it()
                    pairs[name].append((statistics.fmean(answer_for(ranks, length)), own))
                else:
                    plain = statistics.fmean(answer_for(ranks, length))
                    pairs[name].append((plain, with_it()))
    plain = statistics.median(without for each in pairs.values() for without, _ in each)
    rows: list[tuple[Cell, ...]] = []
    record: dict[str, object] = {"runs": runs, "seconds_a_run": seconds}
    for name, each in pairs.items():
        ratios = [own / without - 1 for without, own in each]
        spread = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
        step = human(statistics.median(own for _, own in each), "s")
        rows.append((name, len(each), step, f"{spread[1]:+.2%}", f"{spread[0]:+.2%} to {spread[2]:+.2%}"))
        record[name] = {"median_of_pairs": spread[1], "quartiles": spread, "pairs_s": each}
    recorded = [profile.ranks[0].num_recorded for profile in profiles]
    note = f"a step without: {human(plain, 's')}; steps recorded a run: {recorded}; asked: at most 3 % when sampling"
    columns = ("profiler", "pairs", "time of a step", "over that without, median", "middle half of the pairs")
    print(Table(title=f"{model.name}, one rank", columns=columns, rows=tuple(rows), note=note).render())
    off = max(abs(ledger.accounted_s / ledger.seconds - 1) for p in profiles for ledger in p.ledgers.values())
    own = [profile.overhead for profile in profiles if profile.overhead is not None]
    print(f"parts of a recorded step are off its whole by at most {off:.2%} (asked: 5 %)")
    print(
        f"what the profiler says of its own cost: {', '.join(f'{share:.2%}' for share in own)} of {human(plain, 's')}"
    )
    costs = [(x.recorded_step_s, x.plain_step_s, x.read_s) for profile in profiles for x in profile.ranks]
    return {**record, "parts_off": off, "own_overhead": own, "num_recorded": recorded, "recorded_plain_read_s": costs}


def shaped_run(hosts: Sequence[object], pause_s: float, late_s: float) -> Communication:
    environment = {"GLOO_SOCKET_IFNAME": "shaped0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        arguments = [str(x) for x in (folder, NUM_STEPS, pause_s, NUM_BYTES, late_s)]
        running = [
            host.start(  # type: ignore[attr-defined]
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
                    *(f"--node-rank={node}", f"--master-addr={hosts[0].address}", f"--master-port={PORT}"),  # type: ignore[attr-defined]
                    *(str(Path(__file__).with_name("shaped_steps.py")), *arguments),
                ],
                environment,
            )
            for node, host in enumerate(hosts)
        ]
        for process in running:
            try:
                _, errors = process.communicate(timeout=240)
            except subprocess.TimeoutExpired:
                raise RuntimeError("the ranks of the shaped link did not end") from None
            if process.returncode:
                raise RuntimeError(errors[-2000:])
        records = [json.loads((Path(folder) / f"rank-{rank}.json").read_text()) for rank in range(2)]
    times = {
        rank: [CollectiveTime(**{**x, "ranks": tuple(x["ranks"])}) for x in record["collectives"]]
        for rank, record in enumerate(records)
    }
    return split_communication(times, seconds=statistics.fmean(record["seconds"] for record in records))


def measure_link() -> dict[str, object]:
    import netns

    if why := netns.why_not():
        print(f"link: not measured, {why}")
        return {"skipped": why}
    # Two ranks reduce in halves: each sends one half to be added and the other half once it is.
    transfer_s = NUM_BYTES / PAYLOAD_BPS
    pause_s = 0.15
    rows: list[tuple[Cell, ...]] = []
    record: dict[str, object] = {}
    with netns.shaped_pair(bits_per_s=BITS_PER_S, delay_s=DELAY_S) as hosts:
        for name, late_s in (("both in time", 0.0), (f"rank 1 {LATE_S:g} s late", LATE_S)):
            found = shaped_run(hosts, pause_s, late_s)
            expected = transfer_s / (transfer_s + pause_s + late_s)
            share = found.share("transfer_s") or 0.0
            waited = found.ranks[0].waiting_s / NUM_STEPS
            moved = found.ranks[0].transfer_s / NUM_STEPS
            shares = (f"{expected:.1%}", f"{share:.1%}", f"{share / expected - 1:+.1%}")
            rows.append((name, *shares, *(human(x, "s") for x in (transfer_s, moved, waited)), found.latest))
            record[name] = {"expected": expected, "share": share, "rank0_waiting_s": waited, "rank0_transfer_s": moved}
    columns = ("", "share, closed form", "measured", "off", "transfer, closed form", "rank 0 transfer", "rank 0 waits",
               "waited for")  # fmt: skip
    title = f"{human(NUM_BYTES, 'B')} reduced over {BITS_PER_S / 1e6:g} Mb/s, {DELAY_S * 1e3:g} ms one way"
    note = f"asked: within 10 %, and the {LATE_S:g} s of the late rank as waiting"
    print(Table(title=title, columns=columns, rows=tuple(rows), note=note).render())
    return record


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure_panel(redraws: int) -> dict[str, object]:
    view = LoadView(num_requests=redraws)
    before = 0
    began = time.perf_counter()
    for n in range(redraws):
        view(
            SimpleNamespace(  # type: ignore[arg-type]
                submitted_s=n * 0.1,
                arrivals=((n * 0.1 + 0.5 + 0.001 * (n % 97), 1), (n * 0.1 + 1.0, 9)),
                num_tokens=10,
                first_token_s=0.5 + 0.001 * (n % 97),
                per_token_s=0.05,
                end_to_end_s=1.0,
                error="",
                is_warm_up=False,
            )
        )
        view._redraw()
        if n == redraws // 10:
            gc.collect()
            before = resident_bytes()
    gc.collect()
    grown = resident_bytes() - before
    each = (time.perf_counter() - began) / redraws
    print(
        f"panel: {redraws:,} redraws, an hour's worth at {redraws / 3600:g} a second, in {each * redraws:.0f} s "
        f"({human(each, 's')} each): {human(grown, 'B')} more from the first tenth on (asked: at most 50 MB)"
    )
    return {"redraws": redraws, "grown_bytes": grown, "redraw_s": each}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=("cost", "link", "panel"), default=["cost", "link", "panel"])
    parser.add_argument("--model", type=Path, default=ROOT / "data" / "k3-nano")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each run (default 30)")
    parser.add_argument("--budget", type=float, default=0.03, help="share of step time (default 0.03)")
    parser.add_argument("--redraws", type=int, default=36_000, help="an hour at ten a second (default 36000)")
    args = parser.parse_args()
    record: dict[str, object] = {"benchmark": "profiler", "model": str(args.model), "load": os.getloadavg()[0]}
    if "cost" in args.parts:
        record["cost"] = measure_cost(args.model, args.runs, args.seconds, args.budget)
    if "link" in args.parts:
        record["link"] = measure_link()
    if "panel" in args.parts:
        record["panel"] = measure_panel(args.redraws)
    print(json.dumps(record))


if __name__ == "__main__":
    main()
