"""Acceptance gates as data: a question, a threshold, the value found, and the verdict that follows from them."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from workbench.base import Cell, Table, human, printable

__all__ = ["Gate", "Relation", "Value", "Verdict", "gates_table", "gates_text", "steps_text", "verdict_of"]

Relation = Literal["<=", ">=", "=="]
Value = float | int | str | bool
Status = Literal["pass", "fail", "not measured"]

LEAST_WIDTH, LEAST_EVIDENCE = 40, 24  # columns of a terminal; a narrower evidence column is left out
HUMAN_UNITS = ("B", "B/s", "s", "FLOP/s", "tokens/s")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """One gate. Whether it passed is computed from value, relation and threshold, so a record cannot claim otherwise.

    `id` stays the same from run to run ("loading.read_ratio"): reports are compared by it. `layer` is the part of the
    stack it speaks about. `value` None means that it could not be measured; `evidence` then says why, and the verdict
    fails unless `is_optional`. A gate that was measured and failed always fails the verdict. `proof` names the planted
    fault under which this gate was seen to fail; `unproven` says why it was not, where that was tried. Raises
    ValueError for values that the relation cannot compare.
    """

    id: str
    layer: str
    question: str
    threshold: Value
    value: Value | None
    relation: Relation = "=="
    unit: str = ""
    evidence: str = ""
    conditions: str = ""
    proof: str = ""
    unproven: str = ""
    is_optional: bool = False

    def __post_init__(self) -> None:
        if self.relation not in ("<=", ">=", "=="):
            raise ValueError(f"gate {self.id}: relation {self.relation!r} is not one of <=, >=, ==")
        if self.relation == "==":
            return
        for value in (self.threshold, self.value):
            if value is not None and (isinstance(value, (str, bool)) or not isinstance(value, (int, float))):
                raise ValueError(f"gate {self.id}: {value!r} cannot be compared by {self.relation}")

    @property
    def passed(self) -> bool | None:
        """None where it was not measured. A value that is not a number passes nothing."""
        if self.value is None:
            return None
        if self.relation == "<=":
            return self.value <= self.threshold  # type: ignore[operator]
        if self.relation == ">=":
            return self.value >= self.threshold  # type: ignore[operator]
        if isinstance(self.value, bool) is not isinstance(self.threshold, bool):
            return False  # 1 is not an answer to a yes-or-no question
        return self.value == self.threshold

    @property
    def status(self) -> Status:
        return "not measured" if self.passed is None else "pass" if self.passed else "fail"

    @property
    def blocks(self) -> bool:
        """Whether the verdict fails because of this gate."""
        return self.passed is False or (self.passed is None and not self.is_optional)

    def value_text(self) -> str:
        return "not measured" if self.value is None else _value_text(self.value, self.unit)

    def threshold_text(self) -> str:
        sign = {"<=": "at most ", ">=": "at least ", "==": ""}[self.relation]
        return sign + _value_text(self.threshold, self.unit)

    def to_json(self) -> dict[str, object]:
        return {
            "id": self.id,
            "layer": self.layer,
            "question": self.question,
            "relation": self.relation,
            "threshold": _json_value(self.threshold),
            "value": _json_value(self.value),
            "unit": self.unit,
            "passed": self.passed,
            "status": self.status,
            "is_optional": self.is_optional,
            "evidence": self.evidence,
            "conditions": self.conditions,
            "proof": self.proof,
            "unproven": self.unproven,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Gate:
        """The gate that `to_json` wrote; `passed` and `status` are computed anew."""
        values = {key: value for key, value in record.items() if key not in ("passed", "status")}
        return cls(**{**values, **{key: _from_json_value(values[key]) for key in ("threshold", "value")}})


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The answer over all gates: passed only where there is at least one gate and none blocks.

    `cause`: the first gate that failed, in the order in which a deployment comes up, and what its evidence names; where
    none failed, the first without a value. "" where nothing blocks.
    """

    passed: bool
    num_passed: int
    num_failed: int
    num_unmeasured: int
    blocking: tuple[str, ...]
    cause: str = ""

    def sentence(self) -> str:
        counts = [f"{self.num_passed} passed"]
        counts += [f"{self.num_failed} failed"] if self.num_failed else []
        counts += [f"{self.num_unmeasured} not measured"] if self.num_unmeasured else []
        text = f"{'PASS' if self.passed else 'FAIL'}: {', '.join(counts)}"
        return text + (f"; blocking: {', '.join(self.blocking)}" if self.blocking else "")

    def told(self) -> str:
        """The sentence, and what is at fault."""
        return f"{self.sentence()}. {self.cause}" if self.cause else self.sentence()


