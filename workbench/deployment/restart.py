"""A deployment that is replaced when it breaks: same layout, same options, at most so many times, pauses between.

What the old ranks held is gone with them, so whoever drives this begins with empty slots; the engine does.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from workbench.base import DeploymentError, WorkbenchError
from workbench.deployment.handle import Deployment, check_start
from workbench.deployment.records import LoadProgress, Phase
from workbench.deployment.spare import Spare
from workbench.deployment.started import StartedRanks, Timeouts
from workbench.placement import Layout
from workbench.serving.steps import EncodeImage, RunnerInfo, SampledToken, StepInput
from workbench.spec import ModelSpec

__all__ = ["RestartEvent", "RestartPolicy", "RestartingDeployment"]

OnProgress = Callable[[LoadProgress], None]
EventKind = Literal["broken", "restarted", "restart failed", "given up"]
LOOK_S = 0.1  # how often a pause looks whether it is still wanted


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartPolicy:
    """At most `max_restarts` within the last `window_s` seconds. The n-th of them waits `backoff_s` * 2^(n-1) before,
    but never more than `max_backoff_s`."""

    max_restarts: int = 3
    window_s: float = 600.0
    backoff_s: float = 1.0
    max_backoff_s: float = 30.0

    def backoff_of(self, number: int) -> float:
        """Seconds before restart `number` of a window, from 1."""
        return float(min(self.max_backoff_s, self.backoff_s * 2 ** (number - 1)))


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartEvent:
    """What happened, `attempt` restarts into the window. `error` says why the ranks broke or a restart failed;
    `seconds` is what a restart took, without the pause before it. `phases` of a restart: "ending the old ranks" and
    "pause", then "ranks report" (or "spare ranks", where some waited), then those of the slowest rank, as
    `Deployment.phases`; the ranks' first one, "package", lies within "ranks report"."""

    kind: EventKind
    attempt: int
    seconds: float = 0.0
    error: WorkbenchError | None = None
    phases: Mapping[str, Phase] = field(default_factory=dict)


