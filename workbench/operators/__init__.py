"""What a model needs of a device: operators and collectives, traced from the model itself, then tried on the device.

The records import without torch; tracing and probing bring it in when called.
"""

from __future__ import annotations

from importlib import import_module

from workbench.operators.coverage import STATUSES, Coverage, OperatorResult, Roofline, Status
from workbench.operators.inventory import (
    CATEGORIES,
    Category,
    CollectiveUse,
    Inventory,
    OperatorUse,
    Phase,
    Workload,
    distinct_operators,
)
from workbench.operators.probe import measure_roofline, probe_operators
from workbench.operators.survey import OperatorSurvey, survey_operators

_LATE = {
    "record_pass": "workbench.operators.trace",
    "trace_inventory": "workbench.operators.trace",
    "trace_vision": "workbench.operators.trace",
}

__all__ = [
    "CATEGORIES",
    "STATUSES",
    "Category",
    "CollectiveUse",
    "Coverage",
    "Inventory",
    "OperatorResult",
    "OperatorSurvey",
    "OperatorUse",
    "Phase",
    "Roofline",
    "Status",
    "Workload",
    "distinct_operators",
    "measure_roofline",
    "probe_operators",
    "survey_operators",
    *sorted(_LATE),
]


def __getattr__(name: str) -> object:
    if name not in _LATE:
        raise AttributeError(f"module 'workbench.operators' has no attribute {name!r}")
    value = getattr(import_module(_LATE[name]), name)
    globals()[name] = value
    return value
