"""The verdict: gates as data, the Day-0 report as JSON and HTML, and two reports compared."""

from workbench.report.compare import GateChange, ReportComparison, compare_reports
from workbench.report.gates import Gate, Verdict, gates_table, verdict_of
from workbench.report.report import Day0Report, Picture, SampleAnswer, Section, WeightsKind, read_report

__all__ = [
    "Day0Report",
    "Gate",
    "GateChange",
    "Picture",
    "ReportComparison",
    "SampleAnswer",
    "Section",
    "Verdict",
    "WeightsKind",
    "compare_reports",
    "gates_table",
    "read_report",
    "verdict_of",
]
