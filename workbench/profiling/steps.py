"""Where the time of a step goes: operators by category, communication, and the gap in which nothing ran. Plain records.

The parts add up to the step: every moment belongs to the innermost operator that ran then, to a collective, or to the
gap. On an accelerator time is that of its kernels; kernels side by side are counted each, and what they share is
subtracted as overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from workbench.base import Cell, Table, human
from workbench.operators.coverage import Roofline
from workbench.operators.inventory import OperatorUse

__all__ = ["COMMUNICATION", "GAP", "OVERLAP", "OperatorTime", "Span", "StepLedger", "merge_ledgers"]

COMMUNICATION, GAP, OVERLAP = "communication", "host gap", "overlap"
SHOWN = 16
WORDS = {"gemm": "GEMM", "grouped_gemm": "grouped GEMM (experts)", "linear_attention": "recurrent (linear attention)"}


@dataclass(frozen=True, slots=True)
class Span:
    """One event: seconds from the start of the trace. `kernels` are (name, seconds) that an operator launched."""

    name: str
    start_s: float
    end_s: float
    shapes: tuple[tuple[int, ...], ...] = ()
    is_device: bool = False
    kernels: tuple[tuple[str, float], ...] = ()

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorTime:
    """One operator at one set of shapes in one part of the model: `count` calls took `seconds` by themselves.

    `flops` and `num_bytes` are of ONE call; None where the operator was not recorded with its work.
    """

    name: str
    category: str
    area: str
    shapes: tuple[tuple[int, ...], ...]
    count: int
    seconds: float
    flops: int | None = None
    num_bytes: int | None = None
    least_s: float | None = None  # one call at the measured limits of the device

    @property
    def share_of_roofline(self) -> float | None:
        """Least time over measured time; None where the work or the limit is not known."""
        return None if self.least_s is None or not self.seconds else self.least_s * self.count / self.seconds

    def __str__(self) -> str:
        return f"{self.name}({', '.join(str(list(shape)) for shape in self.shapes)})"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLedger:
    """Seconds over `num_steps` steps of one rank.

    `clock` says whose time: "host" or the device type. `num_events` were read and `num_left_out` not (the caps).
    `memory` is bytes by what holds them.
    """

    operators: tuple[OperatorTime, ...] = field(repr=False)
    num_steps: int
    seconds: float
    communication_s: float
    gap_s: float
    overlap_s: float = 0.0
    hidden_communication_s: float = 0.0  # part of the communication during which something was computed
    clock: str = "host"
    num_events: int = 0
    num_left_out: int = 0
    memory: tuple[tuple[str, int], ...] = ()

    def by_category(self) -> dict[str, float]:
        """Seconds by category, largest first, then communication, gap and overlap; adds up to `accounted_s`."""
        found: dict[str, float] = {}
        for each in self.operators:
            found[each.category] = found.get(each.category, 0.0) + each.seconds
        ordered = dict(sorted(found.items(), key=lambda item: -item[1]))
        rest = {COMMUNICATION: self.communication_s, GAP: self.gap_s, OVERLAP: -self.overlap_s}
        return {**ordered, **{name: value for name, value in rest.items() if value or name == GAP}}

    @property
    def accounted_s(self) -> float:
        return sum(self.by_category().values())

    def with_work(self, uses: Iterable[OperatorUse], roofline: Roofline | None = None) -> StepLedger:
        """FLOPs and bytes from an inventory of the same pass, joined by name and shapes; the limits of a device.

        Operators that the inventory does not have stay without: their work is not guessed.
        """
        known: dict[tuple[str, tuple[tuple[int, ...], ...]], OperatorUse] = {}
        for use in uses:
            known.setdefault((_plain_name(use.name), tuple(x for x in use.input_shapes if x)), use)
        joined = []
        for each in self.operators:
            match = known.get((_plain_name(each.name), each.shapes))
            if match is not None:
                least = roofline.least_seconds(match) if roofline is not None else None
                each = replace(each, flops=match.flops, num_bytes=match.num_bytes, least_s=least)
            joined.append(each)
        return replace(self, operators=tuple(joined))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "memory": dict(self.memory), "by_category": self.by_category()}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> StepLedger:
        fields = {key: value for key, value in record.items() if key != "by_category"}
        operators = tuple(
            OperatorTime(**{**x, "shapes": tuple(tuple(shape) for shape in x["shapes"])}) for x in fields["operators"]
        )
        return cls(**{**fields, "operators": operators, "memory": tuple(fields["memory"].items())})

    def tables(self) -> tuple[Table, ...]:
        steps = max(1, self.num_steps)
        rows: list[tuple[Cell, ...]] = [
            (WORDS.get(name, name), human(seconds / steps, "s"), _percent(seconds, self.seconds))
            for name, seconds in self.by_category().items()
        ]
        rows.append(("step", human(self.seconds / steps, "s"), _percent(self.accounted_s, self.seconds) + " accounted"))
        note = f"mean of {self.num_steps} steps, time of the {self.clock}; {self.num_events} events"
        note += f", {self.num_left_out} beyond the cap left out" if self.num_left_out else ""
        hidden = self.hidden_communication_s
        note += f"; {_percent(hidden, self.communication_s)} of communication behind computing" if hidden else ""
        tables = [Table(columns=("category", "time a step", "share"), rows=tuple(rows), note=note), self._slowest()]
        if self.memory:
            held = tuple((name, size, human(size, "B")) for name, size in self.memory)
            tables.append(Table(columns=("memory", "bytes", ""), rows=held))
        return tuple(tables)

    def render(self) -> str:
        return "\n\n".join(table.render() for table in self.tables())

    def _repr_html_(self) -> str:
        return "".join(table.to_html() for table in self.tables())

    def _slowest(self) -> Table:
        ordered = sorted(self.operators, key=lambda x: -x.seconds)
        rows: list[tuple[Cell, ...]] = [
            (
                str(x),
                x.area,
                x.count,
                human(x.seconds / max(1, self.num_steps), "s"),
                None if not x.flops else human(x.flops * x.count / x.seconds, "FLOP/s"),
                None if not x.num_bytes else human(x.num_bytes * x.count / x.seconds, "B/s"),
                None if x.share_of_roofline is None else f"{x.share_of_roofline:.0%}",
            )
            for x in ordered[:SHOWN]
        ]
        rest = sum(x.seconds for x in ordered[SHOWN:])
        note = f"and {len(ordered) - SHOWN} more, {_percent(rest, self.seconds)} of the step" if rest else ""
        columns = ("operator", "part of the model", "calls", "time a step", "rate", "bytes", "of its roofline")
        return Table(columns=columns, rows=tuple(rows), note=note)


def merge_ledgers(ledgers: Sequence[StepLedger]) -> StepLedger:
    """Steps of one rank together. Raises ValueError for none, or for times of different clocks."""
    if not ledgers or len({ledger.clock for ledger in ledgers}) > 1:
        raise ValueError(f"cannot add {len(ledgers)} ledgers of clocks {sorted({x.clock for x in ledgers})}")
    merged: dict[tuple[object, ...], OperatorTime] = {}
    for ledger in ledgers:
        for each in ledger.operators:
            key = (each.name, each.category, each.area, each.shapes)
            known = merged.get(key)
            if known is not None:
                each = replace(known, count=known.count + each.count, seconds=known.seconds + each.seconds)
            merged[key] = each
    return StepLedger(
        operators=tuple(merged.values()),
        num_steps=sum(x.num_steps for x in ledgers),
        seconds=sum(x.seconds for x in ledgers),
        communication_s=sum(x.communication_s for x in ledgers),
        gap_s=sum(x.gap_s for x in ledgers),
        overlap_s=sum(x.overlap_s for x in ledgers),
        hidden_communication_s=sum(x.hidden_communication_s for x in ledgers),
        clock=ledgers[0].clock,
        num_events=sum(x.num_events for x in ledgers),
        num_left_out=sum(x.num_left_out for x in ledgers),
        memory=ledgers[-1].memory,
    )


def _plain_name(name: str) -> str:
    """ "aten.mm.default", "aten::mm" and "native::mm" -> "aten::mm"."""
    return "::".join(name.split(".")[:2]) if "::" not in name else name.replace("native::", "aten::")


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole > 0 else "–"
