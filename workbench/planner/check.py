"""What was predicted beside what a running deployment measures, with the ratio of the two."""

from __future__ import annotations

import datetime
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from workbench.base import Cell, Quantity, Table, human
from workbench.placement import Layout
from workbench.planner.cost import Efficiency, OperatorSeconds, StepCost, stage_cost, step_cost
from workbench.planner.engines import WORKBENCH
from workbench.planner.inventories import InventoryBook, TraceInventory
from workbench.planner.memory import CacheNeed, Reserve, stage_ledger
from workbench.planner.objective import Objective
from workbench.planner.rank import HeldMemory
from workbench.planner.weights import read_weight_table

if TYPE_CHECKING:
    from workbench.cluster.topology import Topology
    from workbench.deployment import Deployment
    from workbench.serving.steps import SequenceStep

__all__ = ["CheckLine", "MadeUpSteps", "PlanCheck", "check_deployment", "check_memory", "check_times", "measure_other"]

MEMORY_TOLERANCE, TIME_TOLERANCE = 0.03, 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckLine:
    """One figure. `rank` is None for a figure of the whole step; `counts` says whether a tolerance applies to it."""

    what: str
    predicted: Quantity
    measured: Quantity
    rank: int | None = None
    counts: bool = True
    note: str = ""

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted.value / self.measured.value if self.measured.value else float("inf")

    @property
    def tolerance(self) -> float:
        return MEMORY_TOLERANCE if self.measured.unit == "B" else TIME_TOLERANCE

    @property
    def is_close(self) -> bool:
        return abs(self.predicted.value - self.measured.value) <= self.tolerance * self.measured.value

    def to_json(self) -> dict[str, object]:
        return {
            "what": self.what,
            "rank": self.rank,
            "unit": self.measured.unit,
            "predicted": self.predicted.value,
            "basis": self.predicted.basis,
            "measured": self.measured.value,
            "ratio": self.ratio,
            "is_close": self.is_close,
            "counts": self.counts,
            "note": self.note,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanCheck:
    """Predicted and measured lines of one deployment. `costs` holds where the predicted times come from."""

    model: str
    layout: Layout
    precision: str
    lines: tuple[CheckLine, ...]
    costs: tuple[StepCost, ...] = ()
    taken_at: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))

    @property
    def ok(self) -> bool:
        """Memory within 3 %, times within 25 %."""
        return all(line.is_close for line in self.lines if line.counts)

    def table(self) -> Table:
        rows: list[tuple[Cell, ...]] = [
            (
                line.what,
                line.rank,
                human(line.predicted.value, line.predicted.unit),
                human(line.measured.value, line.measured.unit),
                f"{line.ratio:.3f}",
                line.is_close if line.counts else None,
                line.note or line.predicted.basis,
            )
            for line in self.lines
        ]
        return Table(
            title=f"Predicted and measured: {self.model}, {self.layout}, {self.precision}, {self.taken_at}",
            columns=("what", "rank", "predicted", "measured", "ratio", "close", "basis"),
            rows=tuple(rows),
            note=f"close: memory within {MEMORY_TOLERANCE:.0%}, times within {TIME_TOLERANCE:.0%}",
        )

    def tables(self) -> tuple[Table, ...]:
        return (self.table(), *(cost.table() for cost in self.costs))

    def render(self) -> str:
        return "\n\n".join(table.render() for table in self.tables())

    def _repr_html_(self) -> str:
        return "".join(table.to_html() for table in self.tables())

    def to_json(self) -> dict[str, object]:
        return {
            "model": self.model,
            "layout": str(self.layout),
            "precision": self.precision,
            "taken_at": self.taken_at,
            "ok": self.ok,
            "lines": [line.to_json() for line in self.lines],
            "costs": [cost.to_json() for cost in self.costs],
        }

    def save(self, path: Path | str) -> None:
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n")


