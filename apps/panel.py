"""What the side of the chat page shows about the service behind it: waits, rates, hits, experts, the memory of ranks.

Made anew whenever it is asked for; nothing here knows a browser. Rates are those since the last look of whoever asks,
which is why each visitor keeps a `Sight` of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from workbench.base import human
from workbench.deployment import Deployment, RankStats
from workbench.profiling import ExpertLoad, Percentiles, expert_load
from workbench.serving import EngineStats, MultimodalInferenceService, RecentTimes
from workbench.view import draw_expert_heat, expert_heat

__all__ = ["Figures", "Panel", "Sight"]


class Figures(Protocol):
    """A service that can be asked how its engine is doing."""

    def stats(self) -> EngineStats: ...
    def recent(self) -> RecentTimes: ...


@dataclass(frozen=True, slots=True)
class Sight:
    """Tokens handed out by a moment (s)."""

    at_s: float
    num_generated: int


@dataclass(frozen=True, kw_only=True)
class Panel:
    """`ranks` gives the memory of each rank, `experts` the tokens by expert since somebody began to look; `runs_on`
    says on which layout. What is not there is not shown."""

    service: Figures
    runs_on: str = ""
    ranks: Callable[[], Sequence[RankStats]] | None = None
    experts: Callable[[], ExpertLoad] | None = None
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def of(cls, service: MultimodalInferenceService) -> Panel:
        """Of a service, and of the ranks behind it where it has some."""
        model = service.model
        if not isinstance(model, Deployment):
            return cls(service=service)
        ranks = f"{model.world_size} rank{'s' if model.world_size > 1 else ''}"
        return cls(
            service=service,
            runs_on=f"{model.layout} on {ranks}",
            ranks=model.stats,
            experts=(lambda: expert_load(model)) if any(layer.is_moe for layer in model.spec.layers) else None,
        )

    def look(self, before: Sight | None = None) -> tuple[str, Sight]:
        """A Markdown table of the figures, and what the next look takes its rates from. Raises as what it asks."""
        stats, now = self.service.stats(), self.clock()
        rows = [("layout", self.runs_on)] if self.runs_on else []
        rows += [
            ("answers under way", f"{stats.num_running} of {stats.num_running + stats.num_free_slots}"),
            ("waiting", str(stats.num_waiting)),
            *_waits(self.service.recent()),
        ]
        if before is not None and now > before.at_s:
            seconds = now - before.at_s
            # Counts begin anew with the engine: less than before is no rate.
            rate = max(0, stats.num_generated - before.num_generated) / seconds
            rows.append(("tokens a second", f"{rate:,.1f} over {human(seconds, 's')}"))
        if stats.num_prompt_tokens:
            share = stats.num_cached_tokens / stats.num_prompt_tokens
            rows.append(("prefix hits", f"{share:.0%} of {stats.num_prompt_tokens:,} prompt tokens"))
        rows += [
            ("steps", f"{stats.num_steps:,}"),
            ("given up", f"{stats.num_aborted:,}"),
            ("pages kept", f"{stats.num_pages:,}"),
            ("restarts", f"{stats.num_restarts:,}"),
        ]
        if stats.num_drafted:
            rows.append(("guesses that held", f"{stats.num_accepted / stats.num_drafted:.0%} of {stats.num_drafted:,}"))
        for rank in self.ranks() if self.ranks is not None else ():
            own = rank.resident_bytes if rank.device_bytes is None else rank.device_bytes
            rows.append((f"rank {rank.rank} ({rank.device})", human(own, "B")))
            rows.append((f"rank {rank.rank}, cache", human(rank.cache_bytes, "B")))
        lines = ["| engine | now |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
        return "\n".join(lines), Sight(now, stats.num_generated)

    def heat(self) -> str:
        """The load of experts as SVG, or why there is none. Ranks count while this is asked, and raise as it does."""
        if self.experts is None:
            return "No experts to look at."
        load = self.experts()
        if not any(layer.num_tokens for layer in load.layers):
            return "Ranks count from now on."
        return draw_expert_heat(expert_heat(load.to_json()))


def _waits(recent: RecentTimes) -> list[tuple[str, str]]:
    """First tokens and gaps between tokens, half and 99 in 100 of them below."""
    rows = []
    for name, times in (("first token", recent.first_token_s), ("between tokens", recent.token_gap_s)):
        found = Percentiles.of(times)
        if found is not None:
            rows.append((f"{name}, p50 and p99", f"{human(found.p50, 's')}, {human(found.p99, 's')}"))
    if rows:
        rows.append(("of the last", human(recent.window_s, "s")))
    return rows
