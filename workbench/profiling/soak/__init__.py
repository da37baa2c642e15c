"""Does it hold: many users at once for a long time, and afterwards every answer right and everything given back."""

from workbench.profiling.soak.memory import MemoryTrend, memory_trend
from workbench.profiling.soak.questions import SoakQuestion, SoakSettings
from workbench.profiling.soak.record import Outage, SoakCheck, SoakRecord
from workbench.profiling.soak.run import Subject, soak

__all__ = [
    "MemoryTrend",
    "Outage",
    "SoakCheck",
    "SoakQuestion",
    "SoakRecord",
    "SoakSettings",
    "Subject",
    "memory_trend",
    "soak",
]
