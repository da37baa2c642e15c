"""How fast it is: latencies from time stamps, as records."""

from workbench.profiling.latency import (
    LatencySummary,
    Percentiles,
    RequestTiming,
    append_records,
    read_records,
    summarise,
)

__all__ = ["LatencySummary", "Percentiles", "RequestTiming", "append_records", "read_records", "summarise"]
