"""How long a step takes: operators by the rates of a device, collectives by the links of a topology.

Two figures for everything. The lower bound is what no implementation beats on this device: matrix work at the full
rate, and only bytes that must be read whatever is fused (weights, cached state). The estimate takes the operators as
the traced model really calls them, at the seconds measured for each where they were, else at stated efficiencies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from workbench.base import BASES, Basis, Cell, Quantity, Table, WorkbenchError, human

if TYPE_CHECKING:
    from workbench.cluster.topology import Topology, TopologyDevice
    from workbench.operators.inventory import CollectiveUse, Inventory, OperatorUse

__all__ = ["CostError", "CostLine", "Efficiency", "OperatorSeconds", "StageCost", "StepCost", "stage_cost", "step_cost"]

# Categories whose inputs are cached state: those bytes are read in any implementation.
_READS_CACHE = ("attention", "linear_attention")


SHORT = {
    "float64": "fp64",
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}
BITS = {"fp64": 64, "fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8}
NO_HOST = Quantity(0.0, "s", "assumed", "the host runs ahead of the device")
CPU_HOST = Quantity(3e-6, "s", "assumed", "modules and arguments in Python between two operators")
HOST_LINE = "between operators"
LAUNCH = Quantity(4e-6, "s", "assumed", "start of one operator from the host")


class CostError(WorkbenchError):
    """A figure is missing without which no time can be told."""


class OperatorSeconds(Protocol):
    """Measured seconds of operators, where somebody measured them (`operators.Coverage`)."""

    def seconds(self, use: OperatorUse) -> Quantity | None: ...


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Share of the device's figures that operators reach, and what starting one costs.

    `compute` and `memory` may name categories of operators; "" is for the rest. `launch`: seconds per call, part of
    what is measured where operators are measured. `host`: seconds that the program spends between two calls, views
    included, while the device waits; 0 where the host runs ahead of its device.
    """

    compute: Mapping[str, float] = field(default_factory=lambda: {"": 0.6})
    memory: Mapping[str, float] = field(default_factory=lambda: {"": 0.7})
    launch: Quantity = LAUNCH
    host: Quantity = NO_HOST
    basis: Basis = "assumed"
    source: str = "efficiencies usual for well-tuned operators"

    def seconds(self, use: OperatorUse, compute_s: float, memory_s: float) -> tuple[float, Basis, str]:
        """Seconds of one call that takes `compute_s` at the full rate and `memory_s` at the full bandwidth."""
        roofline = max(compute_s / self.compute_of(use.category), memory_s / self.memory_of(use.category))
        return roofline + self.launch.value, self.basis, self.source

    def compute_of(self, category: str) -> float:
        return self.compute.get(category, self.compute[""])

    def memory_of(self, category: str) -> float:
        return self.memory.get(category, self.memory[""])

    def to_json(self) -> dict[str, object]:
        return {
            "compute": dict(self.compute),
            "memory": dict(self.memory),
            "launch_s": self.launch.value,
            "host_s": self.host.value,
            "basis": self.basis,
            "source": self.source,
        }

    @classmethod
    def for_device(cls, device: TopologyDevice) -> Efficiency:
        """What is assumed of a device; rates that were measured already are what operators of that kind reach."""
        rates = [*device.matmul.values(), *([device.memory_bandwidth] if device.memory_bandwidth else [])]
        if rates and all(rate.basis == "measured" for rate in rates):
            return cls(
                compute={"": 0.8},
                memory={"": 0.5},
                launch=Quantity(8e-6, "s", "assumed", "start of one operator from Python"),
                host=CPU_HOST if device.device_type == "cpu" else NO_HOST,
                source="rates of the device are measured; operators stay a little below",
            )
        return cls(host=CPU_HOST if device.device_type == "cpu" else NO_HOST)


