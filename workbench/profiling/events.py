"""From the events of torch's profiler to a ledger of one step. Arithmetic on intervals; no profiler is started here."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from workbench.operators.work import categorise
from workbench.profiling.steps import OperatorTime, Span, StepLedger

__all__ = ["AREA", "COLLECTIVE", "STEP", "host_spans", "read_step", "spans_of"]

STEP, AREA, COLLECTIVE = "workbench::step", "workbench::area ", "workbench::collective "
NATIVE = "native"  # our own kernels, each under the name of the operator whose work it does (`nn.native`)
MAX_KINDS = 4000  # operators by name, part and shapes that a ledger holds; the rest is added up by category
# One operator whatever the device makes of it, so that its parts do not look like something else.
WHOLE = ("aten::scaled_dot_product_attention",)
COLLECTIVE_HOST = (
    COLLECTIVE,
    "c10d::",
    "_c10d_functional::",
    "gloo:",
    "nccl:",
    "mccl:",
    "hccl:",
    "xccl:",
    "record_param_comms",
)
COLLECTIVE_KERNEL = ("nccl", "mccl", "hccl", "xccl", "hcom", "alltoall", "allreduce", "allgather")
# What the profiler notes of itself and of autograd's bookkeeping; its own list of events leaves it out as well.
NOT_OPERATORS = ("profiler::_record_function", "[memory]", "[OutOfMemory]")
BOOKKEEPING = ("aten::is_leaf", "aten::output_nr", "aten::_version")
Interval = tuple[float, float]


def host_spans(results: Any) -> list[Span]:
    """As `spans_of`, for a step without a device, from the profiler's raw results.

    The profiler's own list costs seconds for a step of some thousand operators, most of it for what no ledger reads.
    """
    begin_ns, events = results.trace_start_ns(), results.events()
    threads = {event.start_thread_id() for event in events if event.name() == STEP}
    spans = []
    for event in events:
        name = event.name()
        if event.start_thread_id() not in threads or name in BOOKKEEPING or name.startswith(NOT_OPERATORS):
            continue
        shapes = tuple(tuple(shape) for shape in event.shapes() if shape and _is_shape(shape))
        start_ns = event.start_ns()
        start_s = (start_ns - begin_ns) / 1e9
        spans.append(Span(name, start_s, start_s + event.duration_ns() / 1e9, shapes))
    return spans


def spans_of(events: Iterable[Any]) -> list[Span]:
    """The spans of `profile.events()` that belong to a step: those of the thread that ran it, and the device's."""
    events = list(events)
    threads = {event.thread for event in events if event.name == STEP}
    spans = []
    for event in events:
        is_device = event.device_type != torch.autograd.DeviceType.CPU
        if not is_device and event.thread not in threads:
            continue
        shapes = tuple(tuple(shape) for shape in event.input_shapes or () if shape and _is_shape(shape))
        kernels = tuple((kernel.name, kernel.duration / 1e6) for kernel in event.kernels or ())
        spans.append(
            Span(event.name, event.time_range.start / 1e6, event.time_range.end / 1e6, shapes, is_device, kernels)
        )
    return spans


def read_step(spans: Sequence[Span], *, clock: str = "host") -> StepLedger:
    """The ledger of the steps that are marked in the spans. Raises ValueError where none is.

    With `clock` other than "host" the time of operators is that of the kernels they launched, and the gap is when the
    device had nothing to do.
    """
    host = sorted((span for span in spans if not span.is_device), key=lambda span: (span.start_s, -span.end_s))
    steps = [span for span in host if span.name == STEP]
    if not steps:
        raise ValueError("no step is marked in these events")
    kinds: dict[tuple[Any, ...], list[float]] = {}
    communication, gap = 0.0, 0.0
    for frame in _frames(host):
        span, own_s, area = frame
        if span.name == STEP or span.name.startswith(AREA):
            gap += own_s
        elif _is_collective(span.name):
            communication += own_s
        else:
            key = (span.name, _category(span.name, area), area, span.shapes)
            seconds = own_s if clock == "host" else sum(s for name, s in span.kernels if not _is_comm_kernel(name))
            found = kinds.setdefault(key, [0, 0.0])
            found[0] += 1
            found[1] += seconds
    overlap = hidden = 0.0
    whole = sum(step.seconds for step in steps)
    if clock != "host":
        kernels = [span for span in spans if span.is_device and _is_within(span, steps)]
        comm = _union([(k.start_s, k.end_s) for k in kernels if _is_comm_kernel(k.name)])
        compute = _union([(k.start_s, k.end_s) for k in kernels if not _is_comm_kernel(k.name)])
        busy = _length(_union([*comm, *compute]))
        communication = sum(k.seconds for k in kernels if _is_comm_kernel(k.name))
        hidden = _length(comm) + _length(compute) - busy
        overlap = sum(k.seconds for k in kernels) - busy
        gap = whole - busy
        # Kernels of operators that no host event launched (a graph replay) still took their time.
        unclaimed = sum(k.seconds for k in kernels) - communication - sum(seconds for _, seconds in kinds.values())
        if abs(unclaimed) > 1e-9:
            kinds[("kernels without an operator", "elementwise", "", ())] = [len(kernels), unclaimed]
    operators, left_out = _capped(kinds)
    return StepLedger(
        operators=operators,
        num_steps=len(steps),
        seconds=whole,
        communication_s=communication,
        gap_s=gap,
        overlap_s=overlap,
        hidden_communication_s=hidden,
        clock=clock,
        num_events=len(spans),
        num_left_out=left_out,
    )


