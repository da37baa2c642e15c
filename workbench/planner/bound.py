"""A time that a decode step of a layout cannot come below, from ledgers and links alone: for pruning before tracing.

Only what is certain is counted: weights and cached state that a step must read, and the two reductions over the tensor
parallel group that every layer ends its halves with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.placement import Layout
from workbench.planner.memory import CacheNeed, activation_itemsize, cache_need
from workbench.planner.weights import WeightTable
from workbench.spec import ModelSpec, MoESpec

if TYPE_CHECKING:
    from workbench.cluster.topology import Topology
    from workbench.planner.candidates import Candidate

__all__ = ["Gap", "decode_bound", "experts_visited"]

OPERATORS_PER_EXPERT = 10
GAP_KEPT = 0.9  # of the smallest distance between a bound and the traced time, when the rest is judged by its bound

_NOT_READ = ("embedding", "vision", "projector")  # a lookup reads a few rows; pictures are not part of a decode step


def decode_bound(
    table: WeightTable, layout: Layout, need: CacheNeed, topology: Topology, *, bandwidth: float, groups: int = 1
) -> float:
    """Seconds. `bandwidth` [B/s] is what reads can reach; `groups` of sequences share the pipeline (see StepCost)."""
    spec, itemsize = table.spec, activation_itemsize(table.precision)
    sequences = -(-need.slots // groups)
    touched = share_visited(spec, layout, sequences)
    reduce_s = 0.0
    if layout.tp > 1:
        size = sequences * spec.hidden_size * itemsize
        reduce_s = 2 * topology.collective_time("all_reduce", size, range(layout.tp)).value
    share = sequences / need.slots
    stages = []
    for stage, layers in enumerate(layout.stage_layers(spec.num_layers)):
        read: float = sum(
            held * (touched if role == "routed_expert" else 1.0)
            for role, held in table.stage(layout, stage).items()
            if role not in _NOT_READ
        )
        caches = cache_need(spec, layout, layers, need, itemsize)
        read += share * sum(caches.get(role, 0) for role in ("latent", "index keys", "keys and values", "state"))
        stages.append(read / bandwidth + len(layers) * reduce_s)
    return max(sum(stages), groups * max(stages))


def share_visited(spec: ModelSpec, layout: Layout, num_tokens: int) -> float:
    """Share of a layer's experts that a token of the expert group visits, routing even; 1 without experts."""
    ffn = next((layer.ffn for layer in spec.layers if isinstance(layer.ffn, MoESpec)), None)
    if ffn is None:
        return 1.0
    return float(1 - (1 - ffn.top_k / ffn.num_experts) ** (num_tokens * layout.expert_dp))


def experts_visited(spec: ModelSpec, layout: Layout, num_tokens: int) -> float:
    """Experts that one rank computes in a step, over all layers and stages that the step passes through."""
    local = sum(layer.ffn.num_experts / layout.ep for layer in spec.layers if isinstance(layer.ffn, MoESpec))
    return local * share_visited(spec, layout, num_tokens)


class Gap:
    """What a traced step takes beyond its bound, learnt from the plans costed so far.

    It has two parts: work on experts, as many times as experts are visited, and the rest (starting operators, norms,
    small collectives), which is alike for all layouts. The smallest of each that was seen is expected of the others;
    before anything was seen, only that every visited expert starts some operators.
    """

    def __init__(self, launch_s: float) -> None:
        self.per_expert, self.rest = OPERATORS_PER_EXPERT * launch_s, 0.0
        self.has_learnt = False

    def learn(self, x: Candidate) -> None:
        assert x.decode is not None
        experts = sum(line.estimate.value for line in x.decode.lines() if line.name in ("dequantise", "grouped_gemm"))
        per_expert = experts / x.visited if x.visited else 0.0
        rest = max(0.0, x.per_token.value - x.bound_s - experts)
        if self.has_learnt:
            per_expert, rest = min(self.per_expert, per_expert), min(self.rest, rest)
        self.per_expert, self.rest, self.has_learnt = per_expert, rest, True

    def cost_of(self, x: Candidate) -> float:
        """The least that the plan is expected to cost."""
        return x.cost_of(max(x.bound_s, GAP_KEPT * (self.rest + self.per_expert * x.visited)))
