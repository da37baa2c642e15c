"""What came of the planted faults: gate by gate, as a table, as JSON, and in the report that they prove."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from workbench.base import Cell, Table, printable
from workbench.report import Day0Report, Gate, Section

__all__ = ["GateProof", "GateProofs", "ProofStatus"]

ProofStatus = Literal["proven", "not proven", "not asked"]
TITLE = "Gates under planted faults"
LEAST_COLUMNS = 24  # of a shortened cell; a terminal with less room is not told faults, or what was said of them


@dataclass(frozen=True, kw_only=True, slots=True)
class GateProof:
    """One gate: the fault planted for it, the gate as it then was, and why that proves nothing where it does not.

    `sabotaged` is None where the gate was not entered under a fault. "not asked" are gates of other models' reports.
    """

    gate_id: str
    status: ProofStatus
    fault: str = ""
    sabotaged: Gate | None = None
    reason: str = ""

    @property
    def value_text(self) -> str:
        """The value under the fault, against what would have been good enough."""
        gate = self.sabotaged
        return "" if gate is None else f"{gate.value_text()}, good is {gate.threshold_text()}"

    @property
    def told(self) -> str:
        """What the report said of the fault, or why nothing is proven."""
        said = self.sabotaged.evidence if self.sabotaged is not None else ""
        return f"{self.reason}: {said}" if self.reason and said else self.reason or said

    def to_json(self) -> dict[str, object]:
        return {
            "gate": self.gate_id,
            "status": self.status,
            "fault": self.fault,
            "sabotaged": None if self.sabotaged is None else self.sabotaged.to_json(),
            "reason": self.reason,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class GateProofs:
    """All gates in the report's order. `made_at` is UTC, ISO 8601; `report` is the sound run, with the proofs in it."""

    proofs: tuple[GateProof, ...]
    made_at: str
    seconds: float
    report: Day0Report

    @classmethod
    def enter(cls, proofs: Sequence[GateProof], report: Day0Report, *, made_at: str, seconds: float) -> GateProofs:
        """Write into each gate of `report` what proves it or why nothing does, and a section that shows them all."""
        by_id = {proof.gate_id: proof for proof in proofs}
        gates = tuple(_with_proof(gate, by_id.get(gate.id), made_at[:10]) for gate in report.gates)
        found = cls(proofs=tuple(proofs), made_at=made_at, seconds=seconds, report=report)
        section = Section(title=TITLE, text=found.sentence(), tables=(found.table(),))
        sections = (*(x for x in report.sections if x.title != TITLE), section)
        environment = {**report.environment, "gates proven": f"{found.num_proven} of {len(report.gates)}"}
        return replace(found, report=replace(report, gates=gates, sections=sections, environment=environment))

    @property
    def num_proven(self) -> int:
        return sum(proof.status == "proven" for proof in self.proofs)

    @property
    def unproven(self) -> tuple[str, ...]:
        """Gates of the report that were not seen to fail."""
        return tuple(proof.gate_id for proof in self.proofs if proof.status == "not proven")

    @property
    def passed(self) -> bool:
        """Whether every gate of the report failed under its fault, named it, and passed without it."""
        return bool(self.num_proven) and not self.unproven

    def sentence(self) -> str:
        num_asked = sum(proof.status != "not asked" for proof in self.proofs)
        text = f"{self.num_proven} of {num_asked} gates pass without a fault, fail under their own, and name it"
        return text + (f"; not proven: {', '.join(self.unproven)}" if self.unproven else "")

    def table(self) -> Table:
        columns = ("gate", "", "fault planted", "value under it", "what the report said")
        rows: list[tuple[Cell, ...]] = [(x.gate_id, x.status, x.fault, x.value_text, x.told) for x in self.proofs]
        return Table(columns=columns, rows=tuple(rows))

    def render(self, width: int | None = None) -> str:
        """The table with the verdict above; `width` columns of a terminal shorten faults and evidence to what fits, and
        what is not proven is told in full below."""
        table = self.table() if width is None else self._narrow(width)
        parts = [self.sentence(), table.render()]
        if width is not None:
            parts += [f"{x.status}: {x.gate_id}\n    {printable(x.told)}" for x in self.proofs if x.status != "proven"]
        return "\n\n".join(parts)

    def _repr_html_(self) -> str:
        return self.table().to_html()

    def to_json(self) -> dict[str, object]:
        return {
            "passed": self.passed,
            "made_at": self.made_at,
            "seconds": self.seconds,
            "proofs": [proof.to_json() for proof in self.proofs],
            "report": self.report.to_json(),
        }

    def _narrow(self, width: int) -> Table:
        whole = self.table()
        texts = (2, 4)  # places of the columns that may be cut
        facts = _columns(whole, tuple(i for i in range(len(whole.columns)) if i not in texts))
        left = width - max(map(len, facts.render().splitlines()))
        count = next((count for count in (2, 1) if left // count - 2 >= LEAST_COLUMNS), 0)
        room = left // count - 2 if count else 0
        kept = tuple(i for i in range(len(whole.columns)) if i not in texts[count:])
        rows = tuple(
            tuple(_cut(str(cell), room) if i in texts else cell for i, cell in enumerate(row)) for row in whole.rows
        )
        return _columns(replace(whole, rows=rows), kept)


def _with_proof(gate: Gate, proof: GateProof | None, date: str) -> Gate:
    if proof is None or proof.status == "not asked":
        return replace(gate, proof="", unproven="")
    if proof.status == "proven":
        return replace(gate, proof=f"{proof.fault} ({proof.value_text}); seen {date}", unproven="")
    return replace(gate, proof="", unproven=f"{proof.told}; tried {date}")


def _columns(table: Table, kept: tuple[int, ...]) -> Table:
    rows = tuple(tuple(row[i] for i in kept) for row in table.rows)
    return Table(columns=tuple(table.columns[i] for i in kept), rows=rows)


def _cut(text: str, columns: int) -> str:
    text = printable(text)
    return text if len(text) <= columns else text[: columns - 1].rstrip() + "…"