def _frames(host: Sequence[Span]) -> list[tuple[Span, float, str]]:
    """(span, seconds of its own, area) of every span inside a step; parts of a whole belong to it."""
    done: list[tuple[Span, float, str]] = []
    stack: list[tuple[Span, list[float], str]] = []  # with the seconds that are left of its own

    def pop() -> None:
        span, own, area = stack.pop()
        done.append((span, max(0.0, own[0]), area))

    for span in host:
        while stack and span.start_s >= stack[-1][0].end_s:
            pop()
        if not stack and span.name != STEP:
            continue
        if stack and _is_whole(stack[-1][0].name):
            continue
        if stack:
            stack[-1][1][0] -= min(span.end_s, stack[-1][0].end_s) - span.start_s
        area = stack[-1][2] if stack else ""
        if span.name.startswith(AREA):
            area = span.name.removeprefix(AREA)
        stack.append((span, [span.seconds], area))
    while stack:
        pop()
    return done


def _is_whole(name: str) -> bool:
    return name in WHOLE or _is_collective(name)


def _is_collective(name: str) -> bool:
    return name.startswith(COLLECTIVE_HOST)


def _is_comm_kernel(name: str) -> bool:
    lowered = name.lower().replace("_", "")
    return any(word in lowered for word in COLLECTIVE_KERNEL)


def _is_within(span: Span, steps: Sequence[Span]) -> bool:
    return any(step.start_s <= span.start_s < step.end_s for step in steps)


def _is_shape(shape: Any) -> bool:
    return all(isinstance(size, int) for size in shape)


@functools.lru_cache(maxsize=4096)
def _category(name: str, area: str) -> str:
    """As the inventory of operators has it, so that what was planned and what was measured stand side by side."""
    namespace, _, base = name.partition("::")
    if namespace == NATIVE:
        if base == "experts":
            return "grouped_gemm"
        namespace = "aten"
    packet = getattr(getattr(torch.ops, namespace, None), base, None) if base else None
    overloads = packet.overloads() if packet is not None and hasattr(packet, "overloads") else []
    if not overloads:
        return "other"
    return categorise(getattr(packet, overloads[0]), area)


def _capped(kinds: dict[tuple[Any, ...], list[float]]) -> tuple[tuple[OperatorTime, ...], int]:
    """The costliest kinds one by one, the rest of each category together: no time is lost to the cap."""
    ordered = sorted(kinds.items(), key=lambda item: -item[1][1])
    kept = [
        OperatorTime(name=name, category=category, area=area, shapes=shapes, count=int(count), seconds=seconds)
        for (name, category, area, shapes), (count, seconds) in ordered[:MAX_KINDS]
    ]
    rest: dict[str, list[float]] = {}
    for (_, category, _, _), (count, seconds) in ordered[MAX_KINDS:]:
        found = rest.setdefault(category, [0, 0.0])
        found[0] += count
        found[1] += seconds
    kept += [
        OperatorTime(name="others", category=category, area="", shapes=(), count=int(count), seconds=seconds)
        for category, (count, seconds) in rest.items()
    ]
    return tuple(kept), len(ordered[MAX_KINDS:])


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
