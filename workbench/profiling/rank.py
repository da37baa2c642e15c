"""What the ranks of a deployment do to be profiled: called on each of them through `Deployment.call`.

`start` hooks into a rank's runner and its collectives; steps go on as before, every so many of them recorded. Events of
a recorded step are read in a thread beside the ones that follow, and no step is recorded while one is being read: the
rank keeps answering, and holds the events of one step at most. `stop` takes the hooks out and hands over plain data.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from workbench.base import DeploymentError
from workbench.deployment.commands import RankCommands
from workbench.operators.inventory import OperatorUse
from workbench.parallel.collectives import CollectiveRecord, Group
from workbench.profiling.clocks import ClockReading
from workbench.profiling.communication import POINT_TO_POINT, CollectiveTime
from workbench.profiling.events import COLLECTIVE
from workbench.profiling.operators import Recording, mark_areas, record_step, record_work
from workbench.profiling.rank_profile import ProfileOptions, RankProfile
from workbench.profiling.router_counts import RouterCounts
from workbench.profiling.steps import Span, StepLedger, merge_ledgers

__all__ = ["delay", "read_clock", "start", "stop"]

KEY = "profile"
BOOT = Path("/proc/sys/kernel/random/boot_id")


def read_clock(_: RankCommands) -> ClockReading:
    boot = BOOT.read_text().strip() if BOOT.exists() else ""
    return ClockReading(boot=boot, shown_s=time.monotonic())


def start(commands: RankCommands, **options: Any) -> None:
    """Raises DeploymentError where a profile is under way."""
    if KEY in commands.extensions:
        raise DeploymentError("this rank is being profiled already", next_step="End the other profile first")
    profiler = _RankProfiler(commands, ProfileOptions(**options))
    profiler.hook()
    commands.extensions[KEY] = profiler


def stop(commands: RankCommands) -> RankProfile:
    """Raises DeploymentError where no profile is under way."""
    profiler = commands.extensions.pop(KEY, None)
    if not isinstance(profiler, _RankProfiler):
        raise DeploymentError("this rank is not being profiled", next_step="Call start first")
    return profiler.finish()


@dataclass(slots=True)
class _Times:
    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds

    @property
    def mean(self) -> float:
        return self.seconds / self.count if self.count else 0.0


@dataclass(eq=False)
class _RankProfiler:
    commands: RankCommands
    options: ProfileOptions
    started_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        loaded = self.commands.loaded
        self.ctx, self.model, self.runner = loaded.ctx, loaded.model, self.commands.runner
        self.rank = self.ctx.rank
        self.ledgers: list[StepLedger] = []
        self.uses: tuple[OperatorUse, ...] = ()
        self.spans: list[tuple[float, Span]] = []
        self.collectives: list[CollectiveTime] = []
        self.num_left_out = 0
        self.peak_bytes = 0
        self.problem = ""
        self.num_steps = 0
        self.plain, self.recorded = _Times(), _Times()
        self.read_s = 0.0  # of the processor, in the thread that reads
        self.experts: RouterCounts | None = None
        self._entered, self._is_timed, self._is_recording = 0.0, True, False
        self._barrier: float | None = None
        self._mark: torch.profiler.record_function | None = None
        self._places: Counter[tuple[str, str]] = Counter()
        self._reader: threading.Thread | None = None
        self._undo: list[Callable[[], object]] = []

    def hook(self) -> None:
        log = self.ctx.log
        self._outer = log.listener
        log.listener, log.finished = self._entering, self._left
        self._undo.append(self._unhook_log)
        inner = self.runner.step
        self.runner.step = lambda steps: self._step(lambda: inner(steps))  # type: ignore[method-assign]
        self._undo.append(lambda: vars(self.runner).pop("step"))
        if self.ctx.coords.tp == 0:  # the other ranks of the group route the same tokens
            self.experts = RouterCounts(self.model)
            self._undo.append(self.experts.close)

    def _unhook_log(self) -> None:
        self.ctx.log.listener, self.ctx.log.finished = self._outer, None

    def finish(self) -> RankProfile:
        for undo in reversed(self._undo):
            undo()
        seconds = time.monotonic() - self.started_s
        if self._reader is not None:
            self._reader.join()
        ledger = merge_ledgers(self.ledgers) if self.ledgers else None
        return RankProfile(
            rank=self.rank,
            seconds=seconds,
            ledger=None if ledger is None else replace(ledger, memory=self._memory()),
            uses=self.uses,
            collectives=tuple(self.collectives),
            num_collectives_left_out=self.num_left_out,
            expert_counts={} if self.experts is None else self.experts.read(),
            spans=tuple(self.spans),
            num_plain=self.plain.count,
            plain_step_s=self.plain.mean,
            num_recorded=self.recorded.count,
            recorded_step_s=self.recorded.mean,
            read_s=self.read_s,
            problem=self.problem,
        )

    # steps

    def _step(self, step: Callable[[], Any]) -> Any:
        number, self.num_steps = self.num_steps, self.num_steps + 1
        if self.options.with_work and number == 0:
            self._is_timed = False  # this step is far from how long it takes
            try:
                self.uses, self.peak_bytes, value = record_work(self.model, step)
            finally:
                self._is_timed = True
            return value
        is_due = (number - self.options.with_work) % self.options.every == 0
        if not is_due or not self._has_room():
            began = time.monotonic()
            value = step()
            self.plain.add(time.monotonic() - began)
            return value
        began = time.monotonic()
        self._is_recording = True
        try:
            with mark_areas(self.model):
                recording, value = record_step(step, self.ctx.device)
        finally:
            self._is_recording = False
        self.recorded.add(time.monotonic() - began)
        self._reader = threading.Thread(target=self._read, args=(recording, began), name="profile", daemon=True)
        self._reader.start()
        return value

    def _has_room(self) -> bool:
        if self._reader is not None and self._reader.is_alive():
            return False
        num_events = sum(ledger.num_events for ledger in self.ledgers)
        if self.options.budget is not None and self.recorded.count:
            # By chance recorded steps may have been the quicker ones; that pays for no reading.
            added = max(0.0, self.recorded.seconds - self.recorded.count * self.plain.mean) + self.read_s
            with_one_more = added * (1 + 1 / self.recorded.count)
            if with_one_more > self.options.budget * (self.plain.seconds + self.recorded.count * self.plain.mean):
                return False
        return self.recorded.count < self.options.max_steps and num_events < self.options.max_events

    def _read(self, recording: Recording, began_s: float) -> None:
        began_cpu_s = time.thread_time()
        try:
            ledger, spans = recording.read()
        except Exception as error:  # the rank goes on; the profile says what it lacks
            self.problem = f"a step could not be read: {type(error).__name__}: {error}"
            return
        finally:
            self.read_s += time.thread_time() - began_cpu_s
        self.ledgers.append(ledger)
        first = min((span.start_s for span in spans), default=0.0)
        self.spans += [(began_s - first, span) for span in spans]
        self.spans.sort(key=lambda item: -item[1].seconds)
        del self.spans[self.options.max_spans :]

    # collectives

    def _entering(self, record: CollectiveRecord) -> None:
        if self._outer is not None:
            self._outer(record)
        if self._is_recording:
            # The profiler sees an operation being handed to its backend, not the wait for its end.
            self._mark = torch.profiler.record_function(COLLECTIVE + record.name)
            self._mark.__enter__()
        if self.options.barriers and record.name not in POINT_TO_POINT:
            self._synchronise()
            began = time.monotonic()
            dist.barrier(group=self._group(record).handle)
            self._barrier = time.monotonic() - began
        self._entered = time.monotonic()

    def _left(self, record: CollectiveRecord) -> None:
        if self.options.barriers:
            self._synchronise()
        left_s = time.monotonic()
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
            self._mark = None
        place = self._places[record.group, record.name]
        self._places[record.group, record.name] += 1
        if not self._is_timed:
            return
        if len(self.collectives) >= self.options.max_collectives:
            self.num_left_out += 1
            return
        self.collectives.append(
            CollectiveTime(
                name=record.name,
                group=record.group,
                ranks=record.ranks,
                place=place,
                num_bytes=record.num_bytes,
                entered_s=self._entered,
                left_s=left_s,
                barrier_s=self._barrier,
            )
        )
        self._barrier = None

    def _group(self, record: CollectiveRecord) -> Group:
        group: Group = getattr(self.ctx, record.group)
        return group

    def _synchronise(self) -> None:
        if self.ctx.device.type != "cpu":
            torch.accelerator.synchronize(self.ctx.device)

    # memory

    def _memory(self) -> tuple[tuple[str, int], ...]:
        weights = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in self.model.parameters()}
        held = {
            "weights": sum(weights.values()),
            "cache": self.runner.cache.num_bytes,
            "image features": sum(x.numel() * x.element_size() for x in self.runner.features.values()),
        }
        if self.options.with_work:
            held["activations, at the peak of the first step"] = self.peak_bytes
        if self.ctx.device.type != "cpu":
            held["allocated on the device, peak"] = torch.accelerator.max_memory_allocated(self.ctx.device)
        return tuple(held.items())


def delay(commands: RankCommands, *, rank: int, seconds: float) -> None:
    """Plant a fault: `rank` sleeps before every collective that it enters; 0 seconds take the fault out again."""
    undo = commands.extensions.pop("delay", None)
    if callable(undo):
        undo()
    if not seconds or commands.loaded.ctx.rank != rank:
        return
    log = commands.loaded.ctx.log
    outer = log.listener

    def entering(record: CollectiveRecord) -> None:
        time.sleep(seconds)
        if outer is not None:
            outer(record)

    log.listener = entering
    commands.extensions["delay"] = partial(setattr, log, "listener", outer)
