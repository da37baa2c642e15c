"""How long people have waited lately: times to first tokens and between tokens, of the last minutes alone.

A server's histograms are from its start on; whoever looks at it wants to know how it is now.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

__all__ = ["RecentTimes", "RecentWaits"]

WINDOW_S = 180.0
MOST = 20_000  # of each kind; under load the window is then shorter, and says so


@dataclass(frozen=True, kw_only=True, slots=True)
class RecentTimes:
    """Seconds from a request's arrival to its first token, and from token to token, over the last `window_s`."""

    first_token_s: tuple[float, ...] = ()
    token_gap_s: tuple[float, ...] = ()
    window_s: float = WINDOW_S


class RecentWaits:
    """Takes down each token as it is handed out. Not safe from several threads: its owner holds a lock."""

    def __init__(self, *, window_s: float = WINDOW_S, most: int = MOST) -> None:
        self._window_s = window_s
        self._first: deque[tuple[float, float]] = deque(maxlen=most)
        self._gaps: deque[tuple[float, float]] = deque(maxlen=most)

    def first(self, now: float, seconds: float) -> None:
        self._first.append((now, seconds))

    def gap(self, now: float, seconds: float) -> None:
        self._gaps.append((now, seconds))

    def times(self, now: float) -> RecentTimes:
        """Those of the window that ends now; what is older is forgotten."""
        window_s = self._window_s
        for kept in (self._first, self._gaps):
            if len(kept) == kept.maxlen:
                window_s = min(window_s, now - kept[0][0])
            while kept and kept[0][0] < now - self._window_s:
                kept.popleft()
        return RecentTimes(
            first_token_s=tuple(seconds for _, seconds in self._first),
            token_gap_s=tuple(seconds for _, seconds in self._gaps),
            window_s=window_s,
        )
