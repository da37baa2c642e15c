"""The search: every layout, the memory of each, and the cost of those that could win.

Layouts that do not divide the model or do not fit are refused by arithmetic. The others are costed from traces of the
real model in the order of a lower bound on their cost, until the bound of the next is above the best cost found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from workbench.base import ConfigError, LayoutError, Quantity, human
from workbench.placement import Layout
from workbench.planner.bound import Gap, decode_bound, experts_visited
from workbench.planner.candidates import (
    Candidate,
    Divisibility,
    Refusal,
    RefusalKind,
    all_layouts,
    balanced,
    fullest_stage,
    ledgers_of,
    memory_excess,
    memory_reason,
)
from workbench.planner.cost import Efficiency, OperatorSeconds, StageCost, StepCost, stage_cost, step_cost
from workbench.planner.engines import WORKBENCH, Engine
from workbench.planner.inventories import InventoryBook, TraceInventory
from workbench.planner.memory import (
    CacheNeed,
    MemoryLedger,
    Reserve,
    activation_itemsize,
    request_floor,
    vision_placement,
)
from workbench.planner.objective import Objective
from workbench.planner.report import PlanReport
from workbench.planner.weights import WeightTable, read_weight_table
from workbench.spec import ModelSpec

if TYPE_CHECKING:
    from workbench.cluster.topology import Topology, TopologyDevice
    from workbench.operators.inventory import Inventory

__all__ = ["default_precision", "plan"]

TRACE_LIMIT = 8
PATIENCE = 4  # times as many traces where nothing has kept the limits yet


def default_precision(spec: ModelSpec) -> str:
    """How the published files hold the weights, so that nothing is rounded or expanded; bf16 where that is no
    precision of this project's own."""
    from workbench.nn.precision import PRECISIONS

    scheme = spec.quant.scheme if spec.quant is not None else "bf16"
    return scheme if scheme in PRECISIONS else "bf16"


def plan(
    spec: ModelSpec,
    topology: Topology,
    objective: Objective | None = None,
    *,
    precisions: Sequence[str] | None = None,
    kv_dtypes: Sequence[str] = ("auto",),
    layouts: Iterable[Layout] | None = None,
    engine: Engine = WORKBENCH,
    reserve: Reserve | None = None,
    efficiency: Efficiency | None = None,
    measured: OperatorSeconds | None = None,
    trace: TraceInventory | None = None,
    trace_vision: TraceInventory | None = None,
    trace_limit: int = TRACE_LIMIT,
    snapshots: int = 0,
) -> PlanReport:
    """The best plan for `objective` on the devices of `topology`, with everything that was considered.

    `precisions`: how weights may be held, by default as published; a narrower one changes answers, so it must be asked
    for. `layouts` limits the search to those. `reserve` is what a device keeps for itself, by default what the topology
    says of its first one. `measured` holds seconds of operators measured on this kind of device.
    `trace` makes inventories (default: `operators.trace_inventory`); at most `trace_limit` plans are costed by it. No
    plan at all is an answer: the report then has only refusals. Raises ConfigError for a figure that the search needs
    and the topology lacks, LoadError for an unknown precision.
    """
    search = _Search(
        spec=spec,
        topology=topology,
        objective=objective or Objective(),
        engine=engine,
        efficiency=efficiency or Efficiency.for_device(topology.devices[0]),
        reserve=reserve or Reserve.of(topology.devices[0]),
        measured=measured,
        book=InventoryBook(spec, trace, trace_vision),
        trace_limit=trace_limit,
        snapshots=snapshots,
    )
    chosen = tuple(precisions or (default_precision(spec),))
    wanted = list(layouts) if layouts is not None else list(all_layouts(spec, topology.num_devices))
    return search.run(wanted, chosen, tuple(kv_dtypes))


