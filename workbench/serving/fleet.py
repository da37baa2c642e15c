"""Several copies of one model behind one door, more or fewer of them while requests come.

Each copy is a runner with an engine of its own. A request goes to the least loaded one, or to the one that last read
the same beginning while that is not much busier: kept pages are of use only where they lie. A copy that has failed or
is being replaced gets none; what it had in flight fails as it does alone.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from workbench.base import DeploymentError, QueueFullError, RequestError, WorkbenchError
from workbench.serving.engine import Engine
from workbench.serving.generation import EngineStats, Generation, Listener
from workbench.serving.prefix import page_keys
from workbench.serving.recent import RecentTimes
from workbench.serving.requests import GenerationRequest
from workbench.serving.steps import Runner, RunnerInfo

__all__ = ["CopyState", "CopyStatus", "Fleet"]

CopyState = Literal["ready", "restarting", "failed", "leaving"]

MAX_HOMES = 4096  # beginnings of which it is known who read them
SLACK = 0.5  # how much of its slots the home of a beginning may be busier than the least loaded one
LOOK_S = 0.02
# What an engine has at this moment; everything else of its counts only grows, and outlives it.
MOMENTARY = frozenset(
    {
        *("num_waiting", "num_running", "num_free_slots", "num_pages", "num_images"),
        *("num_pool_pages", "num_free_pool_pages"),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyStatus:
    """One copy now. `number` counts from 1 in the order in which copies came, and is never given twice."""

    number: int
    state: CopyState
    num_requests: int
    num_slots: int


@dataclass(eq=False, slots=True)
class _Copy:
    runner: Runner
    engine: Engine
    number: int
    is_leaving: bool = False

    @property
    def num_slots(self) -> int:
        return self.runner.info.num_slots * self.runner.info.dp

    @property
    def load(self) -> float:
        """Requests for each slot."""
        return self.engine.num_requests / self.num_slots

    @property
    def state(self) -> CopyState:
        if self.is_leaving:
            return "leaving"
        if self.engine.is_recovering:
            return "restarting"
        return "ready" if self.engine.error is None else "failed"

    @property
    def is_usable(self) -> bool:
        return not self.is_leaving and not self.engine.is_recovering and self.engine.error is None


class Fleet:
    """Runs like an engine, over one runner or several; give it to a service in place of a runner.

        fleet = Fleet([deployment])
        with open_service(fleet, path) as service, HttpServer(service, settings) as server:
            fleet.add(another)                  # takes requests from now on
            fleet.remove(deployment).close()    # takes none any more, and is free when its last has ended

    `make` gives each runner its engine. Requests with their first `affinity_tokens` tokens in common keep together; by
    default those of one page that the engines keep, and nobody (0) where they keep none.
    The runners stay the caller's. Raises RequestError for no runner, or for runners of different models.
    """

    def __init__(
        self,
        runners: Sequence[Runner],
        *,
        make: Callable[[Runner], Engine] = Engine,
        affinity_tokens: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not runners:
            raise RequestError("a fleet needs a runner", expected="at least one")
        self.info: RunnerInfo = runners[0].info
        self._make, self._clock = make, clock
        self._lock = threading.Lock()  # guards the list of copies and the table of homes
        self._is_started = False
        self._copies: list[_Copy] = []
        self._num_added = 0
        self._gone: dict[str, int] = {}  # counts of copies that have left
        self._homes: OrderedDict[str, _Copy] = OrderedDict()
        for runner in runners:
            self.add(runner)
        kept = self._copies[0].engine.scheduler.page_tokens
        self._affinity_tokens = kept if affinity_tokens is None else affinity_tokens

    def __len__(self) -> int:
        """Copies that take requests, or will again once they have been replaced."""
        return sum(not copy.is_leaving for copy in self._copies)

    def start(self) -> Fleet:
        """Start all engines; does nothing where they run already. Raises as `Engine.start`."""
        with self._lock:
            self._is_started = True
            for copy in self._copies:
                copy.engine.start()
        return self

    def stop(self) -> None:
        """End all engines; requests in flight fail. The runners stay open."""
        with self._lock:
            self._is_started = False
            copies = list(self._copies)
        for copy in copies:
            copy.engine.stop()

    def add(self, runner: Runner) -> None:
        """One more copy, from now on. Raises RequestError where it is there already or is of another model."""
        ours, theirs = _identity(self.info), _identity(runner.info)
        if ours != theirs:
            raise RequestError("this runner holds another model", found=theirs, expected=ours)
        copy = _Copy(runner, self._make(runner), 0)
        with self._lock:
            if any(each.runner is runner for each in self._copies):
                raise RequestError("this runner is in the fleet already")
            if self._is_started:
                copy.engine.start()
            self._num_added += 1
            copy.number = self._num_added
            self._copies.append(copy)

    def remove(self, runner: Runner, *, drain_s: float = 60.0) -> Runner:
        """Take a copy out: no request goes there any more, those there have `drain_s` to end, then they fail.

        Returns the runner. Raises RequestError for one that is not there, and for the last one.
        """
        with self._lock:
            copy = next((each for each in self._copies if each.runner is runner and not each.is_leaving), None)
            if copy is None:
                raise RequestError("this runner is not in the fleet")
            if len(self) == 1:
                raise RequestError("the last runner of a fleet stays", next_step="Stop the fleet instead")
            copy.is_leaving = True
            self._homes = OrderedDict((key, home) for key, home in self._homes.items() if home is not copy)
        until = self._clock() + drain_s
        while copy.engine.num_requests and copy.engine.error is None and self._clock() < until:
            time.sleep(LOOK_S)
        copy.engine.stop()
        with self._lock:
            self._copies.remove(copy)
            for name, value in asdict(copy.engine.stats()).items():
                if name not in MOMENTARY:
                    self._gone[name] = self._gone.get(name, 0) + value
        return runner

    def next_to_leave(self) -> Runner:
        """The copy that is missed least: one that has failed, else the one with the fewest requests, the newest first.

        Raises RequestError where only one copy is left.
        """
        with self._lock:
            staying = [copy for copy in self._copies if not copy.is_leaving]
            if len(staying) < 2:
                raise RequestError("the last runner of a fleet stays", next_step="Stop the fleet instead")
            order = ("failed", "restarting", "ready")
            return min(staying, key=lambda x: (order.index(x.state), x.engine.num_requests, -x.number)).runner

    def submit(self, request: GenerationRequest, listener: Listener | None = None) -> Generation:
        """As `Engine.submit`, on the copy that suits the request best; the next best where that one is full."""
        keys = page_keys(request, self._affinity_tokens, most=1) if self._affinity_tokens else []
        refusal: WorkbenchError | None = None
        with self._lock:  # to the end, so that nothing comes to a copy after it was told to leave
            for copy in self._in_order(keys[0] if keys else None):
                try:
                    generation = copy.engine.submit(request, listener)
                except (QueueFullError, DeploymentError) as error:
                    refusal = refusal or error
                    continue
                for key in keys:
                    self._homes[key] = copy
                    self._homes.move_to_end(key)
                    if len(self._homes) > MAX_HOMES:
                        self._homes.popitem(last=False)
                return generation
        assert refusal is not None
        raise refusal

    def _in_order(self, key: str | None) -> list[_Copy]:
        """Copies to ask, best first. All that stay where none is usable: one of them has the error to raise."""
        staying = [copy for copy in self._copies if not copy.is_leaving]
        order = sorted([copy for copy in staying if copy.is_usable] or staying, key=lambda copy: copy.load)
        home = self._homes.get(key) if key is not None else None
        if home in order and home.load <= order[0].load + SLACK:
            order.remove(home)
            order.insert(0, home)
        return order

    @property
    def error(self) -> WorkbenchError | None:
        """What made the last usable copy fail for good, if none is left and none is being replaced."""
        copies = [copy for copy in self._copies if not copy.is_leaving]
        if any(copy.is_usable or copy.engine.is_recovering for copy in copies):
            return None
        return next((copy.engine.error for copy in copies), None)

    @property
    def is_recovering(self) -> bool:
        """Whether no request is taken until a copy has been replaced."""
        copies = [copy for copy in self._copies if not copy.is_leaving]
        return not any(copy.is_usable for copy in copies) and any(copy.engine.is_recovering for copy in copies)

    @property
    def num_requests(self) -> int:
        """Requests that have not had their end."""
        return sum(copy.engine.num_requests for copy in list(self._copies))

    @property
    def num_slots(self) -> int:
        """Answers that may be under way at once, over the copies that stay."""
        return sum(copy.num_slots for copy in list(self._copies) if not copy.is_leaving)

    def status(self) -> tuple[CopyStatus, ...]:
        """Every copy that is there, in the order in which they came."""
        return tuple(
            CopyStatus(
                number=copy.number, state=copy.state, num_requests=copy.engine.num_requests, num_slots=copy.num_slots
            )
            for copy in list(self._copies)
        )

    def num_by_state(self) -> dict[CopyState, int]:
        """How many copies are in each state, states without any included."""
        states = [copy.state for copy in list(self._copies)]
        return {state: states.count(state) for state in get_args(CopyState)}

    def stats(self) -> EngineStats:
        """What the copies have now, and counts of all there have been, summed: a count never falls."""
        with self._lock:
            parts = [*(asdict(copy.engine.stats()) for copy in self._copies), self._gone]
        return EngineStats(**{name: sum(part.get(name, 0) for part in parts) for name in parts[0]})

    def recent(self) -> RecentTimes:
        """Times of all copies; the window is the shortest of theirs."""
        parts = [copy.engine.recent() for copy in list(self._copies)]
        return RecentTimes(
            first_token_s=tuple(seconds for part in parts for seconds in part.first_token_s),
            token_gap_s=tuple(seconds for part in parts for seconds in part.token_gap_s),
            window_s=min(part.window_s for part in parts),
        )


def _identity(info: RunnerInfo) -> tuple[object, ...]:
    """What a request may rely on, whichever copy it comes to."""
    return info.max_tokens, info.vocab_size, info.has_vision, info.stop_ids