class RestartingDeployment:
    """Drives like the deployment that it holds now, which is `current`.

        with RestartingDeployment.start("path/to/checkpoint", Layout(tp=2), num_slots=8) as deployment:
            service = open_service(deployment, "path/to/checkpoint")

    Nothing is replayed: requests in flight fail with the error that names the rank. `recover` starts the ranks again,
    in the thread that calls it. `make` loads a deployment onto ranks that `begin` has started, or onto its own where
    there is no `begin`, and tells its argument how loading goes on. With `has_spare` the ranks of the next start are
    there before they are needed, their libraries loaded and no model: a restart is then little more than loading.
    """

    def __init__(
        self,
        make: Callable[..., Deployment],
        *,
        begin: Callable[[], StartedRanks] | None = None,
        has_spare: bool = False,
        policy: RestartPolicy | None = None,
        on_event: Callable[[RestartEvent], None] | None = None,
        on_progress: OnProgress | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy = policy or RestartPolicy()
        self.num_restarts = 0
        self._make, self._on_event, self._on_progress = make, on_event, on_progress
        self._clock = clock
        self._attempts: deque[float] = deque()  # when restarts began, within the window
        self._closing = threading.Event()
        self._begin = begin
        self._spare = Spare(begin) if begin is not None and has_spare else None
        self.current = self._started(on_progress or (lambda _progress: None), {})

    @classmethod
    def start(
        cls,
        model_path: Path | str,
        layout: Layout | None = None,
        *,
        policy: RestartPolicy | None = None,
        on_event: Callable[[RestartEvent], None] | None = None,
        on_progress: OnProgress | None = None,
        has_spare: bool = False,
        timeouts: Timeouts | None = None,
        threads: int | None = None,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> RestartingDeployment:
        """As `Deployment.start`, whose options these are. `on_event` is called in the thread that recovers."""
        check_start(model_path, layout, **options)

        def begin() -> StartedRanks:
            return StartedRanks.start(layout or Layout(), timeouts=timeouts, threads=threads, env=env)

        def make(progress: OnProgress, started: StartedRanks) -> Deployment:
            return Deployment.start(
                model_path, layout, on_progress=progress, timeouts=timeouts, started=started, **options
            )

        return cls(make, begin=begin, has_spare=has_spare, policy=policy, on_event=on_event, on_progress=on_progress)

    def recover(self, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """End what is left of the ranks and start them again.

        Raises DeploymentError where the policy allows no further restart, from the last error; and where `is_wanted`
        says no or `close` is called, which is noticed in pauses and at each sign of progress of loading.
        """
        self._check_wanted(is_wanted)
        reason = self.failure
        self._tell("broken", error=reason)
        phases: dict[str, Phase] = {}
        began = self._clock()
        self.current.close()
        phases["ending the old ranks"] = self._here(began)
        while True:
            self._count_restart(reason)
            began = self._clock()
            self._pause(self.policy.backoff_of(len(self._attempts)), is_wanted)
            phases["pause"] = self._here(began)
            began = self._clock()
            try:
                self.current = self._started(self._progress(is_wanted), phases)
            except _UnwantedError:
                raise DeploymentError("the restart was called off") from reason
            except WorkbenchError as error:
                reason = error
                self._tell("restart failed", error=error, seconds=self._clock() - began)
                continue
            if self._closing.is_set():
                self.current.close()
            self._check_wanted(is_wanted)
            self.num_restarts += 1
            self._tell("restarted", seconds=self._clock() - began, phases=phases)
            return

    def _started(self, progress: OnProgress, phases: dict[str, Phase]) -> Deployment:
        """A deployment on ranks that waited, or on new ones; `phases` gets what it took."""
        if self._begin is None:
            return self._make(progress)
        began = self._clock()
        spare = self._spare.take() if self._spare is not None else None
        started = spare or self._begin()
        phases["ranks report" if spare is None else "spare ranks"] = self._here(began)
        deployment = self._make(progress, started)
        phases.update(deployment.phases)
        if self._spare is not None and not self._closing.is_set():
            self._spare.prepare()
        return deployment

    def _here(self, began: float) -> Phase:
        """A phase that ends now, spent in waiting as far as this process goes."""
        return Phase(seconds=self._clock() - began, processor_s=0.0)

    def _count_restart(self, reason: WorkbenchError | None) -> None:
        now = self._clock()
        while self._attempts and self._attempts[0] <= now - self.policy.window_s:
            self._attempts.popleft()
        if len(self._attempts) >= self.policy.max_restarts:
            self._tell("given up", error=reason)
            raise DeploymentError(
                f"the ranks are not started again after {len(self._attempts)} restarts in {self.policy.window_s:g} s",
                found=reason,
                expected=f"at most {self.policy.max_restarts} restarts",
            ) from reason
        self._attempts.append(now)

    def _progress(self, is_wanted: Callable[[], bool]) -> OnProgress:
        def told(progress: LoadProgress) -> None:
            if self._closing.is_set() or not is_wanted():
                raise _UnwantedError
            if self._on_progress is not None:
                self._on_progress(progress)

        return told

    def _pause(self, seconds: float, is_wanted: Callable[[], bool]) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._check_wanted(is_wanted)
            self._closing.wait(min(left, LOOK_S))
        self._check_wanted(is_wanted)

    def _check_wanted(self, is_wanted: Callable[[], bool]) -> None:
        if self._closing.is_set() or not is_wanted():
            raise DeploymentError("the restart was called off")

    def _tell(
        self,
        kind: EventKind,
        *,
        error: WorkbenchError | None = None,
        seconds: float = 0.0,
        phases: Mapping[str, Phase] | None = None,
    ) -> None:
        if self._on_event is not None:
            attempt = len(self._attempts)
            self._on_event(
                RestartEvent(kind=kind, attempt=attempt, seconds=seconds, error=error, phases=dict(phases or {}))
            )

    @property
    def info(self) -> RunnerInfo:
        return self.current.info

    @property
    def spec(self) -> ModelSpec:
        return self.current.spec

    @property
    def layout(self) -> Layout:
        return self.current.layout

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by rank, of the ranks that are there now."""
        return self.current.pids

    @property
    def failure(self) -> WorkbenchError | None:
        return self.current.failure

    @property
    def is_intact(self) -> bool:
        return self.current.is_intact

    def encode_images(self, replica: int, images: Sequence[EncodeImage]) -> None:
        self.current.encode_images(replica, images)

    def encode_rows(self, replica: int, image: EncodeImage, first: int, stop: int) -> None:
        self.current.encode_rows(replica, image, first, stop)

    def drop_images(self, replica: int, keys: Collection[str]) -> None:
        self.current.drop_images(replica, keys)

    def reset_slot(self, replica: int, slot: int) -> None:
        self.current.reset_slot(replica, slot)

    def step(self, inputs: Sequence[StepInput]) -> list[list[SampledToken | WorkbenchError]]:
        return self.current.step(inputs)

    def close(self) -> None:
        """End the ranks, and a restart under way. Safe to call more than once."""
        self._closing.set()
        if self._spare is not None:
            self._spare.close()
        self.current.close()

    def __enter__(self) -> RestartingDeployment:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<RestartingDeployment of {self.current!r}, {self.num_restarts} restarts>"


class _UnwantedError(Exception):
    """Nobody waits for the restart any more."""