def check_deployment(
    deployment: Deployment,
    topology: Topology,
    *,
    precision: str,
    chunk_tokens: int = 256,
    context: int | None = None,
    measured: OperatorSeconds | None = None,
    efficiency: Efficiency | None = None,
    trace: TraceInventory | None = None,
    other: Quantity | None = None,
    repeats: int = 9,
) -> PlanCheck:
    """Memory of every rank and the time of a decode step and of a chunk of a prompt, predicted and measured.

    The slots of the deployment are filled with made-up tokens, so nothing else may use it meanwhile. `context`: cached
    tokens of each sequence in the decode step (default: half of a slot). `measured` holds seconds of operators measured
    on this kind of device with as many threads as a rank has, `other` what a rank's process takes beside its model (see
    `check_memory`).
    """
    lines = check_memory(deployment, precision=precision, chunk_tokens=chunk_tokens, other=other, trace=trace)
    times, costs = check_times(
        deployment,
        topology,
        precision=precision,
        chunk_tokens=chunk_tokens,
        context=context,
        measured=measured,
        efficiency=efficiency,
        trace=trace,
        repeats=repeats,
    )
    return PlanCheck(
        model=deployment.spec.architecture,
        layout=deployment.layout,
        precision=precision,
        lines=(*lines, *times),
        costs=costs,
    )


def check_memory(
    deployment: Deployment,
    *,
    precision: str,
    chunk_tokens: int = 256,
    other: Quantity | None = None,
    trace: TraceInventory | None = None,
) -> tuple[CheckLine, ...]:
    """Weights by role, caches by kind, their sums, and the whole of each rank with a chunk of a prompt under way.

    What the process itself takes (interpreter, torch) is no matter of the model: with `other`, measured on another
    model by `measure_other`, the whole counts as well; without, the reserve's assumption is shown and does not count.
    A line of the ledger that the rank does not hold, or holds without one, is told as such.
    """
    spec, layout, info = deployment.spec, deployment.layout, deployment.info
    table = read_weight_table(spec, precision)
    need = CacheNeed(
        slots=info.num_slots,
        max_tokens=info.max_tokens,
        kv_dtype=info.kv_dtype,
        kv_scale_bytes=WORKBENCH.kv_scale_bytes,
        cache_tokens=info.cache_tokens,
        snapshot_places=info.num_snapshots,
    )
    reserve = Reserve.for_device("cpu")
    if other is not None:  # communicators were there when it was measured
        reserve = replace(reserve, other=other, communicator=Quantity(0.0, "B", other.basis, "measured with the rest"))
    chunk = min(chunk_tokens, info.max_tokens)
    objective = Objective(context=info.max_tokens, chunk_tokens=chunk, concurrency=1)
    working = InventoryBook(spec, trace).fullest_prefill(layout, precision, objective)
    held = cast(list[HeldMemory], deployment.call("workbench.planner.rank:measure_held"))
    _read_chunk(deployment, start=info.max_tokens - chunk, chunk=chunk)
    peaks = cast(list[int], deployment.call("workbench.planner.rank:measure_peak"))
    lines: list[CheckLine] = []
    for stats, load, own, peak in zip(deployment.stats(), deployment.load_stats, held, peaks, strict=True):
        rank, stage = stats.rank, layout.coords(stats.rank).pp
        activations = Quantity(float(working[stage].activation_peak_bytes), "B", "modelled", "trace")
        ledger = stage_ledger(table, layout, stage, need, reserve, activations=activations)
        for group, measured in (("weights", own.weights), ("cache", own.caches)):
            planned = {x.role: x.size.value for x in ledger.lines if x.group == group and x.size.value}
            for role in {**planned, **measured}:
                lines.append(_bytes(f"{group}: {role}", rank, planned.get(role, 0), measured.get(role, 0)))
        weights, caches = sum(own.weights.values()), sum(own.caches.values())
        lines += [
            _bytes("weights", rank, ledger.weights, weights),
            _bytes("caches", rank, ledger.cache, caches),
            _bytes("weights and caches", rank, ledger.weights + ledger.cache, weights + caches),
        ]
        if stats.device_bytes is not None:
            lines.append(_bytes("allocated on the device", rank, ledger.weights + ledger.cache, stats.device_bytes))
            continue
        window = next(line.size.value for line in ledger.lines if line.role == "staging window")
        lines += [
            _bytes(
                "growth while loading",
                rank,
                ledger.weights + window,
                load["peak_host_bytes"],
                counts=False,
                note="bound: window",
            ),
            _bytes(
                "process beside them",
                rank,
                ledger.of("other"),
                own.private_bytes - weights - caches,
                counts=False,
                note=reserve.other.basis,
            ),
            _bytes(
                "activations", rank, activations.value, peak - own.private_bytes, counts=False, note=f"{chunk} tokens"
            ),
            _bytes("the whole rank", rank, ledger.serving_peak, peak, counts=other is not None, note="serving"),
        ]
    return tuple(lines)