@dataclass(frozen=True, kw_only=True, slots=True)
class CostLine:
    """One kind of work of one stage in one pass: a category of operators, or one collective of one group."""

    name: str
    kind: Literal["operators", "collectives"]
    calls: int
    lower: Quantity
    estimate: Quantity

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "kind": self.kind,
            "calls": self.calls,
            "lower_s": self.lower.value,
            "estimate_s": self.estimate.value,
            "basis": self.estimate.basis,
            "source": self.estimate.source,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCost:
    """One pass of one stage on one rank; the wait for the stage before is not in it, the hop from it is."""

    stage: int
    lines: tuple[CostLine, ...]
    num_calls: int = 0  # of operators, views included
    measured_share: float = 0.0  # of the operators' estimate that rests on measured seconds

    def seconds(self, kind: str | None = None) -> Quantity:
        return _sum([x.estimate for x in self.lines if kind in (None, x.kind)])

    def lower(self, kind: str | None = None) -> Quantity:
        return _sum([x.lower for x in self.lines if kind in (None, x.kind)])


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """One step of one replica through all stages.

    `groups` of sequences are under way at once (1: the step passes through the stages one after another). `seconds`
    is the time until every sequence has its next token.
    """

    phase: str
    stages: tuple[StageCost, ...]
    groups: int = 1

    @property
    def seconds(self) -> Quantity:
        return self._time([stage.seconds() for stage in self.stages])

    @property
    def lower(self) -> Quantity:
        return self._time([stage.lower() for stage in self.stages])

    @property
    def idle_share(self) -> float:
        """Share of the stages' time in which they wait for one another: the pipeline's bubble."""
        busy = self.groups * sum(stage.seconds().value for stage in self.stages)
        total = len(self.stages) * self.seconds.value
        return 1 - busy / total if total else 0.0

    def share(self, kind: str) -> float:
        """Share of the work (not of the waiting) that is "operators" or "collectives"."""
        total = sum(stage.seconds().value for stage in self.stages)
        return sum(stage.seconds(kind).value for stage in self.stages) / total if total else 0.0

    def lines(self) -> tuple[CostLine, ...]:
        """Lines of all stages together, the longest first."""
        names = dict.fromkeys((line.name, line.kind) for stage in self.stages for line in stage.lines)
        joined = []
        for name, kind in names:
            own = [x for stage in self.stages for x in stage.lines if (x.name, x.kind) == (name, kind)]
            joined.append(
                CostLine(
                    name=name,
                    kind=kind,
                    calls=sum(x.calls for x in own),
                    lower=_sum([x.lower for x in own]),
                    estimate=_sum([x.estimate for x in own]),
                )
            )
        return tuple(sorted(joined, key=lambda x: -x.estimate.value))

    def _time(self, stages: Sequence[Quantity]) -> Quantity:
        total = _sum(stages)
        slowest = max(stages, key=lambda x: x.value)
        filled = slowest * float(self.groups)
        return total if total.value >= filled.value else filled

    def table(self, title: str = "") -> Table:
        whole = sum(line.estimate.value for line in self.lines())
        rows: list[tuple[Cell, ...]] = [
            (
                line.name,
                line.calls,
                human(line.lower.value, "s"),
                human(line.estimate.value, "s"),
                f"{line.estimate.value / whole:.0%}" if whole else None,
                line.estimate.basis,
            )
            for line in self.lines()
        ]
        note = f"step {human(self.seconds.value, 's')} ({self.seconds.basis}), at least {human(self.lower.value, 's')}"
        if len(self.stages) > 1:
            note += f"; {len(self.stages)} stages, {self.groups} group(s) under way, {self.idle_share:.0%} idle"
        columns = ("work", "calls", "at least", "estimate", "share", "basis")
        return Table(
            title=title or f"Where the time of a {self.phase} step goes", columns=columns, rows=tuple(rows), note=note
        )

    def to_json(self) -> dict[str, object]:
        return {
            "phase": self.phase,
            "groups": self.groups,
            "seconds": self.seconds.value,
            "lower_s": self.lower.value,
            "basis": self.seconds.basis,
            "idle_share": self.idle_share,
            "lines": [line.to_json() for line in self.lines()],
        }


def stage_cost(
    inventory: Inventory,
    device: TopologyDevice,
    topology: Topology,
    *,
    efficiency: Efficiency,
    measured: OperatorSeconds | None = None,
) -> StageCost:
    """Time of one stage's inventory on a device whose groups lie in a topology. Raises CostError for a missing rate."""
    by_category: dict[str, list[float]] = {}
    bases: dict[str, tuple[Basis, str]] = {}
    known = 0.0
    for use in inventory.operators:
        if use.is_view:
            continue
        lower, estimate, basis, source = _operator(use, device, efficiency, measured)
        totals = by_category.setdefault(use.category, [0.0, 0.0, 0.0])
        totals[0] += lower * use.count
        totals[1] += estimate * use.count
        totals[2] += use.count
        known += estimate * use.count if basis == "measured" else 0.0
        old = bases.get(use.category)
        if old is None or BASES.index(basis) > BASES.index(old[0]):
            bases[use.category] = (basis, source)
    lines = [
        CostLine(
            name=category,
            kind="operators",
            calls=round(calls),
            lower=Quantity(lower, "s", "modelled", "roofline of the device"),
            estimate=Quantity(estimate, "s", *bases[category]),
        )
        for category, (lower, estimate, calls) in by_category.items()
    ]
    total = sum(line.estimate.value for line in lines)
    num_calls = sum(use.count for use in inventory.operators)
    if efficiency.host.value:
        between = efficiency.host * float(num_calls)
        nothing = Quantity(0.0, "s", "modelled", "a program without an interpreter")
        lines.append(CostLine(name=HOST_LINE, kind="operators", calls=num_calls, lower=nothing, estimate=between))
    lines += _collective_lines(inventory, topology)
    share = known / total if total else 0.0
    return StageCost(stage=inventory.stage, lines=tuple(lines), num_calls=num_calls, measured_share=share)


