"""The whole acceptance in one call: audit, load, parity, answers, latencies, and a report whose gates decide; and the
proof that each gate can say no."""

from workbench.day0.gates import GATES
from workbench.day0.proofs import GateProof, GateProofs
from workbench.day0.prove import prove_gates
from workbench.day0.prove_report import ReportProof, ReportProofs, prove_report
from workbench.day0.run import run_day0

__all__ = [
    "GATES",
    "GateProof",
    "GateProofs",
    "ReportProof",
    "ReportProofs",
    "prove_gates",
    "prove_report",
    "run_day0",
]
