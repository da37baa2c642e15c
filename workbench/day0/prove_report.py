"""The report put to the proof: sabotaged copies of a checkpoint, and whether each verdict names what was done."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from workbench.align import require_reference
from workbench.base import Cell, Table, UnsupportedModelError, WorkbenchError, error_text
from workbench.cluster import survey_machine
from workbench.day0.faults.checkpoints import CHECKPOINT_FAULTS, CheckpointFault, Planted
from workbench.day0.faults.files import link_folder
from workbench.day0.run import run_day0
from workbench.report import Day0Report, Section
from workbench.spec import read_spec

__all__ = ["ReportProof", "ReportProofs", "name_problem", "prove_report"]

TITLE = "Reports of sabotaged copies"
NOTHING_TO_PLANT = "this checkpoint has nothing to do it to"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportProof:
    """One sabotaged copy: what was done, the verdict of its report, and why that does not name the fault where it does
    not."""

    name: str
    status: Literal["named", "not named", "not asked"]
    fault: str = ""
    verdict: str = ""
    reason: str = ""

    def to_json(self) -> dict[str, object]:
        return {field: getattr(self, field) for field in self.__slots__}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportProofs:
    """All copies, in the order of the faults."""

    proofs: tuple[ReportProof, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether something was asked, and every report names what was done to its copy."""
        asked = [proof for proof in self.proofs if proof.status != "not asked"]
        return bool(asked) and all(proof.status == "named" for proof in asked)

    def sentence(self) -> str:
        asked = [proof for proof in self.proofs if proof.status != "not asked"]
        num_named = sum(proof.status == "named" for proof in asked)
        text = f"{num_named} of {len(asked)} sabotaged copies fail with a verdict that names the fault"
        unnamed = [proof.name for proof in asked if proof.status != "named"]
        return text + (f"; not named: {', '.join(unnamed)}" if unnamed else "")

    def table(self) -> Table:
        columns = ("copy", "", "what was done", "what the verdict says")
        rows: list[tuple[Cell, ...]] = [
            (x.name, x.status, x.fault, f"{x.reason}: {x.verdict}" if x.reason and x.verdict else x.reason or x.verdict)
            for x in self.proofs
        ]
        return Table(columns=columns, rows=tuple(rows), title=self.sentence())

    def render(self) -> str:
        """Copy by copy, in full: verdicts are sentences, and too long for a table in a terminal."""
        lines = [f"{self.sentence()} ({self.seconds:.0f} s)"]
        for x in self.proofs:
            lines.append(f"\n{x.status}: {x.name}" + (f", {x.fault}" if x.fault else ""))
            lines += [f"    {text}" for text in (x.reason, x.verdict) if text]
        return "\n".join(lines)

    def entered(self, report: Day0Report) -> Day0Report:
        """`report` with a section that shows all copies."""
        section = Section(title=TITLE, tables=(self.table(),))
        return replace(report, sections=(*(x for x in report.sections if x.title != TITLE), section))

    def _repr_html_(self) -> str:
        return self.table().to_html()

    def to_json(self) -> dict[str, object]:
        return {
            "passed": self.passed,
            "sentence": self.sentence(),
            "seconds": self.seconds,
            "proofs": [proof.to_json() for proof in self.proofs],
        }


def prove_report(
    root: Path | str,
    *,
    out: Path | str | None = None,
    say: Callable[[str], None] | None = print,
    faults: tuple[CheckpointFault, ...] = CHECKPOINT_FAULTS,
    **options: Any,
) -> ReportProofs:
    """Accept a sabotaged copy of `root` for each of `faults`, and show that the verdict names it.

    A fault that files alone tell is accepted as it is; values that are wrong and well-formed are held against `root`.
    `options` as `run_day0` takes them. Each run stops at the gate that fails. Copies are folders of links under TMPDIR,
    `root` is only read; `out` gets the report of each copy, in `sabotaged/NAME`. Raises as `run_day0` does for
    arguments that make no sense.
    """
    root, began, say = Path(root), time.perf_counter(), say or (lambda line: None)
    has_reference = True
    try:
        require_reference(read_spec(root))
    except UnsupportedModelError:
        has_reference = False
    survey = options.pop("survey", None) or survey_machine(folder=root, rates=False)
    proofs: list[ReportProof] = []
    with tempfile.TemporaryDirectory(prefix="workbench-sabotage-") as folder:
        for fault in faults:
            if fault.needs_published and not has_reference:
                reason = "nothing independent computes this family: wrong values cannot be told"
                proofs.append(ReportProof(name=fault.name, status="not asked", reason=reason))
                continue
            copy = link_folder(root, Path(folder) / fault.name)
            own: Mapping[str, Any] = {
                **options,
                "survey": survey,
                "published": root if fault.needs_published else None,
                "out": None if out is None else Path(out) / "sabotaged" / fault.name,
            }
            proofs.append(_prove(fault, copy, own))
            say(f"{proofs[-1].status}: {fault.name}, {proofs[-1].reason or proofs[-1].fault}")
    return ReportProofs(proofs=tuple(proofs), seconds=time.perf_counter() - began)


def name_problem(fault: CheckpointFault, planted: Planted, report: Day0Report) -> str:
    """Why the verdict of `report` does not name what was planted; "" where it does."""
    verdict = report.verdict
    if verdict.passed:
        return "the report of the copy passes"
    if not verdict.cause.startswith(tuple(f"{gate_id}: " for gate_id in fault.gates)):
        return f"another gate than {' or '.join(fault.gates)} is named first"
    missing = [word for word in planted.words if word not in verdict.cause]
    return f"the verdict does not say {', '.join(missing)}" if missing else ""


def _prove(fault: CheckpointFault, copy: Path, options: Mapping[str, Any]) -> ReportProof:
    planted = fault.plant(copy)
    if planted is None:
        return ReportProof(name=fault.name, status="not asked", reason=NOTHING_TO_PLANT)
    try:
        report = run_day0(copy, stop_at_fault=True, say=None, **options)
    except WorkbenchError as error:
        reason = f"there is no report: {error_text(error)}"
        return ReportProof(name=fault.name, status="not named", fault=planted.what, reason=reason)
    problem = name_problem(fault, planted, report)
    return ReportProof(
        name=fault.name,
        status="not named" if problem else "named",
        fault=planted.what,
        verdict=report.verdict.told(),
        reason=problem,
    )
