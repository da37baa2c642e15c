"""A span for each request, where OpenTelemetry is installed (`pip install 'day0-workbench[telemetry]'`) and set up.

Who sets it up is whoever runs the server (`opentelemetry-instrument workbench serve ...`, or a provider of a notebook's
own); without one the calls below do nothing. A span continues the trace that the client began (`traceparent`), and
holds what the log line holds: never what was asked or answered.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

try:
    from opentelemetry import propagate, trace
except ImportError:
    HAS_TELEMETRY = False
else:
    HAS_TELEMETRY = True

__all__ = ["HAS_TELEMETRY", "record_span"]


def record_span(
    name: str, headers: Iterable[tuple[bytes, bytes]], *, seconds: float, fields: Mapping[str, Any], is_failure: bool
) -> None:
    """A span that ends now and began `seconds` ago; `fields` become its attributes, lists as text."""
    if not HAS_TELEMETRY:
        return
    carrier = {key.decode("latin-1"): value.decode("latin-1") for key, value in headers}
    end_ns = time.time_ns()
    span = trace.get_tracer("workbench").start_span(
        name,
        context=propagate.extract(carrier),
        kind=trace.SpanKind.SERVER,
        start_time=end_ns - round(seconds * 1e9),
        attributes={
            f"workbench.{key}": value if isinstance(value, (bool, int, float, str)) else str(value)
            for key, value in fields.items()
            if value is not None
        },
    )
    if is_failure:
        span.set_status(trace.StatusCode.ERROR)
    span.end(end_time=end_ns)
