"""How many copies of a model there are, changed while requests come: one copy after another, in a thread of its own.

A copy is started beside those that serve and taken in once it holds the model; one that is to go takes no request any
more, finishes those it has, and is closed then. Whatever goes wrong with a new copy ends the change and leaves the
others as they were.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from workbench.base import ChangeUnderWayError, DeploymentError, RequestError, error_text
from workbench.serving.fleet import CopyStatus, Fleet
from workbench.serving.steps import Runner

__all__ = ["Change", "Copies", "CopiesState", "CopyEvent", "CopyFailure", "Tell"]

MOST = 64
Tell = Callable[[int, float], None]  # a rank, and the part of its weights that it has, 0 to 1
Doing = Literal["starting", "draining"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """What is under way: towards `target` copies, `doing` it for `seconds`; a start has read a `fraction` of its
    weights on the rank that is furthest behind, of those that have told."""

    target: int
    doing: Doing
    seconds: float
    fraction: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyFailure:
    """Why the last change ended early, and how long ago (s)."""

    message: str
    type: str
    seconds_ago: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CopiesState:
    """`copies` are those that are there, `wanted` how many there are to be; `failure` stays until the next change."""

    wanted: int
    copies: tuple[CopyStatus, ...]
    change: Change | None
    failure: CopyFailure | None

    def count(self, state: str) -> int:
        return sum(copy.state == state for copy in self.copies)

    def to_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyEvent:
    """A copy has come, has gone, or has failed to come; `num_copies` are there now."""

    kind: Literal["added", "removed", "failed"]
    num_copies: int
    seconds: float
    error: Exception | None = None


class Copies:
    """The runners of a fleet, which are its own from now on; `close` ends them, and a start under way.

        copies = Copies(fleet, [deployment], start=start, check=check)
        copies.change(3)       # returns at once; `state` tells how far it is

    `start` makes one more runner, as long as that takes, and tells its argument how far each rank is; it lets through
    whatever that raises, and leaves nothing running then. `check` is asked before anything is started: it raises
    NoRoomError where so many more copies have no room. `close_runner` ends a runner that has been taken out. Requests
    of a copy that goes have `drain_s` to end. `on_event` is called in the thread of the change.
    """

    def __init__(
        self,
        fleet: Fleet,
        runners: list[Runner],
        *,
        start: Callable[[Tell], Runner],
        check: Callable[[int], None] = lambda num_more: None,
        close_runner: Callable[[Runner], None] = lambda runner: runner.close(),
        on_event: Callable[[CopyEvent], None] = lambda event: None,
        drain_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fleet = fleet
        self._runners, self._start, self._check, self._close_runner = list(runners), start, check, close_runner
        self._on_event, self._drain_s, self._clock = on_event, drain_s, clock
        self._lock = threading.Lock()  # guards what follows
        self._wanted = len(fleet)
        self._thread: threading.Thread | None = None
        self._is_changing = False
        self._doing: tuple[Doing, float] = ("starting", 0.0)
        self._fractions: dict[int, float] = {}
        self._failure: tuple[str, str, float] | None = None
        self._is_closed = False

    def change(self, target: int) -> bool:
        """Go to `target` copies that have not failed, in the background; False where that is so already.

        Raises RequestError for a number that cannot be, ChangeUnderWayError while another change is under way,
        NoRoomError where memory for the new ones is not free, DeploymentError once closed.
        """
        if not 1 <= target <= MOST:
            raise RequestError("this number of copies cannot be", found=target, expected=f"1 to {MOST}")
        with self._lock:
            if self._is_closed:
                raise DeploymentError("the copies are being closed")
            if self._is_changing:
                raise ChangeUnderWayError(
                    "the number of copies is being changed", found=f"towards {self._wanted}", next_step="Look again"
                )
            status, before = self.fleet.status(), self._wanted
            num_good = sum(copy.state in ("ready", "restarting") for copy in status)
            if target == num_good == len(status):
                self._wanted, self._failure = target, None
                return False
            self._is_changing, self._wanted = True, target
            self._begin("starting" if target > num_good else "draining")
        try:
            if target > num_good:
                self._check(target - num_good)
        except BaseException:
            with self._lock:
                self._is_changing, self._wanted = False, before
            raise
        with self._lock:
            self._failure = None
            self._thread = threading.Thread(target=self._run, args=(target,), name="workbench-copies", daemon=True)
            self._thread.start()
        return True

    @property
    def state(self) -> CopiesState:
        with self._lock:
            now = self._clock()
            change = failure = None
            if self._is_changing:
                doing, since = self._doing
                fraction = min(self._fractions.values(), default=0.0)
                change = Change(target=self._wanted, doing=doing, seconds=now - since, fraction=fraction)
            if self._failure is not None:
                message, kind, when = self._failure
                failure = CopyFailure(message=message, type=kind, seconds_ago=now - when)
            return CopiesState(wanted=self._wanted, copies=self.fleet.status(), change=change, failure=failure)

    def num_by_state(self) -> dict[str, int]:
        """How many copies are in each state of `CopyState`, and how many are starting."""
        with self._lock:
            is_starting = self._is_changing and self._doing[0] == "starting"
        counts: dict[str, int] = {"starting": int(is_starting)}
        counts.update((str(state), number) for state, number in self.fleet.num_by_state().items())
        return counts

    def close(self) -> None:
        """End a start under way, and all runners. The fleet is stopped before. Safe to call more than once."""
        with self._lock:
            self._is_closed = True
        if self._thread is not None:
            self._thread.join()
        while self._runners:
            self._close_runner(self._runners.pop())

    def _run(self, target: int) -> None:
        try:
            while sum(copy.state in ("ready", "restarting") for copy in self.fleet.status()) < target:
                self._add()
            while len(self.fleet) > target and not self._is_closed:
                self._remove()
        except _CalledOffError:
            pass
        except Exception as error:  # whatever it is, the others go on, and whoever asks is told
            with self._lock:
                self._failure = (error_text(error), type(error).__name__, self._clock())
                self._wanted = len(self.fleet)
            self._tell("failed", error)
        finally:
            with self._lock:
                self._is_changing = False

    def _add(self) -> None:
        if self._is_closed:
            raise _CalledOffError
        with self._lock:
            self._begin("starting")
        self._check(1)  # again for each: the one before may have taken more than was thought
        runner = self._start(self._note)
        try:
            self.fleet.add(runner)
        except BaseException:
            self._close_runner(runner)
            raise
        self._runners.append(runner)
        self._tell("added")

    def _remove(self) -> None:
        with self._lock:
            self._begin("draining")
        runner = self.fleet.remove(self.fleet.next_to_leave(), drain_s=self._drain_s)
        self._close_runner(runner)
        self._runners.remove(runner)
        self._tell("removed")

    def _begin(self, doing: Doing) -> None:
        self._doing, self._fractions = (doing, self._clock()), {}

    def _note(self, rank: int, fraction: float) -> None:
        if self._is_closed:
            raise _CalledOffError
        with self._lock:
            self._fractions[rank] = fraction

    def _tell(self, kind: Literal["added", "removed", "failed"], error: Exception | None = None) -> None:
        seconds = self._clock() - self._doing[1]
        self._on_event(CopyEvent(kind=kind, num_copies=len(self.fleet), seconds=seconds, error=error))


class _CalledOffError(Exception):
    """Nobody waits for the copy any more."""
