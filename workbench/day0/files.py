"""Are the files whole, and one-to-one with the model? The audit of the folder, as a gate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from workbench.checkpoint import audit
from workbench.day0.gates import GateBook
from workbench.report import Section

__all__ = ["measure_files"]


def measure_files(gates: GateBook, sections: list[Section], root: Path, *, say: Callable[[str], None]) -> None:
    """Count the audit's errors; the first is told in the evidence, or the first warning where there is no error.

    Raises CheckpointError where there is no folder.
    """
    report = audit(root)
    evidence = report.summary()
    told = [("First", report.errors), ("First warning", report.warnings)]
    first = next((f". {word}: {' '.join(found[0].render().split())}" for word, found in told if found), "")
    gates.measured("checkpoint.audit", len(report.errors), evidence=evidence + first)
    tables = [report.checks_table(), *([report.findings_table()] if report.findings else [])]
    sections.append(Section(title="Checkpoint", text=evidence, tables=tuple(tables)))
    say(evidence)
