"""What was predicted beside what a running deployment measures, with the ratio of the two."""

from __future__ import annotations

import datetime
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.base import Cell, Quantity, Table, human
from workbench.placement import Layout
from workbench.planner.cost import Efficiency, OperatorSeconds, StepCost, stage_cost, step_cost
from workbench.planner.engines import WORKBENCH
from workbench.planner.inventories import InventoryBook, TraceInventory
from workbench.planner.memory import CacheNeed, Reserve, stage_ledger
from workbench.planner.objective import Objective
from workbench.planner.weights import read_weight_table

if TYPE_CHECKING:
    from workbench.cluster.topology import Topology
    from workbench.deployment import Deployment

__all__ = ["CheckLine", "PlanCheck", "check_deployment", "check_memory", "check_times"]

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
    repeats: int = 9,
) -> PlanCheck:
    """Memory of every rank and the time of a decode step and of a chunk of a prompt, predicted and measured.

    The slots of the deployment are filled with made-up tokens, so nothing else may use it meanwhile. `context`: cached
    tokens of each sequence in the decode step (default: half of a slot). `measured` holds seconds of operators measured
    on this kind of device with as many threads as a rank has.
    """
    lines = check_memory(deployment, precision=precision)
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


def check_memory(deployment: Deployment, *, precision: str) -> tuple[CheckLine, ...]:
    """Weights, caches, their sum, and the growth of each rank's process while it loaded.

    The process itself (interpreter, torch) is no part of a plan's prediction on a device; its size is told with the
    loading peak, as a line that does not count.
    """
    spec, layout, info = deployment.spec, deployment.layout, deployment.info
    table = read_weight_table(spec, precision)
    need = CacheNeed(
        slots=info.num_slots,
        max_tokens=info.max_tokens,
        kv_dtype=info.kv_dtype,
        kv_scale_bytes=WORKBENCH.kv_scale_bytes,
    )
    reserve = Reserve.for_device("cpu")
    lines: list[CheckLine] = []
    for stats, load in zip(deployment.stats(), deployment.load_stats, strict=True):
        rank = stats.rank
        ledger = stage_ledger(table, layout, layout.coords(rank).pp, need, reserve)
        held = round(load["resident_bytes"])
        lines += [
            _bytes("weights", rank, ledger.weights, held),
            _bytes("caches", rank, ledger.cache, stats.cache_bytes),
            _bytes("weights and caches", rank, ledger.weights + ledger.cache, held + stats.cache_bytes),
        ]
        if stats.device_bytes is None:
            window = next(line.size.value for line in ledger.lines if line.role == "staging window")
            most = ledger.weights + window
            lines.append(
                _bytes("growth while loading", rank, most, load["peak_host_bytes"], counts=False, note="bound: window")
            )
            rest = stats.resident_bytes - held - stats.cache_bytes
            lines.append(_bytes("process beside them", rank, reserve.other.value, rest, counts=False, note="assumed"))
        else:
            lines.append(_bytes("allocated on the device", rank, ledger.weights + ledger.cache, stats.device_bytes))
    return tuple(lines)


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
    context = min(info.max_tokens // 2 if context is None else context, info.max_tokens - repeats - 2)
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
    found = _measure(deployment, chunk=chunk, context=context, repeats=repeats)
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


def _measure(deployment: Deployment, *, chunk: int, context: int, repeats: int) -> dict[str, float]:
    """Median seconds of a chunk from an empty slot, of a decode step of all slots, of a round without work."""
    from workbench.serving.requests import SamplingParams
    from workbench.serving.steps import SequenceStep

    info, vocab = deployment.info, deployment.spec.vocab_size
    greedy = SamplingParams(max_tokens=1)

    def tokens(seed: int, count: int) -> tuple[int, ...]:
        # Well spread over the vocabulary, so that routing is as even as the weights allow.
        return tuple((seed * 7919 + i * 104729) % vocab for i in range(count))

    def timed(steps: Sequence[SequenceStep]) -> float:
        began = time.perf_counter()
        deployment.step([tuple(steps)] * info.dp)
        return time.perf_counter() - began

    prefill = []
    for attempt in range(repeats + 1):
        for replica in range(info.dp):
            deployment.reset_slot(replica, 0)
        step = SequenceStep(slot=0, start=0, token_ids=tokens(attempt, chunk), sample=greedy)
        prefill.append(timed([step]))
    for slot in range(info.num_slots):
        for replica in range(info.dp):
            deployment.reset_slot(replica, slot)
        for start in range(0, context, chunk):
            ids = tokens(slot, min(chunk, context - start))
            timed([SequenceStep(slot=slot, start=start, token_ids=ids)])
    decode = []
    for attempt in range(repeats + 1):
        steps = [
            SequenceStep(slot=slot, start=context + attempt, token_ids=tokens(slot * 31 + attempt, 1), sample=greedy)
            for slot in range(info.num_slots)
        ]
        decode.append(timed(steps))
    rounds = [deployment.ping() for _ in range(repeats)]
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
