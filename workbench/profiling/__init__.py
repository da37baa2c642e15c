"""How fast it is: latencies counted in tokens, loads, operators and communication of every rank, as records.

The records import without torch, and what times operators brings it in on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from workbench.profiling.communication import Communication, split_communication
from workbench.profiling.compare import Comparison, compare_runs
from workbench.profiling.deployed import DeploymentProfile, DeploymentProfiler
from workbench.profiling.expert_watch import expert_load
from workbench.profiling.experts import ExpertLoad
from workbench.profiling.generator import LoadReport, generate_load
from workbench.profiling.goodput import Goodput, Slo, measure_goodput
from workbench.profiling.latency import (
    LatencySummary,
    Percentiles,
    RequestTiming,
    append_records,
    read_records,
    summarise,
)
from workbench.profiling.load import Bursts, ClosedLoop, Kind, Lengths, Load, LoadPlan, Poisson, plan_load
from workbench.profiling.records import environment_of
from workbench.profiling.steps import OperatorTime, StepLedger
from workbench.profiling.targets import Question, ServerTarget, ServiceTarget, Target
from workbench.profiling.trace import write_trace

if TYPE_CHECKING:
    from workbench.profiling.operators import profile_steps

_LATE = {"profile_steps": "workbench.profiling.operators"}

__all__ = [
    "Bursts",
    "ClosedLoop",
    "Communication",
    "Comparison",
    "DeploymentProfile",
    "DeploymentProfiler",
    "ExpertLoad",
    "Goodput",
    "Kind",
    "LatencySummary",
    "Lengths",
    "Load",
    "LoadPlan",
    "LoadReport",
    "OperatorTime",
    "Percentiles",
    "Poisson",
    "Question",
    "RequestTiming",
    "ServerTarget",
    "ServiceTarget",
    "Slo",
    "StepLedger",
    "Target",
    "append_records",
    "compare_runs",
    "environment_of",
    "expert_load",
    "generate_load",
    "measure_goodput",
    "plan_load",
    "profile_steps",
    "read_records",
    "split_communication",
    "summarise",
    "write_trace",
]


def __getattr__(name: str) -> object:
    if name not in _LATE:
        raise AttributeError(f"module 'workbench.profiling' has no attribute {name!r}")
    value = getattr(import_module(_LATE[name]), name)
    globals()[name] = value
    return value
