"""Times the operators of any torch model with torch's profiler, step by step and within a budget.

    ledger = profile_steps(model, lambda: model(batch), num_steps=3)

Each step is recorded on its own, and recording ends once `max_events` have been seen, so a long run costs no more
memory than a short one. Marks around the parts of the model say which part an operator belongs to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from workbench.base import RequestError
from workbench.nn.model import Model
from workbench.operators.instrument import instrument
from workbench.operators.inventory import OperatorUse
from workbench.operators.recorder import Recorder
from workbench.profiling.events import AREA, STEP, host_spans, read_step, spans_of
from workbench.profiling.steps import Span, StepLedger, merge_ledgers

__all__ = ["MAX_EVENTS", "Recording", "mark_areas", "profile_steps", "record_step", "record_work"]

MAX_EVENTS = 400_000
# Parts of models that are not ours, by the names of their classes; the first that fits.
CLASS_AREAS = (
    (re.compile(r"vision|visual|vit\b", re.IGNORECASE), "vision"),
    (re.compile(r"norm", re.IGNORECASE), "norm"),
    (re.compile(r"delta|mamba|kda|recurr|rwkv|linearattention|ssm", re.IGNORECASE), "linear_attention"),
    (re.compile(r"attention|attn|mla\b", re.IGNORECASE), "attention"),
    (re.compile(r"router|gate$|gating", re.IGNORECASE), "routing"),
    (re.compile(r"experts", re.IGNORECASE), "experts"),
    (re.compile(r"shortconv|conv1d", re.IGNORECASE), "conv"),
)


class Recording:
    """The events of one step, taken down but not read yet: reading is slow and need not hold up what is measured."""

    def __init__(self, profiler: profile, clock: str) -> None:
        self._profiler, self.clock = profiler, clock

    def read(self) -> tuple[StepLedger, list[Span]]:
        results = self._profiler.profiler.kineto_results if self._profiler.profiler is not None else None
        if self.clock == "host" and results is not None:
            spans = host_spans(results)
        else:
            spans = spans_of(self._profiler.events() or ())
        return read_step(spans, clock=self.clock), spans


class _Marker:
    """Stands in for the recorder of operators where only the marks are wanted."""

    def __init__(self) -> None:
        self.memo, self.peak, self.live, self.area = None, 0, 0, ""

    @contextmanager
    def within(self, *, label: str | None = None, area: str | None = None) -> Iterator[None]:
        before = self.area
        if area is None or before in ("vision", "dequantise", area):
            yield
            return
        self.area = area
        try:
            with record_function(AREA + area):
                yield
        finally:
            self.area = before


@contextmanager
def mark_areas(model: nn.Module) -> Iterator[None]:
    """While open, every pass of `model` marks its parts for the profiler. Models of other makers by class name."""
    if isinstance(model, Model):
        with instrument(model, cast(Recorder, _Marker())):
            yield
        return
    with ExitStack() as stack:
        for module in model.modules():
            name = type(module).__name__
            area = next((area for pattern, area in CLASS_AREAS if pattern.search(name)), None)
            if area is not None:
                stack.enter_context(_marked(module, area))
        yield


@contextmanager
def _marked(module: nn.Module, area: str) -> Iterator[None]:
    marks: list[Any] = []

    def enter(*_: object) -> None:
        mark = record_function(AREA + area)
        mark.__enter__()
        marks.append(mark)

    def leave(*_: object) -> None:
        marks.pop().__exit__(None, None, None)

    handles = [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def record_step(step: Callable[[], Any], device: torch.device) -> tuple[Recording, Any]:
    """Run `step` once under the profiler; what it returned comes second."""
    is_host = device.type == "cpu"
    activities = [ProfilerActivity.CPU, *([] if is_host else _device_activities(device))]
    # With `acc_events` the profiler would read its events when it ends, while the caller waits: seconds a step.
    with profile(activities=activities, record_shapes=True) as profiler, record_function(STEP):
        value = step()
        if not is_host:
            torch.accelerator.synchronize(device)  # the step ends when its last kernel has
    return Recording(profiler, "host" if is_host else device.type), value


def profile_steps(
    model: nn.Module,
    step: Callable[[], object],
    *,
    num_steps: int = 3,
    num_warm_up: int = 1,
    max_events: int = MAX_EVENTS,
    device: torch.device | None = None,
    on_spans: Callable[[Sequence[Span]], None] | None = None,
) -> StepLedger:
    """Time the operators of `num_steps` calls of `step`, which runs `model`, after `num_warm_up` that are not timed.

    Ends early once `max_events` have been seen; the ledger says how many steps it covers. `on_spans` gets the events of
    each step, for a trace. Raises RequestError for counts below one.
    """
    if num_steps < 1 or max_events < 1 or num_warm_up < 0:
        raise RequestError("nothing to profile", found=f"{num_steps} steps, {max_events} events")
    if device is None:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
    for _ in range(num_warm_up):
        step()
    ledgers: list[StepLedger] = []
    with mark_areas(model):
        while len(ledgers) < num_steps and sum(x.num_events for x in ledgers) < max_events:
            ledger, spans = record_step(step, device)[0].read()
            ledgers.append(ledger)
            if on_spans is not None:
                on_spans(spans)
    return merge_ledgers(ledgers)


def record_work(model: nn.Module, step: Callable[[], Any]) -> tuple[tuple[OperatorUse, ...], int, Any]:
    """FLOPs and bytes of every operator of one call of `step`, the most bytes that its tensors took at one time, and
    what it returned. Slow: every operator goes through Python."""
    recorder = Recorder(model)
    with ExitStack() as stack:
        if isinstance(model, Model):
            stack.enter_context(instrument(model, recorder))
        stack.enter_context(recorder)
        value = step()
    return recorder.operators(), recorder.peak, value


def _device_activities(device: torch.device) -> list[ProfilerActivity]:
    """The profiler's activity of an accelerator: that of its own name, else the one for backends it does not know."""
    activity = getattr(ProfilerActivity, device.type.upper(), None) or getattr(ProfilerActivity, "PrivateUse1", None)
    return [activity] if activity is not None else []