@dataclass(kw_only=True)
class _Search:
    spec: ModelSpec
    topology: Topology
    objective: Objective
    engine: Engine
    efficiency: Efficiency
    reserve: Reserve
    measured: OperatorSeconds | None
    book: InventoryBook
    trace_limit: int
    snapshots: int
    refused: list[Refusal] = field(default_factory=list)
    tables: dict[str, WeightTable] = field(default_factory=dict)
    held: tuple[object, Layout, tuple[MemoryLedger, ...], str] | None = None  # see `_memory`

    def run(self, layouts: Sequence[Layout], precisions: Sequence[str], kv_dtypes: Sequence[str]) -> PlanReport:
        began = time.perf_counter()
        self._check_objective()
        fitting: list[Candidate] = []
        divisibility = Divisibility(self.spec)
        for precision in precisions:
            table = self.tables[precision] = read_weight_table(self.spec, precision, engine=self.engine)
            for layout in layouts:
                reason = self._shape_reason(layout, divisibility)
                for kv_dtype in kv_dtypes:
                    if reason:
                        self._refuse_layout(layout, precision, kv_dtype, *reason)
                        continue
                    candidate = self._fit(table, layout, kv_dtype)
                    if candidate is not None:
                        fitting.append(candidate)
        costed, uncosted = self._cost_all(fitting)
        return PlanReport(
            model=self.spec.architecture,
            topology=self.topology.name,
            objective=self.objective,
            engine=self.engine,
            efficiency=self.efficiency,
            candidates=tuple(costed),
            uncosted=tuple(uncosted),
            refused=tuple(self.refused),
            num_layouts=len(layouts) * len(precisions) * len(kv_dtypes),
            seconds=time.perf_counter() - began,
            claims=self.topology.claims,
        )

    def _check_objective(self) -> None:
        if self.objective.context > self.spec.max_context:
            raise ConfigError(
                f"context of {self.objective.context} tokens", expected=f"at most {self.spec.max_context}, the model's"
            )

    def _shape_reason(self, layout: Layout, divisibility: Divisibility) -> tuple[RefusalKind, str] | None:
        if layout.world_size > self.topology.num_devices:
            return "divisibility", f"needs {layout.world_size} devices of {self.topology.num_devices}"
        reason = divisibility.reason(layout)
        if reason:
            return "divisibility", reason
        if layout.pp > self.spec.num_layers:
            return "divisibility", f"pp={layout.pp} stages for {self.spec.num_layers} layers leaves empty stages"
        if layout.dp > self.objective.concurrency:
            return (
                "divisibility",
                f"dp={layout.dp} replicas for {self.objective.concurrency} sequences leaves idle ones",
            )
        return None

    def _fit(self, table: WeightTable, layout: Layout, kv_dtype: str) -> Candidate | None:
        if kv_dtype not in self.engine.kv_dtypes:
            reason = f"{self.engine.name} keeps its cache as {', '.join(self.engine.kv_dtypes)}, not in {kv_dtype}"
            self._refuse_layout(layout, table.precision, kv_dtype, "engine", reason)
            return None
        slots = -(-self.objective.concurrency // layout.dp)
        need = CacheNeed(
            slots=slots,
            max_tokens=self.objective.context,
            kv_dtype=kv_dtype,
            kv_scale_bytes=self.engine.kv_scale_bytes,
            snapshots=self.snapshots,
        )
        devices = self.topology.devices[: layout.world_size]
        memories = [device.memory_total for device in devices if device.memory_total is not None]
        capacity = min(memories, key=lambda x: x.value) if memories else None
        try:
            layout, ledgers, reason = self._memory(table, layout, need, capacity)
        except LayoutError as error:
            self._refuse_layout(layout, table.precision, kv_dtype, "divisibility", error.message)
            return None
        if reason:
            self._refuse_layout(layout, table.precision, kv_dtype, "memory", reason, memory_excess(ledgers))
            return None
        groups = self._groups(layout, slots)
        try:
            bound = decode_bound(table, layout, need, self.topology, bandwidth=self._bandwidth(devices), groups=groups)
        except ConfigError as error:
            self._refuse_layout(layout, table.precision, kv_dtype, "topology", error.message)
            return None
        limit = self.objective.max_per_token_s
        if limit is not None and bound > limit:
            reason = (
                f"a step takes at least {human(bound, 's')} for weights, caches and links; limit {human(limit, 's')}"
            )
            self._refuse_layout(layout, table.precision, kv_dtype, "latency", reason, bound / limit - 1)
            return None
        itemsize = activation_itemsize(table.precision)
        floors = [
            request_floor(self.spec, layout, x, need, itemsize) for x in layout.stage_layers(self.spec.num_layers)
        ]
        return Candidate(
            layout=layout,
            precision=table.precision,
            kv_dtype=kv_dtype,
            vision=vision_placement(self.spec, layout),
            objective=self.objective,
            need=need,
            ledgers=ledgers,
            request_floor=max(floors),
            bound_s=bound,
            visited=experts_visited(self.spec, layout, -(-slots // groups)),
            num_devices=layout.world_size,
        )

    def _memory(
        self, table: WeightTable, layout: Layout, need: CacheNeed, capacity: Quantity | None
    ) -> tuple[Layout, tuple[MemoryLedger, ...], str]:
        """The layout with its pipeline cut, its decisive ledgers, and why they do not fit ("" where they do).

        The last answer is kept: the dispatch of tokens changes nothing here, and layouts that differ in it alone come
        one after the other.
        """
        key = (table.precision, replace(layout, dispatch="replicated"), need, capacity)
        if self.held is None or self.held[0] != key:
            cut = balanced(table, layout, need) if layout.stages is None else layout
            # The first stage carries pictures as well; the fullest of the others speaks for them.
            stages = sorted({0, fullest_stage(table, cut, need)})
            ledgers = self._ledgers(table, cut, need, capacity, stages)
            reason = memory_reason(ledgers)
            self.held = key, cut, ledgers, reason and reason + self._hint(table, cut, need)
        _, cut, ledgers, reason = self.held
        layout = replace(layout, stages=cut.stages)
        return layout, tuple(replace(ledger, layout=layout) for ledger in ledgers), reason

    def _ledgers(
        self,
        table: WeightTable,
        layout: Layout,
        need: CacheNeed,
        capacity: Quantity | None,
        stages: Sequence[int] | None = None,
    ) -> tuple[MemoryLedger, ...]:
        tokens = self._image_tokens()
        return ledgers_of(table, layout, need, self.reserve, capacity=capacity, image_tokens=tokens, stages=stages)

    def _hint(self, table: WeightTable, layout: Layout, need: CacheNeed) -> str:
        """Says so where the vision tower alone is what does not fit."""
        if self.spec.vision is None or layout.pp > 1:
            return ""
        capacity = self.topology.devices[0].memory_total
        without = ledgers_of(table, layout, need, self.reserve, capacity=capacity, has_vision=False)
        return "" if memory_reason(without) else "; it would fit with the vision tower on ranks of its own"

    def _image_tokens(self) -> int:
        """Feature rows of the largest picture: one is kept at a time as far as the ledger is concerned."""
        vision = self.spec.vision
        return 0 if vision is None else self._patches() // vision.merge_size**2

    def _patches(self) -> int:
        if self.spec.vision is None:
            return 0
        if self.objective.image_patches is not None:
            return self.objective.image_patches
        limit = self.spec.image.patch_limit if self.spec.image is not None else 0
        # A picture's rows must fit the context beside some text.
        return min(limit, self.objective.context * self.spec.vision.merge_size**2 // 2)

    def _grid(self) -> tuple[int, int, int] | None:
        """The squarest picture of about so many patches."""
        vision, patches = self.spec.vision, self._patches()
        if vision is None or patches < vision.merge_size**2:
            return None
        side = max(vision.merge_size, int(patches**0.5) // vision.merge_size * vision.merge_size)
        return 1, side, side

    def _bandwidth(self, devices: Sequence[TopologyDevice]) -> float:
        rates = [device.memory_bandwidth for device in devices if device.memory_bandwidth is not None]
        if not rates:
            raise ConfigError("memory bandwidth is not known", where=self.topology.name, next_step="Measure it")
        slowest = min(rate.value for rate in rates)
        # Where operators were measured the stated efficiency does not hold them back.
        return slowest if self.measured is not None else slowest * max(self.efficiency.memory.values())

    def _groups(self, layout: Layout, slots: int) -> int:
        return min(layout.pp, slots) if self.engine.fills_pipeline else 1

    def _cost_all(self, fitting: list[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
        """Costed candidates that keep the limits, cheapest first, and those that were left at their bound.

        The first one is complete; of the others only the decode step was traced.
        """
        costed: list[Candidate] = []
        waiting = sorted(fitting, key=_by_bound)
        gap, num_traced = Gap(self.efficiency.launch.value), 0
        while waiting or costed:
            nearest = min(waiting, key=lambda x: (gap.cost_of(x), x.visited), default=None)
            costed.sort(key=_by_cost)
            lowest = float("inf") if nearest is None else gap.cost_of(nearest)
            limit = self.trace_limit if costed else PATIENCE * self.trace_limit
            is_open = len(costed) < 2 or lowest < costed[0].cost  # two, so that the best can be compared
            if nearest is not None and num_traced < limit and is_open:
                waiting.remove(nearest)
                num_traced += 1
                done = self._refusing(self._cost_decode, nearest)
                if done is not None:
                    gap.learn(done)
                    costed.append(done)
                continue
            if not costed:
                break
            # Nothing that is left can be cheaper than the first one: see whether it stands, prompts included.
            done = self._refusing(self._cost_prefill, costed.pop(0))
            if done is not None:
                return [done, *costed], waiting
        return [], waiting

    def _refusing(self, cost: Callable[[Candidate], Candidate | None], x: Candidate) -> Candidate | None:
        """What `cost` returns; a link that nobody knows anything about is a refusal."""
        try:
            return cost(x)
        except ConfigError as error:
            self._refuse(x, "topology", error.message)
            return None

    def _cost_decode(self, x: Candidate) -> Candidate | None:
        """The candidate with the cost of a step; None, and a refusal, where that breaks a limit."""
        layout, objective = x.layout, self.objective
        groups = self._groups(layout, x.need.slots)
        sequences = -(-x.need.slots // groups)
        traced = self.book.decode(layout, x.precision, sequences=sequences, context=objective.context - 1)
        cost = step_cost("decode", self._stage_costs(traced), groups=groups)
        limit = objective.max_per_token_s
        if limit is not None and cost.seconds.value > limit:
            step = cost.seconds.value
            self._refuse(x, "latency", f"{human(step, 's')} per token, limit {human(limit, 's')}", step / limit - 1)
            return None
        limit, least = objective.max_first_token_s, self._prompt_bound(traced, sequences)
        if limit is not None and least > limit:
            reason = f"{self._prompt_text()} after {human(least, 's')} at least, limit {human(limit, 's')}"
            self._refuse(x, "latency", reason, least / limit - 1)
            return None
        whole = self._ledgers(self.tables[x.precision], layout, x.need, x.ledgers[0].capacity)
        ledgers = tuple(ledger.with_working(_peak((trace,))) for ledger, trace in zip(whole, traced, strict=True))
        if reason := memory_reason(ledgers):
            self._refuse(x, "memory", f"{reason}, activations counted", memory_excess(ledgers))
            return None
        return replace(x, ledgers=ledgers, decode=cost)

    def _cost_prefill(self, x: Candidate) -> Candidate | None:
        """The candidate complete with prompts and pictures; None, and a refusal, where those break a limit."""
        layout, objective = x.layout, self.objective
        traced = self.book.prefill(layout, x.precision, objective)
        fullest = self.book.fullest_prefill(layout, x.precision, objective)
        grid = self._grid()
        vision = None if grid is None else self.book.vision(layout, x.precision, grid)
        ledgers = []
        for ledger, trace in zip(x.ledgers, fullest, strict=True):
            before = next(line.size for line in ledger.lines if line.role == "activations")
            most = max(before, _peak((trace,)), key=lambda size: size.value)
            ledgers.append(ledger.with_working(most, None if vision is None or ledger.stage else _peak((vision,))))
        if reason := memory_reason(tuple(ledgers)):
            self._refuse(x, "memory", f"{reason}, activations of a prompt counted", memory_excess(tuple(ledgers)))
            return None
        cost = step_cost("prefill", self._stage_costs(traced))
        first_token = self._first_token(cost)
        limit = objective.max_first_token_s
        if limit is not None and first_token.value > limit:
            reason = f"{self._prompt_text()} after {human(first_token.value, 's')}, limit {human(limit, 's')}"
            self._refuse(x, "latency", reason, first_token.value / limit - 1)
            return None
        return replace(x, ledgers=tuple(ledgers), prefill=cost, first_token=first_token)

    def _prompt_text(self) -> str:
        return f"first token of a prompt of {self.objective.prompt_tokens:,}"

    def _prompt_bound(self, decode: Sequence[Inventory], sequences: int) -> float:
        """Seconds that the matrix products of a prompt take at the full rate: those of one token, times its length."""
        flops = sum(
            use.flops * use.count
            for trace in decode
            for use in trace.operators
            if use.category in ("gemm", "grouped_gemm") and use.layer_kind != "head"
        )
        rates = [rate.value for rate in self.topology.devices[0].matmul.values()]
        return flops / sequences * self.objective.prompt_tokens / max(rates) if rates else 0.0

    def _stage_costs(self, inventories: Sequence[Inventory]) -> list[StageCost]:
        device = self.topology.devices[0]
        return [
            stage_cost(x, device, self.topology, efficiency=self.efficiency, measured=self.measured)
            for x in inventories
        ]

    def _first_token(self, chunk: StepCost) -> Quantity:
        """All chunks of one prompt, alone in the deployment."""
        chunks = self.objective.num_chunks
        if not self.engine.fills_pipeline:
            return chunk.seconds * float(chunks)
        slowest = max((stage.seconds() for stage in chunk.stages), key=lambda x: x.value)
        return chunk.seconds + slowest * float(chunks - 1)

    def _refuse(self, x: Candidate, kind: RefusalKind, reason: str, excess: float | None = None) -> None:
        self._refuse_layout(x.layout, x.precision, x.kv_dtype, kind, reason, excess)

    def _refuse_layout(
        self,
        layout: Layout,
        precision: str,
        kv_dtype: str,
        kind: RefusalKind,
        reason: str,
        excess: float | None = None,
    ) -> None:
        self.refused.append(
            Refusal(layout=layout, precision=precision, kv_dtype=kv_dtype, kind=kind, reason=reason, excess=excess)
        )


def _by_bound(x: Candidate) -> tuple[float, int, str]:
    return x.cost_bound, x.num_devices, str(x)


def _by_cost(x: Candidate) -> tuple[float, int, str]:
    return x.cost, x.num_devices, str(x)


def _peak(inventories: Sequence[Inventory]) -> Quantity:
    most = max(inventories, key=lambda x: x.activation_peak_bytes)
    return Quantity(float(most.activation_peak_bytes), "B", "modelled", f"trace of {most.workload}")
