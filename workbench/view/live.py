"""Redrawing from a background thread while a cell is busy, at a pace that a page can keep up with.

A redraw sets a widget trait, which is the kind of message that reaches the page from a thread while a cell runs.
Nothing may be displayed from that thread: output shown there would land in no cell, or in the wrong one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["INTERVAL_S", "Redrawer"]

INTERVAL_S = 0.1  # a page keeps up with 10 redraws a second, and not with 40


class Redrawer:
    """Calls `redraw` from a thread of its own whenever `version` has changed, at most once in `interval_s` seconds.

    News may come from any thread and as often as it likes: it only moves the version. `stop` ends the thread and draws
    once more, so that the last state is the one that stays.
    """

    def __init__(
        self, redraw: Callable[[], None], version: Callable[[], int], *, interval_s: float = INTERVAL_S, name: str
    ) -> None:
        self.interval_s = max(INTERVAL_S, interval_s)
        self.num_redraws = 0
        self._redraw, self._version, self._name = redraw, version, name
        self._drawn_version = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_started(self) -> bool:
        return self._thread is not None

    def start(self) -> None:
        """Does nothing where it has been started before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def stop(self) -> bool:
        """Whether this call was the one that stopped it; a thread that never started has nothing to draw."""
        if self._stop.is_set():
            return False
        self._stop.set()
        if self._thread is None:
            return False
        self._thread.join()
        self._draw()
        return True

    def _run(self) -> None:
        while not self._stop.wait(self.interval_s):
            if self._version() != self._drawn_version:
                self._draw()

    def _draw(self) -> None:
        self._drawn_version = self._version()
        self._redraw()
        self.num_redraws += 1
