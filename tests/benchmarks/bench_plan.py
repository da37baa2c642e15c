"""Predicted and measured memory and times of real ranks on this machine, as a table.

    python tests/benchmarks/bench_plan.py [--models k3-tiny 0.3B 1B] [--layouts tp2 tp2xep2 dp2xep2 pp2] [--out DIR]

Measures this machine's links and rates once, then for every model and layout: tries the operators of the traced model
with the threads that a rank has, starts the ranks, and compares. The two larger models are written with random weights
into a temporary folder. Wants a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import replace
from pathlib import Path

from workbench.base import Table
from workbench.checkpoint import Sizes, k3_config, write_checkpoint
from workbench.cluster import Topology
from workbench.placement import Layout, check_layout
from workbench.planner import Efficiency, PlanCheck, calibrate_host, check_deployment
from workbench.planner.inventories import InventoryBook
from workbench.planner.objective import Objective
from workbench.spec import count_model, read_spec

DATA = Path(__file__).resolve().parents[2] / "data"
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", default=["k3-tiny", "0.3B", "1B"])
    parser.add_argument("--layouts", nargs="+", default=["tp2", "tp2xep2", "dp2xep2", "pp2"])
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--chunk-tokens", type=int, default=128)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, help="folder for one JSON record each")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of probes and ranks alike: two ranks share this machine
    from workbench.cluster import measure_topology

    topology = measure_topology(2, device="cpu")
    print(topology.render(), flush=True)
    checks = []
    # Python between operators, from the smallest model on one rank; every prediction below uses it.
    base = run(DATA / "k3-tiny", Layout(), topology, options)
    efficiency = replace(Efficiency.for_device(topology.devices[0]), host=calibrate_host(base))
    print(f"between two operators: {efficiency.host}\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="plan-") as folder:
        for name in options.models:
            path = model_folder(name, Path(folder))
            for text in options.layouts:
                check = run(path, Layout.parse(text), topology, options, efficiency)
                print(check.render(), flush=True)
                checks.append((name, check))
                if options.out is not None:
                    options.out.mkdir(parents=True, exist_ok=True)
                    check.save(options.out / f"{name}-{text}.json")
    print(summary(checks).render())


def model_folder(name: str, folder: Path) -> Path:
    """The checkpoint of a named model: from `data/`, or made now."""
    if name not in SYNTHETIC:
        return DATA / name
    path = folder / name
    if not path.exists():
        write_checkpoint(path, k3_config(sizes=SYNTHETIC[name]))
        print(f"{name}: {count_model(read_spec(path)).num_params / 1e9:.3f} B parameters", flush=True)
    return path


def run(
    path: Path,
    layout: Layout,
    topology: Topology,
    options: argparse.Namespace,
    efficiency: Efficiency | None = None,
) -> PlanCheck:
    from workbench.deployment import Deployment
    from workbench.operators import probe_operators

    spec = read_spec(path)
    check_layout(spec, layout)
    book = InventoryBook(spec)
    chunk, context = options.chunk_tokens, options.max_tokens // 2
    objective = Objective(context=options.max_tokens, prompt=chunk, chunk_tokens=chunk, concurrency=1)
    inventories = [
        *book.prefill(layout, options.precision, objective),
        *book.decode(layout, options.precision, sequences=options.slots, context=context),
    ]
    coverage = probe_operators(inventories, "cpu", roofline=False)
    with Deployment.start(
        path,
        layout,
        precision=options.precision,
        num_slots=options.slots,
        max_tokens=options.max_tokens,
        threads=1,
    ) as deployment:
        return check_deployment(
            deployment,
            topology,
            precision=options.precision,
            chunk_tokens=chunk,
            context=context,
            measured=coverage,
            efficiency=efficiency,
            repeats=options.repeats,
        )


def summary(checks: list[tuple[str, PlanCheck]]) -> Table:
    rows = []
    for name, check in checks:
        worst = max(
            (abs(x.ratio - 1) for x in check.lines if x.measured.unit == "B" and x.counts), default=float("nan")
        )
        times = {x.what.split(":")[0]: x for x in check.lines if x.measured.unit == "s"}
        cells = [
            f"{times[p].predicted.value:.4f} / {times[p].measured.value:.4f} = {times[p].ratio:.2f}" for p in times
        ]
        rows.append((name, str(check.layout), f"{worst:.2%}", *cells, check.ok))
    return Table(
        title="Predicted / measured",
        columns=("model", "layout", "memory off by", "prefill s", "decode s", "within"),
        rows=tuple(rows),
    )


if __name__ == "__main__":
    main()
