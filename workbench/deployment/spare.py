"""Ranks that wait to take over: started in the background while others serve, taken when those have failed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from workbench.base import WorkbenchError
from workbench.deployment.started import StartedRanks

__all__ = ["Spare"]

LOG = logging.getLogger("workbench.deployment")


class Spare:
    """At most one set of started ranks with their libraries loaded. They hold no model and touch no device.

    A spare that fails is a line in the log and no more: whoever takes it gets None and starts ranks as usual.
    """

    def __init__(self, begin: Callable[[], StartedRanks]) -> None:
        self._begin = begin
        self._thread: threading.Thread | None = None
        self._ready: StartedRanks | None = None
        self._is_closed = False

    def prepare(self) -> None:
        """Start ranks in a thread of its own, unless some wait or are on their way."""
        if self._thread is None and not self._is_closed:
            self._thread = threading.Thread(target=self._run, name="workbench-spare", daemon=True)
            self._thread.start()

    def take(self) -> StartedRanks | None:
        """The ranks that wait, or are on their way; they are the caller's. None where there are none, or they broke."""
        if self._thread is None:
            return None
        self._thread.join()
        ready, self._thread, self._ready = self._ready, None, None
        if ready is not None and not ready.is_usable:
            ready.close()
            return None
        return ready

    def close(self) -> None:
        """End the ranks that wait. Safe to call more than once."""
        self._is_closed = True
        if (ready := self.take()) is not None:
            ready.close()

    def _run(self) -> None:
        started: StartedRanks | None = None
        try:
            started = self._begin()
            started.warm()
        except WorkbenchError as error:
            LOG.warning("no spare ranks: %s", error)
            if started is not None:
                started.close()
            return
        self._ready = started