def verdict_of(gates: Sequence[Gate]) -> Verdict:
    """Verdict over `gates`; no gates at all is not a pass."""
    statuses = [gate.status for gate in gates]
    blocking = tuple(gate.id for gate in gates if gate.blocks)
    first = sorted((gate for gate in gates if gate.blocks), key=lambda gate: gate.status != "fail")[:1]
    return Verdict(
        passed=bool(gates) and not blocking,
        num_passed=statuses.count("pass"),
        num_failed=statuses.count("fail"),
        num_unmeasured=statuses.count("not measured"),
        blocking=blocking,
        cause="".join(f"{gate.id}: {gate.evidence}" for gate in first),
    )


def gates_table(gates: Sequence[Gate]) -> Table:
    """One row per gate, for a terminal or a notebook."""
    rows: list[tuple[Cell, ...]] = [
        (gate.id, gate.status, gate.value_text(), gate.threshold_text(), gate.evidence) for gate in gates
    ]
    columns = ("gate", "status", "value", "threshold", "evidence")
    return Table(columns=columns, rows=tuple(rows), title=verdict_of(gates).sentence())


def gates_text(gates: Sequence[Gate], width: int) -> str:
    """`gates_table` for a terminal of `width` columns: evidence is cut to one line, and each gate that does not pass
    has it told in full below, those of one reason together."""
    width = max(LEAST_WIDTH, width)
    title = verdict_of(gates).sentence().partition("; blocking")[0]  # they are named below
    columns = ("gate", "status", "value", "threshold")
    facts: list[tuple[Cell, ...]] = [
        (g.id, g.status, "–" if g.value is None else g.value_text(), g.threshold_text()) for g in gates
    ]
    table = Table(columns=columns, rows=tuple(facts))
    room = width - 2 - max(map(len, table.render().splitlines()))
    if room >= LEAST_EVIDENCE:
        rows = [(*row, _cut(printable(gate.evidence), room)) for row, gate in zip(facts, gates, strict=True)]
        table = Table(columns=(*columns, "evidence"), rows=tuple(rows))
    reasons: dict[tuple[str, str], list[Gate]] = {}
    for gate in gates:
        if gate.status != "pass":
            reasons.setdefault((gate.status, gate.evidence), []).append(gate)
    parts = [_wrapped(title, width), table.render()]
    for (status, evidence), group in reasons.items():
        lines = [_wrapped(f"{status}: {', '.join(gate.id for gate in group)}", width)]
        lines += [_wrapped(group[0].question, width, "    ")] if len(group) == 1 else []
        lines += [_wrapped(evidence, width, "    ")] if evidence else []
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def steps_text(steps: Sequence[str], width: int | None = None) -> str:
    """Steps under each other with their numbers; lines of at most `width` columns where that is given."""
    lines = [f"{number}. {printable(step)}" for number, step in enumerate(steps, 1)]
    if width is not None:
        lines = [_wrapped(line, max(LEAST_WIDTH, width), hanging="   ") for line in lines]
    return "\n".join(["Next:", *lines])


def _cut(text: str, columns: int) -> str:
    return text if len(text) <= columns else text[: columns - 1].rstrip() + "…"


def _wrapped(text: str, width: int, indent: str = "", *, hanging: str = "") -> str:
    lines = textwrap.wrap(
        printable(text), width, initial_indent=indent, subsequent_indent=indent + hanging, break_on_hyphens=False
    )
    return "\n".join(lines)


def _value_text(value: Value, unit: str) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if unit in HUMAN_UNITS:
        return human(value, unit)
    number = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
    return f"{number} {unit}".rstrip()


def _json_value(value: Value | None) -> object:
    """JSON has no infinity and no nan: they are spelled as {"float": "inf"}."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value


def _from_json_value(value: Any) -> Any:
    return float(value["float"]) if isinstance(value, dict) else value
