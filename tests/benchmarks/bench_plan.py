"""Predicted and measured memory and times of real ranks on this machine, as tables.

    python tests/benchmarks/bench_plan.py [--memory-only | --times-only] [--models k3-nano 0.3B 1B]
                                          [--layouts tp2 tp2xep2 dp2xep2 pp2] [--topology FILE] [--out DIR]

For every model and layout the ranks are started once. Memory: what they hold, by role, beside the ledger's lines, and
the whole of each process; what a process takes beside its model is measured on the smallest model. Times: a chunk of a
prompt and a decode step, predicted from operators that are timed as the ranks run them (as many at once as ranks
compute at once, weights as cold as in a pass), from collectives that are measured between two processes, and from the
time between two operators, measured on the smallest model. Where a time is off, a profile of the same steps says in
which kind of operator. The two larger models are written with random weights into a temporary folder. Ranks run torch's
operators, which is what a plan adds up: with the native kernels, which no plan counts, they decode faster.

Memory may be measured on a busy machine. Times want one that does nothing else.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.base import Cell, Quantity, Table, human
from workbench.checkpoint import Sizes, k3_config, write_checkpoint
from workbench.cluster import Topology
from workbench.placement import Layout, check_layout
from workbench.planner import (
    CheckLine,
    Efficiency,
    PlanCheck,
    StepCost,
    calibrate_host,
    check_memory,
    check_times,
    measure_other,
)
from workbench.planner.check import MadeUpSteps
from workbench.planner.cost import HOST_LINE
from workbench.planner.inventories import InventoryBook, TraceInventory
from workbench.planner.objective import Objective
from workbench.spec import ModelSpec, count_model, read_spec

if TYPE_CHECKING:
    from workbench.deployment import Deployment
    from workbench.operators import Coverage, Inventory, Workload
    from workbench.profiling import DeploymentProfile

DATA = Path(__file__).resolve().parents[2] / "data"
SMALLEST = "k3-tiny"
SYNTHETIC = {
    "0.3B": Sizes(
        num_layers=8,
        full_attn_layers=(4, 7, 8),
        hidden_size=768,
        vocab_size=16384,
        dense_width=3072,
        kda_heads=8,
        kda_head_dim=64,
        mla_heads=8,
        q_rank=384,
        kv_rank=256,
        nope_dim=64,
        rope_dim=32,
        v_dim=64,
        num_experts=16,
        top_k=4,
        expert_width=1536,
        latent_dim=384,
    ),
    "1B": Sizes(
        num_layers=12,
        full_attn_layers=(4, 8, 11, 12),
        hidden_size=1024,
        vocab_size=32768,
        dense_width=4096,
        kda_heads=16,
        kda_head_dim=64,
        mla_heads=16,
        q_rank=512,
        kv_rank=256,
        nope_dim=64,
        rope_dim=32,
        v_dim=64,
        num_experts=32,
        top_k=4,
        expert_width=1536,
        latent_dim=512,
    ),
}


@dataclass
class Bench:
    """What is measured once and used for every prediction."""

    options: argparse.Namespace
    folder: Path
    topology: Topology | None = None
    others: dict[str, Quantity] = field(default_factory=dict)  # by layout: a process beside its model
    efficiencies: dict[int, Efficiency] = field(default_factory=dict)  # by ranks that compute at once
    began_s: float = field(default_factory=time.perf_counter)

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.began_s:5.0f} s] {text}", file=sys.stderr, flush=True)

    # models

    def model(self, name: str) -> Path:
        """The checkpoint of a named model: from `data/`, or made now."""
        if name not in SYNTHETIC:
            return DATA / name
        path = self.folder / name
        if not path.exists():
            write_checkpoint(path, k3_config(sizes=SYNTHETIC[name]))
            self.say(f"{name}: {count_model(read_spec(path)).num_params / 1e9:.3f} B parameters written")
        return path

    def start(self, path: Path, layout: Layout) -> Deployment:
        from workbench.deployment import Deployment

        return Deployment.start(
            path,
            layout,
            precision=self.options.precision,
            num_slots=self.options.slots,
            max_tokens=self.options.max_tokens,
            threads=1,
            env={"WORKBENCH_NATIVE": "0"},
        )

    # what predictions rest on

    def other(self, layout: Layout) -> Quantity:
        """What a process of a rank takes beside its model, by the smallest model on the same layout."""
        if str(layout) not in self.others:
            with self.start(DATA / SMALLEST, layout) as deployment:
                self.others[str(layout)] = measure_other(deployment, chunk_tokens=self.options.chunk_tokens)
            self.say(f"a process of {layout} beside its model: {human(self.others[str(layout)].value, 'B')}")
        return self.others[str(layout)]

    def links(self) -> Topology:
        if self.topology is None:
            from workbench.cluster import measure_topology, read_topology

            known = self.options.topology
            if known is not None and known.is_file():
                self.topology = read_topology(known)
            else:
                self.topology = measure_topology(2, device="cpu")
                self.say("links and rates measured")
                if known is not None:
                    self.topology.save(known)
            print(self.topology.render(), flush=True)
        return self.topology

    def efficiency(self, at_once: int) -> Efficiency:
        """With the time between two operators, from the smallest model: one rank alone, or replicas side by side that
        have nothing to say to one another."""
        if at_once not in self.efficiencies:
            device, layout, path = self.links().devices[0], Layout(dp=at_once), DATA / SMALLEST
            coverage = self.probe(path, [layout])
            with self.start(path, layout) as deployment:
                check = self.times(deployment, path, coverage, Efficiency.for_device(device))
            self.efficiencies[at_once] = replace(Efficiency.for_device(device), host=calibrate_host(check))
            self.say(f"between two operators, {at_once} at once: {self.efficiencies[at_once].host}")
        return self.efficiencies[at_once]

    def probe(self, path: Path, layouts: Iterable[Layout]) -> Coverage:
        """Times of all operators that these layouts run; as many at once as ranks compute at once."""
        from workbench.operators import probe_operators

        spec, options = read_spec(path), self.options
        book = InventoryBook(spec, trace_of())
        objective = Objective(
            context=options.max_tokens, prompt=options.chunk_tokens, chunk_tokens=options.chunk_tokens
        )
        found: list[Inventory] = []
        for layout in layouts:
            check_layout(spec, layout)
            found += book.prefill(layout, options.precision, objective)
            found += book.decode(layout, options.precision, sequences=options.slots, context=options.max_tokens // 2)
        at_once = max(computing_at_once(layout) for layout in layouts)
        coverage = probe_operators(found, "cpu", roofline=False, cold_weights=True, at_once=at_once)
        self.say(f"{path.name}: {len(coverage.results)} operators timed, {at_once} at once")
        return coverage

    # one model on one layout

    def times(self, deployment: Deployment, path: Path, coverage: Coverage, efficiency: Efficiency) -> PlanCheck:
        options = self.options
        lines, costs = check_times(
            deployment,
            self.links(),
            precision=options.precision,
            chunk_tokens=options.chunk_tokens,
            context=options.max_tokens // 2,
            measured=coverage,
            efficiency=efficiency,
            trace=trace_of(),
            repeats=options.repeats,
        )
        return PlanCheck(
            model=path.name, layout=deployment.layout, precision=options.precision, lines=lines, costs=costs
        )

    def run(self, name: str, layout: Layout, coverage: Coverage | None) -> tuple[PlanCheck, list[Table]]:
        """The check of one model on one layout, and tables of where its times are off."""
        options, path = self.options, self.model(name)
        other = None if options.times_only else self.other(layout)
        lines: tuple[CheckLine, ...] = ()
        costs: tuple[StepCost, ...] = ()
        tables: list[Table] = []
        with self.start(path, layout) as deployment:
            if other is not None:
                lines = check_memory(
                    deployment, precision=options.precision, chunk_tokens=options.chunk_tokens, other=other
                )
            if coverage is not None:
                times = self.times(deployment, path, coverage, self.efficiency(computing_at_once(layout)))
                lines, costs = (*lines, *times.lines), times.costs
                off = [x for x in times.lines if not x.is_close] if not options.explain_all else list(times.lines)
                tables = [
                    explain(deployment, cost, self.options)
                    for cost in costs
                    if any(x.what.startswith(cost.phase) for x in off)
                ]
        self.say(f"{name} on {layout} done")
        check = PlanCheck(model=name, layout=layout, precision=options.precision, lines=lines, costs=costs)
        return check, tables


def computing_at_once(layout: Layout) -> int:
    """Ranks that compute at the same time: stages of a pipeline pass a step on, one after another."""
    return layout.tp * layout.dp


def trace_of() -> TraceInventory:
    """Prompts spread evenly over the experts; the few tokens of a decode step draw theirs, as in a balanced router."""
    from workbench.operators.routing import draw_routing
    from workbench.operators.trace import trace_inventory

    def trace(spec: ModelSpec, layout: Layout, workload: Workload, **options: Any) -> Inventory:
        routing = draw_routing(spec) if workload.phase == "decode" else None
        return trace_inventory(spec, layout, workload, routing=routing, **options)

    return trace


def explain(deployment: Deployment, cost: StepCost, options: argparse.Namespace) -> Table:
    """Predicted and measured seconds of a step by kind of work, the largest difference first."""
    from workbench.profiling import DeploymentProfiler

    steps = MadeUpSteps(deployment=deployment, chunk=options.chunk_tokens, context=options.max_tokens // 2)
    if cost.phase == "decode":
        steps.fill()
    step = steps.prefill if cost.phase == "prefill" else steps.decode
    with DeploymentProfiler(deployment, with_work=False, max_steps=3, every=2) as profiler:
        for attempt in range(6):
            step(attempt)
    assert profiler.profile is not None
    return difference(cost, profiler.profile, deployment.layout)


def difference(cost: StepCost, profile: DeploymentProfile, layout: Layout) -> Table:
    """Ranks of one stage work at the same time, so their mean counts; stages one after another, so those add up."""
    ranks = {rank: ledger for rank, ledger in profile.ledgers.items() if ledger.num_steps}
    per_stage = layout.world_size // layout.pp
    measured: dict[str, float] = {}
    for ledger in ranks.values():
        for name, seconds in ledger.by_category().items():
            if name not in ("communication", "overlap"):
                key = HOST_LINE if name == "host gap" else name
                measured[key] = measured.get(key, 0.0) + seconds / ledger.num_steps / per_stage
    num_steps = max(1, max((x.num_plain + x.num_recorded for x in profile.ranks), default=1))
    for key, part in (("collectives, transfer", "transfer_s"), ("collectives, waiting", "waiting_s")):
        total = sum(getattr(share, part) for share in profile.communication.ranks)
        measured[key] = total / num_steps / per_stage
    predicted: dict[str, float] = {"collectives, waiting": 0.0}
    for line in cost.lines():
        key = line.name if line.kind == "operators" else "collectives, transfer"
        predicted[key] = predicted.get(key, 0.0) + line.estimate.value
    names = sorted({**predicted, **measured}, key=lambda x: -abs(measured.get(x, 0.0) - predicted.get(x, 0.0)))
    rows: list[tuple[Cell, ...]] = [
        (
            name,
            human(predicted.get(name, 0.0), "s"),
            human(measured.get(name, 0.0), "s"),
            human(measured.get(name, 0.0) - predicted.get(name, 0.0), "s"),
        )
        for name in names
    ]
    hit = [layer.num_hit for layer in profile.experts.layers]
    note = "recording itself costs time in every operator: "
    note += "not known" if profile.overhead is None else f"{profile.overhead:.0%} of these steps"
    note += "; for a stage of a pipeline waiting is the time of the other stages" if layout.pp > 1 else ""
    if hit:
        note += f"; experts visited over all these steps, a layer: {min(hit)} to {max(hit)}"
    columns = ("kind of work", "predicted", "measured", "difference")
    return Table(title=f"Where a {cost.phase} step is off", columns=columns, rows=tuple(rows), note=note)


def summary(checks: list[PlanCheck]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for check in checks:
        held = [x for x in check.lines if x.what == "weights and caches"]
        whole = [x for x in check.lines if x.what == "the whole rank"]
        times = {x.what.split(":")[0]: x for x in check.lines if x.measured.unit == "s"}
        rows.append(
            (
                check.model,
                str(check.layout),
                *(_worst(lines) for lines in (held, whole)),
                *(_pair(times.get(phase)) for phase in ("prefill", "decode")),
                check.ok,
            )
        )
    columns = ("model", "layout", "weights and caches", "whole rank", "prefill", "decode", "within")
    note = "predicted / measured = ratio, of the rank that is furthest off; within: memory 3 %, times 25 %"
    return Table(title="Predicted and measured", columns=columns, rows=tuple(rows), note=note)


def _worst(lines: list[CheckLine]) -> str | None:
    return _pair(max(lines, key=lambda x: abs(x.ratio - 1), default=None))


def _pair(line: CheckLine | None) -> str | None:
    if line is None:
        return None
    unit = line.measured.unit
    return f"{human(line.predicted.value, unit)} / {human(line.measured.value, unit)} = {line.ratio:.3f}"


def main() -> int:
    """0 where every figure is within its tolerance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", default=["k3-nano", "0.3B", "1B"], help=f"of data/, or {list(SYNTHETIC)}"
    )
    parser.add_argument("--layouts", nargs="+", default=["tp2", "tp2xep2", "dp2xep2", "pp2"])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--memory-only", action="store_true", help="no times: for a busy machine")
    which.add_argument("--times-only", action="store_true")
    parser.add_argument("--explain-all", action="store_true", help="profile steps whose time is close as well")
    parser.add_argument(
        "--topology", type=Path, help="links measured before; measured and written where it is not there"
    )
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--chunk-tokens", type=int, default=64)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5, help="steps of which the median counts")
    parser.add_argument("--out", type=Path, help="folder for one JSON record each")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of probes and ranks alike: two ranks share this machine
    layouts = [Layout.parse(text) for text in options.layouts]
    checks: list[PlanCheck] = []
    with tempfile.TemporaryDirectory(prefix="plan-") as folder:
        bench = Bench(options=options, folder=Path(folder))
        for name in options.models:
            path = bench.model(name)
            coverages: dict[int, Coverage] = {}
            for layout in layouts:
                at_once = computing_at_once(layout)
                if not options.memory_only and at_once not in coverages:
                    alike = [x for x in layouts if computing_at_once(x) == at_once]
                    coverages[at_once] = bench.probe(path, alike)
                check, tables = bench.run(name, layout, coverages.get(at_once))
                print("\n\n".join([check.render(), *(table.render() for table in tables)]), flush=True)
                checks.append(check)
                if options.out is not None:
                    options.out.mkdir(parents=True, exist_ok=True)
                    check.save(options.out / f"{name}-{layout}.json")
        bench.say("all done")
    print(summary(checks).render())
    return 0 if all(check.ok for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
