"""The whole acceptance in one call: audit, load, parity, answers, latencies, and a report whose gates decide."""

from workbench.day0.gates import GATES
from workbench.day0.run import run_day0

__all__ = ["GATES", "run_day0"]
