"""What the tests of the acceptance share: a run and what it left, and the command in this process."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from workbench.cli import main
from workbench.report import Day0Report

TINY = Path(__file__).resolve().parents[2] / "data" / "k3-tiny"


@dataclass(frozen=True, kw_only=True, slots=True)
class Acceptance:
    """One run: its report, what it said, and the folder of its files."""

    report: Day0Report
    lines: tuple[str, ...]
    folder: Path

    @property
    def failed(self) -> set[str]:
        return {gate.id for gate in self.report.gates if gate.status == "fail"}

    @property
    def unmeasured(self) -> set[str]:
        return {gate.id for gate in self.report.gates if gate.status == "not measured"}

    def evidence(self, gate_id: str) -> str:
        return next(gate.evidence for gate in self.report.gates if gate.id == gate_id)


Accept = Callable[..., Acceptance]


def command(*arguments: object) -> tuple[int, str]:
    """Exit code and output of `workbench day0 …`, in this process."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = main(["day0", *map(str, arguments)])
    return code, output.getvalue()