def measure_other(deployment: Deployment, *, chunk_tokens: int = 256) -> Quantity:
    """Bytes that a rank's process takes beside weights and caches, on a host: the mean of the ranks after a step.

    A small model on the same layout tells most, since little else is in its process.
    """
    info = deployment.info
    chunk = min(chunk_tokens, info.max_tokens)
    _read_chunk(deployment, start=0, chunk=chunk)
    held = cast(list[HeldMemory], deployment.call("workbench.planner.rank:measure_held"))
    rest = [x.private_bytes - sum(x.weights.values()) - sum(x.caches.values()) for x in held]
    source = f"process of a rank of {deployment.spec.architecture}, {deployment.layout}, beside weights and caches"
    return Quantity(statistics.mean(rest), "B", "measured", source)


def _read_chunk(deployment: Deployment, *, start: int, chunk: int) -> None:
    """A chunk of made-up tokens through slot 0 of every replica, which is emptied before and after."""
    steps = MadeUpSteps(deployment=deployment, chunk=chunk, context=0)
    for replica in range(deployment.info.dp):
        deployment.reset_slot(replica, 0)
    steps._timed([steps._step(0, start, steps._tokens(0, chunk), is_sampled=True)])
    for replica in range(deployment.info.dp):
        deployment.reset_slot(replica, 0)


