"""Who may ask, how often, and how many at once; what is refused is told when to come back."""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from workbench.serving.http.errors import ApiError
from workbench.serving.http.settings import ServerSettings, key_digest

__all__ = ["Buckets", "Gate"]

MAX_BUCKETS = 10_000  # addresses are free for an attacker to invent
MAX_RETRY_S = 60


class Buckets:
    """Token buckets by name: `per_minute` on the long run, a quarter of a minute's worth at once."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate = per_minute / 60
        self.size = max(1.0, per_minute / 4)
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # name -> tokens left, and when

    def take(self, name: str) -> float:
        """0 where one may go on, else the seconds until one may."""
        now = self._clock()
        left, then = self._buckets.pop(name, (self.size, now))
        left = min(self.size, left + (now - then) * self.rate)
        wait_s = 0.0 if left >= 1 else (1 - left) / self.rate
        self._buckets[name] = (left - 1 if wait_s == 0 else left, now)
        if len(self._buckets) > MAX_BUCKETS:
            self._buckets.popitem(last=False)  # not seen for the longest time, so most likely full again
        return wait_s


class Gate:
    """Keys, rates and places. Used from the event loop alone, so it needs no lock."""

    def __init__(
        self,
        settings: ServerSettings,
        *,
        num_slots: int | Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`num_slots`: answers that may be under way at once; to be asked for where it changes while serving."""
        self.settings = settings
        self._num_slots = num_slots
        self.num_inside = 0
        self.draining_since: float | None = None
        self._clock = clock
        self._buckets = Buckets(settings.requests_per_minute, clock) if settings.requests_per_minute else None
        self._own_buckets = {
            holder: Buckets(quota.requests_per_minute, clock)
            for holder, quota in settings.quotas.items()
            if quota.requests_per_minute is not None
        }
        self._inside: Counter[str] = Counter()  # by holder, of those with a quota
        self._mean_s = 1.0  # of the requests that ended lately

    @property
    def num_slots(self) -> int:
        return self._num_slots() if callable(self._num_slots) else self._num_slots

    @property
    def capacity(self) -> int:
        return self.num_slots + self.settings.max_waiting

    @property
    def retry_after_s(self) -> int:
        """About when a place will be free: the requests inside, served slot by slot."""
        return min(MAX_RETRY_S, max(1, math.ceil(self._mean_s * self.num_inside / self.num_slots)))

    def holder(self, authorization: str | None) -> str | None:
        """Whose key it is; None where none is needed. Raises ApiError where it is missing or unknown."""
        if not self.settings.api_keys:
            return None
        # Looked up by digest, so that the time it takes says nothing about how much of a guess was right.
        holder = self.settings.api_keys.get(key_digest(_bearer(authorization)))
        if holder is None:
            raise ApiError(401, "unknown API key", code="invalid_api_key")
        return holder

    def admin(self, authorization: str | None) -> str:
        """Whose admin key it is. Raises ApiError: 401 for a key that is missing or unknown, 403 for one that lets in
        questions alone, and for any where no admin key is set."""
        if not self.settings.admin_keys:
            raise ApiError(403, "this server has no admin key, so nobody may do this", code="admin_disabled")
        key = _bearer(authorization)
        holder = self.settings.admin_keys.get(key_digest(key))
        if holder is None and key_digest(key) in self.settings.api_keys:
            raise ApiError(403, "this key lets in questions, and does not let its holder do this", code="not_admin")
        if holder is None:
            raise ApiError(401, "unknown admin key", code="invalid_api_key")
        return holder

    def drain(self) -> None:
        """Take no more requests; harmless when repeated."""
        if self.draining_since is None:
            self.draining_since = self._clock()

    @property
    def is_drained(self) -> bool:
        """Whether it was told to drain, and all have left or had their time."""
        if self.draining_since is None:
            return False
        return self.num_inside == 0 or self._clock() - self.draining_since > self.settings.drain_timeout_s

    @contextmanager
    def place(self, name: str) -> Iterator[None]:
        """One place inside, for a request of `name`. Raises ApiError where there is none to be had now."""
        if self.draining_since is not None:
            raise ApiError(503, "the server is shutting down", code="draining", retry_after_s=5)
        quota = self.settings.quota_of(name)
        if quota.at_once is not None and self._inside[name] >= quota.at_once:
            raise ApiError(
                429,
                f"more than {quota.at_once} requests of one holder at once",
                code="too_many_at_once",
                retry_after_s=self.retry_after_s,
            )
        buckets = self._own_buckets.get(name, self._buckets)
        if buckets is not None and (wait_s := buckets.take(name)):
            raise ApiError(
                429,
                f"more than {quota.requests_per_minute or self.settings.requests_per_minute} requests per minute",
                code="rate_limit_exceeded",
                retry_after_s=max(1, math.ceil(wait_s)),
            )
        if self.num_inside >= self.capacity:
            raise ApiError(429, "too many requests wait already", code="queue_full", retry_after_s=self.retry_after_s)
        self.num_inside += 1
        if name in self.settings.quotas:
            self._inside[name] += 1
        start = self._clock()
        try:
            yield
        finally:
            self.num_inside -= 1
            if name in self.settings.quotas:
                self._inside[name] -= 1
            self._mean_s += 0.1 * (self._clock() - start - self._mean_s)


def _bearer(authorization: str | None) -> str:
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise ApiError(401, "an API key is needed: Authorization: Bearer KEY", code="missing_api_key")
    return key.strip()
