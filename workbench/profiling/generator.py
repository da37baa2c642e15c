"""Sends a planned load to a target and takes down every request.

In an open loop the latency of a request counts from when it was due. A sender that waits for a slow answer before it
sends the next would otherwise leave out exactly the requests that suffered (coordinated omission); here they leave
late, and their lateness is part of their latency and shown on its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from workbench.base import Cell, Table, human
from workbench.profiling.goodput import Goodput, Slo, measure_goodput
from workbench.profiling.latency import LatencySummary, RequestTiming, summarise
from workbench.profiling.load import ClosedLoop, Load, LoadPlan, PlannedRequest
from workbench.profiling.targets import Target

__all__ = ["LoadReport", "Progress", "generate_load"]

MAX_IN_FLIGHT = 256  # open loop: senders; one that is due beyond them leaves late
MAX_SAMPLES = 10_000  # requests whose own figures go into the record

Progress = Callable[[RequestTiming], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What came of a load. `started_s` is the start of the measured part, on the clock of the timings.

    Warm-up is kept request by request: the first of it shows what a start costs its first user.
    """

    load: Load
    warm_up: tuple[RequestTiming, ...] = field(repr=False)
    timings: tuple[RequestTiming, ...] = field(repr=False)
    started_s: float
    goodput: Goodput | None = None
    conditions: str = ""

    @property
    def seconds(self) -> float:
        """From the start of the measured part to the last arrival."""
        return max((t.arrivals[-1][0] for t in self.timings if t.arrivals), default=self.started_s) - self.started_s

    @property
    def summary(self) -> LatencySummary:
        return summarise(self.timings, conditions=self.conditions)

    @property
    def errors(self) -> dict[str, int]:
        """Failed requests by their error."""
        found: dict[str, int] = {}
        for timing in self.timings:
            if timing.error:
                found[timing.error] = found.get(timing.error, 0) + 1
        return found

    @property
    def answered_per_s(self) -> float | None:
        num = sum(not timing.error for timing in self.timings)
        return num / self.seconds if self.seconds > 0 else None

    def by_kind(self) -> dict[str, LatencySummary]:
        """Where the load is a mix: figures of each kind alone."""
        labels = dict.fromkeys(timing.label for timing in self.timings)
        return {label: summarise([t for t in self.timings if t.label == label]) for label in labels}

    def to_json(self) -> dict[str, Any]:
        return {
            "load": self.load.to_json(),
            "seconds": self.seconds,
            "answered_per_s": self.answered_per_s,
            "summary": self.summary.to_json(),
            "by_kind": {label: summary.to_json() for label, summary in self.by_kind().items()},
            "warm_up": [timing.to_json() for timing in self.warm_up],
            "goodput": None if self.goodput is None else self.goodput.to_json(),
            "errors": self.errors,
            "requests": [timing.to_json() for timing in self.timings[:MAX_SAMPLES]],
        }

    def tables(self) -> tuple[Table, ...]:
        summary = self.summary
        latencies = replace(summary.table(), title=str(self.load))
        tables = [latencies]
        if len(self.by_kind()) > 1:
            tables.append(self._kinds())
        if self.warm_up:
            rows: list[tuple[Cell, ...]] = [
                (idx, _seconds(t.first_token_s), _seconds(t.end_to_end_s), t.error or "answered")
                for idx, t in enumerate(self.warm_up, start=1)
            ]
            columns = ("warm-up", "first token", "end to end", "outcome")
            tables.append(Table(columns=columns, rows=tuple(rows), note="warm-up is in no other figure"))
        if self.goodput is not None:
            tables.append(self.goodput.table())
        if self.errors:
            tables.append(Table(columns=("error", "requests"), rows=tuple(self.errors.items())))
        return tuple(tables)

    def render(self) -> str:
        return "\n\n".join(table.render() for table in self.tables())

    def _repr_html_(self) -> str:
        return "".join(table.to_html() for table in self.tables())

    def _kinds(self) -> Table:
        rows: list[tuple[Cell, ...]] = []
        for label, each in self.by_kind().items():
            first, token, end = each.first_token_s, each.per_token_s, each.end_to_end_s
            medians = (_seconds(x.p50 if x is not None else None) for x in (first, token, end))
            rows.append((label, each.num_requests, each.num_failed, *medians))
        columns = ("kind", "requests", "failed", "first token p50", "per token p50", "end to end p50")
        return Table(columns=columns, rows=tuple(rows))


def generate_load(
    target: Target,
    plan: LoadPlan,
    *,
    slo: Slo | None = None,
    on_request: Progress | None = None,
    conditions: str = "",
    max_in_flight: int = MAX_IN_FLIGHT,
    sleep: Callable[[float], None] = time.sleep,
    executor: Callable[[int], Executor] = ThreadPoolExecutor,
) -> LoadReport:
    """Send all of a plan and wait for the last answer. `on_request` hears of each request as it ends, in some thread.

    `sleep` and `executor` are for tests, which have clocks of their own. An interrupt ends the sending and is raised
    once the requests under way have ended.
    """
    tell = _serial(on_request)
    warm_up = tuple(_ask(target, planned, None, tell, is_warm_up=True) for planned in plan.warm_up)
    started_s = target.clock()
    if isinstance(plan.load.arrivals, ClosedLoop):
        timings = _closed(target, plan.requests, plan.load.arrivals.concurrency, tell, executor)
    else:
        timings = _open(target, plan.requests, started_s, tell, max_in_flight, sleep, executor)
    report = LoadReport(load=plan.load, warm_up=warm_up, timings=timings, started_s=started_s, conditions=conditions)
    if slo is None or not slo.limits:
        return report
    return replace(report, goodput=measure_goodput(timings, slo, seconds=report.seconds))


def _open(
    target: Target,
    requests: Sequence[PlannedRequest],
    started_s: float,
    tell: Progress,
    max_in_flight: int,
    sleep: Callable[[float], None],
    executor: Callable[[int], Executor],
) -> tuple[RequestTiming, ...]:
    futures = []
    with executor(min(max_in_flight, len(requests))) as pool:
        try:
            for planned in requests:
                assert planned.due_s is not None
                due_s = started_s + planned.due_s
                while (left := due_s - target.clock()) > 0:
                    sleep(left)
                futures.append(pool.submit(_ask, target, planned, due_s, tell))
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
        return tuple(future.result() for future in futures)


def _closed(
    target: Target,
    requests: Sequence[PlannedRequest],
    concurrency: int,
    tell: Progress,
    executor: Callable[[int], Executor],
) -> tuple[RequestTiming, ...]:
    with executor(min(concurrency, len(requests))) as pool:
        futures = [pool.submit(_ask, target, planned, None, tell) for planned in requests]
        try:
            return tuple(future.result() for future in futures)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _ask(
    target: Target, planned: PlannedRequest, due_s: float | None, tell: Progress, *, is_warm_up: bool = False
) -> RequestTiming:
    timing = target.ask(planned.question)
    if due_s is not None:
        timing = replace(timing, submitted_s=due_s, sent_s=timing.submitted_s)
    timing = replace(timing, is_warm_up=is_warm_up)
    tell(timing)
    return timing


def _serial(on_request: Progress | None) -> Progress:
    lock = threading.Lock()

    def tell(timing: RequestTiming) -> None:
        if on_request is not None:
            with lock:
                on_request(timing)

    return tell


def _seconds(value: float | None) -> str | None:
    return None if value is None else human(value, "s")