def step_cost(phase: str, stages: Sequence[StageCost], *, groups: int = 1) -> StepCost:
    return StepCost(phase=phase, stages=tuple(stages), groups=groups)


def _operator(
    use: OperatorUse,
    device: TopologyDevice,
    efficiency: Efficiency,
    measured: OperatorSeconds | None,
) -> tuple[float, float, Basis, str]:
    """Lower bound and estimate of one call [s], with the basis of the estimate."""
    seconds = measured.seconds(use) if measured is not None else None
    bandwidth = device.memory_bandwidth
    if bandwidth is None:
        if seconds is not None:  # what was measured needs no figure, and has no bound without one
            return 0.0, seconds.value, seconds.basis, seconds.source
        raise CostError(f"memory bandwidth of {device.name} is not known", next_step="Measure it, or name a datasheet")
    compute = use.flops / _rate(use, device) if use.flops else 0.0
    must_read = max(use.weight_bytes, use.bytes_read if use.category in _READS_CACHE else 0)
    lower = max(compute, must_read / bandwidth.value)
    if seconds is not None:
        return min(lower, seconds.value), seconds.value, seconds.basis, seconds.source
    return lower, *efficiency.seconds(use, compute, use.num_bytes / bandwidth.value)


def _rate(use: OperatorUse, device: TopologyDevice) -> float:
    """FLOP/s for the operator's inputs.

    A format without a figure is taken to run as fast as another one for which there is one, in proportion to their
    bits: the same units move half as many values of twice the width.
    """
    floats = {SHORT.get(dtype, "bf16") for dtype in use.input_dtypes if "float" in dtype} or {"bf16"}
    return min(_format_rate(device, name) for name in floats)


def _format_rate(device: TopologyDevice, name: str) -> float:
    own = device.matmul_rate(name)
    if own is not None:
        return own.value
    for other in ("bf16", "fp16", "fp8", "fp32"):
        known = device.matmul_rate(other)
        if known is not None:
            return known.value * BITS[other] / BITS[name]
    raise CostError(f"no matrix rate of {device.name} is known for {name}", next_step="Measure it or name a datasheet")


def _collective_lines(inventory: Inventory, topology: Topology) -> list[CostLine]:
    lines: dict[str, CostLine] = {}
    for use in inventory.collectives:
        if use.group_size < 2 or use.operation == "send":  # a hop is counted where it arrives
            continue
        groups = _groups(use, inventory)
        times = [
            topology.collective_time(use.link_operation, use.num_bytes, ranks, dtype=use.dtype)  # type: ignore[arg-type]
            for ranks in groups
        ]
        seconds = max(times, key=lambda x: x.value) * float(use.count)
        name = f"{use.link_operation} over {use.group} ({use.group_size})"
        old = lines.get(name)
        lines[name] = CostLine(
            name=name,
            kind="collectives",
            calls=use.count + (old.calls if old else 0),
            lower=seconds if old is None else old.lower + seconds,
            estimate=seconds if old is None else old.estimate + seconds,
        )
    return list(lines.values())


def _groups(use: CollectiveUse, inventory: Inventory) -> list[tuple[int, ...]]:
    """All groups of the stage that do the same at the same time: the slowest of them holds up the step.

    An inventory is that of one rank, whose layers may have been traced in another stage; so the ranks follow from the
    layout. A hop is between two neighbours of the pipeline only.
    """
    from workbench.parallel.mesh import group_members

    layout, stage = inventory.layout, inventory.stage
    found: dict[tuple[int, ...], None] = {}
    covered: set[int] = set()
    for dp in range(layout.dp):
        for tp in range(layout.tp):
            rank = layout.rank_at(pp=stage, dp=dp, tp=tp)
            if rank in covered:
                continue
            ranks = group_members(layout, rank).get(use.group, use.ranks)
            covered.update(ranks)
            if use.operation == "receive":
                ranks = ranks[stage - 1 : stage + 1]
            found[ranks] = None
    return list(found)


def _sum(parts: Sequence[Quantity]) -> Quantity:
    """Sum with the weakest basis; 0 s, exact, of nothing."""
    if not parts:
        return Quantity(0.0, "s", "exact")
    weakest = max(parts, key=lambda x: BASES.index(x.basis))
    return Quantity(sum(x.value for x in parts), "s", weakest.basis, weakest.source)
