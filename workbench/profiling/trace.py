"""A trace that Perfetto (ui.perfetto.dev) and chrome://tracing read: requests, steps, collectives, one time axis.

Written within a budget: where there is more than fits, the longest events stay, and the file says how many did not.
Operators and collectives of all ranks are on the clock of rank 0; requests have a clock of their own, which begins with
the first of them.
"""

from __future__ import annotations

import gzip
import heapq
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.profiling.communication import CollectiveTime
from workbench.profiling.deployed import DeploymentProfile
from workbench.profiling.latency import RequestTiming
from workbench.profiling.steps import Span

__all__ = ["MAX_BYTES", "TraceFile", "trace_events", "write_spans", "write_trace"]

MAX_BYTES = 64 << 20
REQUESTS = 1_000_000  # the process number that requests are shown under; ranks have their own
OPERATORS, DEVICE, COLLECTIVES = 1, 2, 3  # rows of a rank
Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceFile:
    path: Path
    num_events: int
    num_bytes: int  # before compression
    num_left_out: int


def trace_events(*, profile: DeploymentProfile | None = None, timings: Sequence[RequestTiming] = ()) -> Iterator[Event]:
    """Complete events ("X") in microseconds, and the names of their rows ("M")."""
    if profile is not None:
        starts = [began_s - profile.offsets.get(x.rank, 0.0) for x in profile.ranks for began_s, _ in x.spans]
        starts += [c.entered_s - profile.offsets.get(x.rank, 0.0) for x in profile.ranks for c in x.collectives]
        zero = min(starts, default=0.0)
        for rank in profile.ranks:
            shift = -profile.offsets.get(rank.rank, 0.0) - zero
            yield from _names(rank.rank, f"rank {rank.rank}", {1: "operators", 2: "device", 3: "collectives"})
            for began_s, span in rank.spans:
                yield _of_span(rank.rank, span, began_s + shift)
            yield from (_of_collective(rank.rank, each, shift) for each in rank.collectives)
    if timings:
        zero = min(timing.submitted_s for timing in timings)
        lanes = _lanes(timings)
        yield from _names(REQUESTS, "requests", {lane: f"lane {lane}" for lane in sorted(set(lanes))})
        for timing, lane in zip(timings, lanes, strict=True):
            yield from _of_request(timing, lane, zero)


def write_trace(
    path: Path | str,
    *,
    profile: DeploymentProfile | None = None,
    timings: Sequence[RequestTiming] = (),
    max_bytes: int = MAX_BYTES,
) -> TraceFile:
    """Write a trace; compressed where the name ends in .gz."""
    return _write(Path(path), trace_events(profile=profile, timings=timings), max_bytes)


def write_spans(path: Path | str, steps: Sequence[Sequence[Span]], *, max_bytes: int = MAX_BYTES) -> TraceFile:
    """Write the spans of steps that one process recorded, one step behind another."""

    def events() -> Iterator[Event]:
        yield from _names(0, "this process", {OPERATORS: "operators", DEVICE: "device"})
        at = 0.0
        for spans in steps:
            first = min((span.start_s for span in spans), default=0.0)
            for span in spans:
                yield _of_span(0, span, at - first)
            at += max((span.end_s for span in spans), default=0.0) - first

    return _write(Path(path), events(), max_bytes)


def _write(path: Path, events: Iterator[Event], max_bytes: int) -> TraceFile:
    names: list[str] = []
    kept: list[tuple[float, int, str]] = []  # a heap, shortest on top
    size, num_seen = 2048, 0
    for idx, event in enumerate(events):
        text = json.dumps(event, separators=(",", ":"))
        if event["ph"] == "M":
            names.append(text)
            size += len(text) + 2
            continue
        num_seen += 1
        heapq.heappush(kept, (event["dur"], idx, text))
        size += len(text) + 2
        while size > max_bytes and kept:
            size -= len(heapq.heappop(kept)[2]) + 2
    texts = [*names, *(text for _, _, text in sorted(kept, key=lambda item: item[1]))]
    left_out = num_seen - len(kept)
    facts = {"events left out (the shortest)": left_out, "cap in bytes": max_bytes}
    body = (
        '{"displayTimeUnit":"ms","otherData":' + json.dumps(facts) + ',"traceEvents":[\n' + ",\n".join(texts) + "\n]}\n"
    )
    data = body.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data, 6, mtime=0) if path.suffix == ".gz" else data)
    return TraceFile(path=path, num_events=len(kept), num_bytes=len(data), num_left_out=left_out)


def _names(pid: int, process: str, rows: dict[int, str]) -> Iterator[Event]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": process}}
    for row, name in rows.items():
        yield {"ph": "M", "pid": pid, "tid": row, "name": "thread_name", "args": {"name": name}}


def _complete(pid: int, tid: int, name: str, start_s: float, seconds: float, **args: object) -> Event:
    times = {"ts": round(start_s * 1e6, 3), "dur": round(max(0.0, seconds) * 1e6, 3)}
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, **times, **({"args": args} if args else {})}


def _of_span(rank: int, span: Span, shift_s: float) -> Event:
    shapes = {"shapes": str([list(shape) for shape in span.shapes])} if span.shapes else {}
    row = DEVICE if span.is_device else OPERATORS
    return _complete(rank, row, span.name, span.start_s + shift_s, span.seconds, **shapes)


def _of_collective(rank: int, each: CollectiveTime, shift_s: float) -> Event:
    wait = each.barrier_s or 0.0
    return _complete(
        rank,
        COLLECTIVES,
        f"{each.name} over {each.group}",
        each.entered_s - wait + shift_s,
        each.left_s - each.entered_s + wait,
        bytes=each.num_bytes,
        place=each.place,
    )


def _of_request(timing: RequestTiming, lane: int, zero_s: float) -> Iterator[Event]:
    name = timing.label or "request"
    start = timing.submitted_s - zero_s
    end = (timing.arrivals[-1][0] if timing.arrivals else timing.sent_s or timing.submitted_s) - zero_s
    yield _complete(
        REQUESTS,
        lane,
        name + (" (failed)" if timing.error else ""),
        start,
        end - start,
        tokens=timing.num_tokens,
        prompt_tokens=timing.num_prompt_tokens,
        error=timing.error,
        is_warm_up=timing.is_warm_up,
    )
    if timing.late_s:
        yield _complete(REQUESTS, lane, "due, not sent yet", start, timing.late_s)
    if timing.first_token_s is not None:
        begun = start + (timing.late_s or 0.0)
        yield _complete(REQUESTS, lane, "until the first token", begun, start + timing.first_token_s - begun)
        yield _complete(REQUESTS, lane, "tokens", start + timing.first_token_s, end - start - timing.first_token_s)


def _lanes(timings: Sequence[RequestTiming]) -> list[int]:
    """A row for each request, such that no two on one row overlap: a row is as a busy slot."""
    free: list[tuple[float, int]] = []  # (end of the last request, row)
    lanes = [0] * len(timings)
    for idx in sorted(range(len(timings)), key=lambda i: timings[i].submitted_s):
        timing = timings[idx]
        end = timing.arrivals[-1][0] if timing.arrivals else timing.submitted_s
        if free and free[0][0] <= timing.submitted_s:
            lane = heapq.heapreplace(free, (end, free[0][1]))[1]
        else:
            lane = len(free) + 1
            heapq.heappush(free, (end, lane))
        lanes[idx] = lane
    return lanes
