"""Models and machines for the planner's tests: published sizes, miniatures, and topologies of round numbers."""

from __future__ import annotations

from functools import lru_cache

import k3_published

from workbench.base import Quantity
from workbench.checkpoint import Sizes, k3_config
from workbench.cluster.cost import LinkCost
from workbench.cluster.topology import Fabric, Topology, TopologyDevice
from workbench.operators import CollectiveUse, Inventory, OperatorUse, Workload
from workbench.parallel.mesh import group_members
from workbench.placement import Layout
from workbench.planner import WeightTable, read_weight_table
from workbench.spec import ModelSpec, parse_config

# 8 layers, 16 experts, widths with room for tp 4; kinds of layers as in K3.
MINI = Sizes(num_experts=16, top_k=4, expert_width=256, vision_heads=2)


@lru_cache
def published() -> ModelSpec:
    return parse_config(k3_config(sizes=k3_published.SIZES, tokens=k3_published.TOKENS))


@lru_cache
def miniature() -> ModelSpec:
    return parse_config(k3_config(sizes=MINI))


def given(value: float, unit: str) -> Quantity:
    return Quantity(value, unit, "datasheet", "made up for a test")


def machine(
    num_devices: int,
    *,
    memory: float = 64e9,
    bandwidth: float = 2e12,
    rate: float = 4e14,
    per_host: int = 8,
    within: float = 4e11,
    between: float = 4e10,
    device_type: str = "toy",
) -> Topology:
    """Equal devices in hosts of `per_host`; figures in B, B/s and FLOP/s."""
    devices = tuple(
        TopologyDevice(
            rank=rank,
            host=f"host{rank // per_host}",
            name="toy",
            device_type=device_type,
            memory_total=given(memory, "B"),
            memory_bandwidth=given(bandwidth, "B/s"),
            matmul={"bf16": given(rate, "FLOP/s"), "fp32": given(rate / 8, "FLOP/s")},
            formats=("bf16", "fp32"),
        )
        for rank in range(num_devices)
    )

    def link(speed: float, alpha: float) -> Fabric:
        return Fabric(cost=LinkCost(alpha=given(alpha, "s"), bandwidth=given(speed, "B/s")))

    return Topology(name=f"{num_devices} toys", devices=devices, within=link(within, 2e-6), between=link(between, 8e-6))


def operator(
    category: str = "gemm", *, flops: int = 0, weights: int = 0, moved: int = 0, count: int = 1, **more: object
) -> OperatorUse:
    """One use of an operator that reads `weights` bytes of parameters and moves `moved` bytes of activations."""
    fields = {
        "name": f"aten.{category}",
        "layer_kind": "KDA+MoE",
        "input_shapes": ((1, 1),),
        "input_dtypes": ("bfloat16",),
        "flops": flops,
        "bytes_read": weights + moved,
        "bytes_written": 0,
        "weight_bytes": weights,
        "count": count,
        **more,
    }
    return OperatorUse(category=category, **fields)  # type: ignore[arg-type]


def collective(operation: str, group: str, ranks: tuple[int, ...], num_bytes: int, count: int = 1) -> CollectiveUse:
    return CollectiveUse(
        operation=operation,
        group=group,
        group_size=len(ranks),
        num_bytes=num_bytes,
        dtype="bfloat16",
        layer_kind="KDA+MoE",
        count=count,
        ranks=ranks,
    )


def simple_trace(
    spec: ModelSpec, layout: Layout, workload: Workload, *, stage: int = 0, precision: str = "bf16"
) -> Inventory:
    """A stand-in for the tracer: one product over all weights of the stage, and the collectives of every layer."""
    table = _table(spec, precision)
    weights = sum(size for role, size in table.stage(layout, stage).items() if role not in ("vision", "projector"))
    tokens = workload.num_tokens
    groups = group_members(layout, layout.rank_at(pp=stage))
    layers = len(layout.stage_layers(spec.num_layers)[stage])
    size = tokens * spec.hidden_size * 2
    uses = []
    if layout.tp > 1:
        uses.append(collective("all_reduce", "tp", groups["tp"], size, 2 * layers))
    if layout.ep > 1:
        uses.append(collective("all_reduce", "experts", groups["experts"], 2 * size, layers))
    if stage:
        uses.append(collective("receive", "pp", groups["pp"], 9 * size))
    if stage < layout.pp - 1:
        uses.append(collective("send", "pp", groups["pp"], 9 * size))
    return Inventory(
        model=spec.architecture,
        layout=layout,
        stage=stage,
        precision=precision,
        workload=workload,
        operators=(operator(flops=tokens * weights // 8, weights=weights, count=1),),
        collectives=tuple(uses),
        activation_peak_bytes=1000 * tokens,
    )


def simple_vision(spec: ModelSpec, layout: Layout, grid: tuple[int, int, int], *, precision: str = "bf16") -> Inventory:
    tokens = grid[1] * grid[2] // 4
    return Inventory(
        model=spec.architecture,
        layout=layout,
        stage=0,
        precision=precision,
        workload=Workload(phase="vision", new_tokens=tokens),
        operators=(),
        collectives=(),
        activation_peak_bytes=5000 * tokens,
    )


@lru_cache
def _table(spec: ModelSpec, precision: str) -> WeightTable:
    return read_weight_table(spec, precision)