def check_times(
    deployment: Deployment,
    topology: Topology,
    *,
    precision: str,
    chunk_tokens: int = 256,
    context: int | None = None,
    measured: OperatorSeconds | None = None,
    efficiency: Efficiency | None = None,
    trace: TraceInventory | None = None,
    repeats: int = 9,
) -> tuple[tuple[CheckLine, ...], tuple[StepCost, ...]]:
    """Times of a prefill chunk and a decode step with every slot running; see `check_deployment`.

    A round of messages to the ranks and back is measured and added to the prediction: a step has one.
    """
    spec, layout, info = deployment.spec, deployment.layout, deployment.info
    chunk = min(chunk_tokens, info.max_tokens)
    room = min(info.max_tokens, info.num_rows // info.num_slots)  # of each sequence when all slots run
    context = min(info.max_tokens // 2 if context is None else context, room - repeats - 2)
    efficiency = efficiency or Efficiency.for_device(topology.devices[0])
    book = InventoryBook(spec, trace)
    objective = Objective(context=info.max_tokens, prompt=chunk, chunk_tokens=chunk, concurrency=1)

    def predicted(phase: str) -> StepCost:
        if phase == "prefill":
            inventories = book.prefill(layout, precision, objective)
        else:
            inventories = book.decode(layout, precision, sequences=info.num_slots, context=context)
        device = topology.devices[0]
        stages = [stage_cost(x, device, topology, efficiency=efficiency, measured=measured) for x in inventories]
        return step_cost(phase, stages)

    costs = (predicted("prefill"), predicted("decode"))
    found = _measure(MadeUpSteps(deployment=deployment, chunk=chunk, context=context), repeats)
    round_trip = Quantity(found["round trip"], "s", "measured", "median of empty commands to all ranks")
    lines = []
    for cost in costs:
        whole = cost.seconds + round_trip
        lines.append(
            CheckLine(
                what=f"{cost.phase}: {_text(cost.phase, chunk, info.num_slots, context)}",
                predicted=whole,
                measured=Quantity(found[cost.phase], "s", "measured", f"median of {repeats}"),
                note=f"{cost.seconds.basis}; {_measured_share(cost):.0%} of operator time measured",
            )
        )
    return tuple(lines), costs


def _text(phase: str, chunk: int, slots: int, context: int) -> str:
    return f"{chunk} tokens" if phase == "prefill" else f"{slots} sequences after {context} tokens"


def _measured_share(cost: StepCost) -> float:
    total = sum(stage.seconds("operators").value for stage in cost.stages)
    known = sum(stage.seconds("operators").value * stage.measured_share for stage in cost.stages)
    return known / total if total else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeUpSteps:
    """Steps of made-up tokens on a deployment that does nothing else: the same work each time, other tokens.

    Prefill: a chunk into the emptied slot 0 of every replica. Decode: one token for every slot, `context` of which is
    filled before. Where the slots share a pool, each decodes in its part of it.
    """

    deployment: Deployment
    chunk: int
    context: int

    @property
    def _part(self) -> int:
        """Rows of a slot's part of the pool; 0 where slots have rows of their own."""
        info = self.deployment.info
        return min(info.max_tokens, info.num_rows // info.num_slots) if info.cache_tokens else 0

    def prefill(self, attempt: int) -> float:
        """Seconds of one chunk."""
        for replica in range(self.deployment.info.dp):
            self.deployment.reset_slot(replica, 0)
        return self._timed([self._step(0, 0, self._tokens(attempt, self.chunk), is_sampled=True)])

    def fill(self) -> None:
        info = self.deployment.info
        for slot in range(info.num_slots):
            for replica in range(info.dp):
                self.deployment.reset_slot(replica, slot)
            for start in range(0, self.context, self.chunk):
                ids = self._tokens(slot, min(self.chunk, self.context - start))
                self._timed([self._step(slot, start, ids, is_sampled=False, part=self._part)])

    def decode(self, attempt: int) -> float:
        """Seconds of one step, the `attempt`-th (from 0) since `fill`."""
        return self._timed(
            [
                self._step(
                    slot, self.context + attempt, self._tokens(slot * 31 + attempt, 1), is_sampled=True, part=self._part
                )
                for slot in range(self.deployment.info.num_slots)
            ]
        )

    def _tokens(self, seed: int, count: int) -> tuple[int, ...]:
        # Well spread over the vocabulary, so that routing is as even as the weights allow.
        return tuple((seed * 7919 + i * 104729) % self.deployment.spec.vocab_size for i in range(count))

    @staticmethod
    def _step(slot: int, start: int, ids: tuple[int, ...], *, is_sampled: bool, part: int = 0) -> SequenceStep:
        from workbench.serving.requests import SamplingParams
        from workbench.serving.steps import SequenceStep

        sample = SamplingParams(max_tokens=1) if is_sampled else None
        pages = (slot,) if part and not start else ()
        return SequenceStep(slot=slot, start=start, token_ids=ids, sample=sample, pages=pages, pool_page_tokens=part)

    def _timed(self, steps: Sequence[SequenceStep]) -> float:
        began = time.perf_counter()
        self.deployment.step([tuple(steps)] * self.deployment.info.dp)
        return time.perf_counter() - began


def _measure(steps: MadeUpSteps, repeats: int) -> dict[str, float]:
    """Median seconds of a chunk from an empty slot, of a decode step of all slots, of a round without work."""
    prefill = [steps.prefill(attempt) for attempt in range(repeats + 1)]
    steps.fill()
    decode = [steps.decode(attempt) for attempt in range(repeats + 1)]
    rounds = [steps.deployment.ping() for _ in range(repeats)]
    # The first of each meets cold caches and is left out.
    return {
        "prefill": statistics.median(prefill[1:]),
        "decode": statistics.median(decode[1:]),
        "round trip": statistics.median(rounds),
    }


def _bytes(
    what: str, rank: int, predicted: float, measured: float, *, counts: bool = True, note: str = ""
) -> CheckLine:
    return CheckLine(
        what=what,
        rank=rank,
        predicted=Quantity(predicted, "B", "exact" if counts else "modelled"),
        measured=Quantity(measured, "B", "measured"),
        counts=counts,
        note=note,
    )
