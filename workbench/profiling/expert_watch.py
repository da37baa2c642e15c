"""Which experts the tokens of a running deployment choose, counted for as long as somebody looks.

Ranks begin to count when they are asked, go on while they are asked again, and stop by themselves when nobody has asked
for `LEASE_S`. So what looks may go away without a word, and a deployment that nobody looks at counts nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol, cast

from workbench.profiling.experts import ExpertLoad, merge_counts

if TYPE_CHECKING:
    from workbench.deployment.commands import RankCommands

__all__ = ["LEASE_S", "count", "expert_load"]

LEASE_S = 60.0
KEY = "expert watch"


class Caller(Protocol):
    """What can call a function on every rank; a `Deployment` does."""

    def call(self, function: str, args: Mapping[str, object] | None = None) -> list[object]: ...


def expert_load(caller: Caller) -> ExpertLoad:
    """Choices of experts since the ranks began to count; nothing at the first call, which is what they begin with.

    Between two steps of the ranks. Raises as `Deployment.call`.
    """
    return merge_counts(cast(list[Mapping[int, tuple[int, ...]]], caller.call(f"{__name__}:count")))


def count(commands: RankCommands, *, clock: Callable[[], float] = time.monotonic) -> dict[int, tuple[int, ...]]:
    """Runs on a rank: what it has counted by layer, where its tokens are not those of another rank that counts."""
    if commands.loaded.ctx.coords.tp:
        return {}
    watch = commands.extensions.get(KEY)
    if not isinstance(watch, _Watch) or watch.is_over:
        commands.extensions[KEY] = watch = _Watch(commands, clock)
    return watch.read()


class _Watch:
    """Counts, and looks once a step whether anybody still wants to know."""

    def __init__(self, commands: RankCommands, clock: Callable[[], float]) -> None:
        from workbench.profiling.router_counts import RouterCounts  # the asking side needs no torch

        model = commands.loaded.model
        self._clock, self._asked_s = clock, clock()
        self._counts = RouterCounts(model)
        self._handle = model.register_forward_hook(lambda *_: self._look())
        self.is_over = False

    def read(self) -> dict[int, tuple[int, ...]]:
        self._asked_s = self._clock()
        return self._counts.read()

    def _look(self) -> None:
        if self._clock() - self._asked_s > LEASE_S:
            self._counts.close()
            self._handle.remove()
            self.is_over = True
