"""Two reports side by side: which gates changed, by how much, and what in the environment may explain it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.base import Cell, Table
from workbench.report.gates import Gate
from workbench.report.report import Day0Report

__all__ = ["GateChange", "ReportComparison", "compare_reports"]

_RANK = {"fail": 0, "not measured": 1, "pass": 2}
_FACTS = ("model", "checkpoint", "weights_kind", "weights_note", "hardware", "created_at")


@dataclass(frozen=True, kw_only=True, slots=True)
class GateChange:
    """One gate in both reports; `old` or `new` is None where only the other report has it."""

    id: str
    old: Gate | None
    new: Gate | None

    @property
    def ratio(self) -> float | None:
        """New value over old value, where both are numbers and the old one is not 0."""
        if self.old is None or self.new is None:
            return None
        old, new = self.old.value, self.new.value
        if isinstance(old, (bool, str)) or isinstance(new, (bool, str)) or not old or new is None:
            return None
        return new / old

    @property
    def is_proof_lost(self) -> bool:
        """The old gate was seen to fail under a planted fault, and the new one was not."""
        return self.old is not None and self.new is not None and bool(self.old.proof) and not self.new.proof

    @property
    def is_regression(self) -> bool:
        """A gate that got worse, that did not fail under its fault any more, or that is gone: what is no longer asked
        cannot be trusted to hold. A later run without faults loses proofs as well, which is shown, but is no answer."""
        if self.old is None:
            return False
        if self.new is None or _RANK[self.new.status] < _RANK[self.old.status]:
            return True
        return self.is_proof_lost and bool(self.new.unproven)

    @property
    def is_changed(self) -> bool:
        """Another status, value, or threshold, or a proof that is lost."""
        return self.old is None or self.new is None or self.is_proof_lost or _facts(self.old) != _facts(self.new)

    def to_json(self) -> dict[str, object]:
        return {
            "id": self.id,
            "old": None if self.old is None else self.old.to_json(),
            "new": None if self.new is None else self.new.to_json(),
            "ratio": self.ratio,
            "is_proof_lost": self.is_proof_lost,
            "is_regression": self.is_regression,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportComparison:
    """All gates in the new report's order, gone ones last; `environment` lists (name, old, new) of what differs."""

    gates: tuple[GateChange, ...]
    environment: tuple[tuple[str, str, str], ...]

    @property
    def regressions(self) -> tuple[GateChange, ...]:
        return tuple(change for change in self.gates if change.is_regression)

    @property
    def passed(self) -> bool:
        return not self.regressions

    def table(self) -> Table:
        """Changed gates only."""
        rows: list[tuple[Cell, ...]] = []
        for change in self.gates:
            if change.is_changed:
                ratio = "–" if change.ratio is None else f"{change.ratio:.3g}x"
                words = ["WORSE"] if change.is_regression else []
                words += [_lost_proof(change.new)] if change.is_proof_lost and change.new is not None else []
                rows.append((change.id, _shown(change.old), _shown(change.new), ratio, ", ".join(words)))
        title = f"{len(rows)} of {len(self.gates)} gates changed, {len(self.regressions)} for the worse"
        if lost := sum(change.is_proof_lost for change in self.gates):
            title += f", {lost} without the proof they had"
        return Table(columns=("gate", "before", "after", "ratio", ""), rows=tuple(rows), title=title)

    def environment_table(self) -> Table:
        return Table(columns=("environment", "before", "after"), rows=self.environment)

    def render(self) -> str:
        tables = (self.table(), self.environment_table())
        return "\n\n".join(table.render() if table.rows else table.title for table in tables).rstrip()

    def _repr_html_(self) -> str:
        return self.table().to_html() + self.environment_table().to_html()

    def to_json(self) -> dict[str, object]:
        return {
            "passed": self.passed,
            "gates": [change.to_json() for change in self.gates],
            "environment": [list(row) for row in self.environment],
        }


def compare_reports(old: Mapping[str, Any] | Day0Report, new: Mapping[str, Any] | Day0Report) -> ReportComparison:
    """Compare two reports, or their JSON. Raises ConfigError for a record of another format."""
    before, after = (r if isinstance(r, Day0Report) else Day0Report.from_json(r) for r in (old, new))
    old_gates = {gate.id: gate for gate in before.gates}
    new_gates = {gate.id: gate for gate in after.gates}
    ids = [*new_gates, *(gate_id for gate_id in old_gates if gate_id not in new_gates)]
    changes = tuple(GateChange(id=x, old=old_gates.get(x), new=new_gates.get(x)) for x in ids)
    old_facts, new_facts = _environment(before), _environment(after)
    names = [*new_facts, *(name for name in old_facts if name not in new_facts)]
    differing = tuple(
        (name, old_facts.get(name, "–"), new_facts.get(name, "–"))
        for name in names
        if old_facts.get(name) != new_facts.get(name)
    )
    return ReportComparison(gates=changes, environment=differing)


def _environment(report: Day0Report) -> dict[str, str]:
    facts = {name: str(getattr(report, name)) for name in _FACTS}
    facts |= {str(key): str(value) for key, value in report.environment.items()}
    packages = report.versions.get("packages", {})
    versions = {key: value for key, value in report.versions.items() if key != "packages"}
    return facts | {str(key): str(value) for key, value in {**versions, **packages}.items()}


def _facts(gate: Gate) -> tuple[object, ...]:
    return (gate.status, gate.value, gate.threshold, gate.relation)


def _lost_proof(gate: Gate) -> str:
    return f"proof lost: {gate.unproven or 'no fault was planted'}"


def _shown(gate: Gate | None) -> str:
    return "–" if gate is None else f"{gate.status}, {gate.value_text()}"
