"""Layouts worth looking at, and what each needs of memory; refusals say why in one line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from workbench.base import LayoutError, Quantity, human
from workbench.placement import Dispatch, Layout, check_layout
from workbench.planner.cost import StepCost
from workbench.planner.memory import CacheNeed, MemoryLedger, Reserve, activation_itemsize, cache_need, stage_ledger
from workbench.planner.objective import Objective
from workbench.planner.stages import cut_stages
from workbench.planner.weights import WeightTable
from workbench.spec import ModelSpec, MoESpec

__all__ = [
    "Candidate",
    "Refusal",
    "RefusalKind",
    "all_layouts",
    "balanced",
    "divisors",
    "ledgers_of",
    "memory_excess",
    "memory_reason",
    "nearest_first",
]

RefusalKind = Literal["divisibility", "engine", "memory", "latency", "topology"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A plan that is not possible, and the one reason. `excess`: by what share it is beyond the device's memory, or the
    limit of a time; None where it is not a matter of how much."""

    layout: Layout
    precision: str
    kv_dtype: str
    kind: RefusalKind
    reason: str
    excess: float | None = None

    def __str__(self) -> str:
        return f"{self.layout} {self.precision}: {self.reason}"

    def to_json(self) -> dict[str, object]:
        return {
            "layout": str(self.layout),
            "precision": self.precision,
            "kv": self.kv_dtype,
            "kind": self.kind,
            "reason": self.reason,
            "excess": self.excess,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A plan that fits. `bound_s` is a time no step of it can be shorter than, `visited` the experts
    that a rank computes in one. Until it was costed it has the ledger of its fullest stages only, and no costs."""

    layout: Layout
    precision: str
    kv_dtype: str
    vision: str
    objective: Objective
    need: CacheNeed
    ledgers: tuple[MemoryLedger, ...] = field(repr=False)
    request_floor: int
    bound_s: float
    visited: float
    num_devices: int
    decode: StepCost | None = field(default=None, repr=False)
    prefill: StepCost | None = field(default=None, repr=False)
    first_token: Quantity | None = None

    @property
    def fullest(self) -> MemoryLedger:
        """Ledger of the stage with the least room."""
        return max(self.ledgers, key=lambda ledger: ledger.peak)

    @property
    def per_token(self) -> Quantity:
        """Seconds between two tokens of one sequence: a decode step of its replica."""
        assert self.decode is not None
        return self.decode.seconds

    @property
    def tokens_per_s(self) -> float:
        """Tokens that the whole deployment generates in a second, all sequences running."""
        return self.objective.concurrency / self.per_token.value

    @property
    def tokens_per_s_per_device(self) -> float:
        return self.tokens_per_s / self.num_devices

    @property
    def cost(self) -> float:
        """Device seconds per generated token."""
        return self.cost_of(self.per_token.value)

    @property
    def cost_bound(self) -> float:
        return self.cost_of(self.bound_s)

    def cost_of(self, step_s: float) -> float:
        """Device seconds per generated token where a step takes so long."""
        return self.num_devices * step_s / self.objective.concurrency

    def __str__(self) -> str:
        cuts = f" stages {'+'.join(map(str, self.layout.stages))}" if self.layout.stages else ""
        kv = f", {self.kv_dtype} cache" if self.kv_dtype != "auto" else ""
        return f"{self.layout}{cuts}, {self.precision}{kv}"

    def to_json(self) -> dict[str, object]:
        layout = {axis: getattr(self.layout, axis) for axis in ("pp", "dp", "tp", "ep", "dispatch")}
        stages = None if self.layout.stages is None else list(self.layout.stages)
        record: dict[str, object] = {
            "layout": {**layout, "stages": stages},
            "text": str(self.layout),
            "precision": self.precision,
            "kv": self.kv_dtype,
            "vision": self.vision,
            "num_devices": self.num_devices,
            "slots_per_replica": self.need.slots,
            "max_tokens": self.need.max_tokens,
            "memory": [ledger.to_json() for ledger in self.ledgers],
            "request_floor_bytes": self.request_floor,
            "bound_s": self.bound_s,
        }
        if self.decode is not None:
            record |= {
                "decode": self.decode.to_json(),
                "per_token_s": self.per_token.value,
                "tokens_per_s": self.tokens_per_s,
                "tokens_per_s_per_device": self.tokens_per_s_per_device,
            }
        if self.prefill is not None and self.first_token is not None:
            record |= {"prefill_chunk": self.prefill.to_json(), "first_token_s": self.first_token.value}
        return record


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def all_layouts(spec: ModelSpec, num_devices: int) -> Iterator[Layout]:
    """Every layout that uses a divisor of the devices; whether the model allows it is not yet asked.

    Expert groups, where there are experts: slices over the tp group, groups inside it, or whole experts spread over
    replicas, each with the dispatches it can have.
    """
    has_experts = any(isinstance(layer.ffn, MoESpec) for layer in spec.layers)
    for world in divisors(num_devices):
        for pp in (n for n in divisors(world) if n <= spec.num_layers):
            for tp in divisors(world // pp):
                dp = world // pp // tp
                for ep in divisors(tp * dp) if has_experts else [1]:
                    if tp % ep and ep % tp:
                        continue
                    dispatches: tuple[Dispatch, ...] = ("replicated",)
                    if ep > 1 and ep % tp == 0:
                        dispatches = ("replicated", "all_to_all")
                    for dispatch in dispatches:
                        yield Layout(pp=pp, dp=dp, tp=tp, ep=ep, dispatch=dispatch)


class Divisibility:
    """`check_layout`, asked once per pair of degrees that it depends on."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._known: dict[tuple[int, int], str] = {}

    def reason(self, layout: Layout) -> str:
        """Why the model does not divide like this; "" where it does."""
        key = (layout.tp, layout.ep)
        if key not in self._known:
            # dp does not matter to the model; it is there so that the layout may have its ep.
            try:
                check_layout(self.spec, replace(layout, pp=1, stages=None))
            except LayoutError as error:
                self._known[key] = error.message
            else:
                self._known[key] = ""
        return self._known[key]


def balanced(table: WeightTable, layout: Layout, need: CacheNeed) -> Layout:
    """The layout with its pipeline cut so that the fullest stage is as light as possible; weights and caches count.

    An even cut by layers that is no fuller is left as it is.
    """
    if layout.pp == 1:
        return layout
    spec, itemsize = table.spec, activation_itemsize(table.precision)
    caches: dict[int, int] = {}  # of one layer with that mixer, which layers of one kind share
    for i, layer in enumerate(spec.layers):
        if id(layer.mixer) not in caches:
            caches[id(layer.mixer)] = sum(cache_need(spec, layout, range(i, i + 1), need, itemsize).values())
    weights = table.layers(layout)
    loads = [size + caches[id(layer.mixer)] for size, layer in zip(weights, spec.layers, strict=True)]
    first, last = table.edge("first", layout).total(), table.edge("last", layout).total()
    stages = cut_stages(loads, layout.pp, first=first, last=last)
    even = layout.stage_layers(spec.num_layers)

    def fullest(sizes: list[range]) -> float:
        sums = [sum(loads[i] for i in layers) for layers in sizes]
        return max(sums[0] + first, sums[-1] + last, *sums)

    cut = replace(layout, stages=stages)
    is_better = fullest(list(cut.stage_layers(spec.num_layers))) < 0.999 * fullest(list(even))
    return cut if is_better else layout


def fullest_stage(table: WeightTable, layout: Layout, need: CacheNeed) -> int:
    """The stage whose weights and caches are largest."""
    spec, itemsize = table.spec, activation_itemsize(table.precision)
    sizes = [
        table.stage(layout, stage).total() + sum(cache_need(spec, layout, layers, need, itemsize).values())
        for stage, layers in enumerate(layout.stage_layers(spec.num_layers))
    ]
    return sizes.index(max(sizes))


def ledgers_of(
    table: WeightTable,
    layout: Layout,
    need: CacheNeed,
    reserve: Reserve,
    *,
    capacity: Quantity | None,
    image_tokens: int = 0,
    has_vision: bool = True,
    stages: Sequence[int] | None = None,
) -> tuple[MemoryLedger, ...]:
    """One ledger per stage (of `stages`), activations not yet counted. Raises LayoutError where a quantised matrix
    would be cut."""
    return tuple(
        stage_ledger(
            table,
            layout,
            stage,
            need,
            reserve,
            capacity=capacity,
            image_tokens=image_tokens,
            has_vision=has_vision,
        )
        for stage in (range(layout.pp) if stages is None else stages)
    )


def nearest_first(refusals: Iterable[Refusal]) -> list[Refusal]:
    """Those that miss by least first; those that no more memory or time would help last, the largest of them first."""

    def distance(x: Refusal) -> tuple[bool, float, bool, int, int, int]:
        layout = x.layout
        return (
            x.excess is None,
            x.excess or 0.0,
            x.kind == "divisibility",
            -layout.world_size,
            -layout.tp,
            -layout.ep,
        )

    return sorted(refusals, key=distance)


def memory_excess(ledgers: tuple[MemoryLedger, ...]) -> float:
    """By what share of a device's memory the fullest stage is too large; 0 where it fits."""
    return max(x.peak / x.capacity.value - 1 if x.capacity and not x.fits else 0.0 for x in ledgers)


def memory_reason(ledgers: tuple[MemoryLedger, ...]) -> str:
    """Why it does not fit; "" where it does."""
    worst = min(ledgers, key=lambda ledger: ledger.free if ledger.free is not None else 0)
    if worst.free is None or worst.free >= 0 or worst.capacity is None:
        return ""
    where = f"stage {worst.stage}: " if len(ledgers) > 1 else ""
    return (
        f"{where}needs {human(worst.peak, 'B')} of {human(worst.capacity.value, 'B')} per device, "
        f"{human(-worst.free, 'B')} short (weights {human(worst.weights, 'B')}, caches {human(worst.cache, 'B')})"
    )
