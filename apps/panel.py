"""What the side of the chat page shows about the service behind it: figures of the engine and of the ranks.

Text alone, made anew whenever it is asked for; nothing here knows a browser.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from workbench.base import human
from workbench.deployment import RankStats
from workbench.serving import EngineStats

__all__ = ["Figures", "panel_text"]


class Figures(Protocol):
    """A service that can be asked how its engine is doing."""

    def stats(self) -> EngineStats: ...


def panel_text(service: Figures, ranks: Callable[[], Sequence[RankStats]] | None = None) -> str:
    """A Markdown table of the engine's figures and, where `ranks` gives them, of the memory of each rank.

    Raises as the two do.
    """
    stats = service.stats()
    rows = [
        ("answers under way", f"{stats.num_running} of {stats.num_running + stats.num_free_slots}"),
        ("waiting", str(stats.num_waiting)),
        ("steps", f"{stats.num_steps:,}"),
        ("given up", f"{stats.num_aborted:,}"),
        ("prompt tokens not read again", f"{stats.num_cached_tokens:,}"),
        ("pages kept", f"{stats.num_pages:,}"),
        ("restarts", f"{stats.num_restarts:,}"),
    ]
    if stats.num_drafted:
        rows.append(("guesses that held", f"{stats.num_accepted / stats.num_drafted:.0%} of {stats.num_drafted:,}"))
    for rank in ranks() if ranks is not None else ():
        own = rank.resident_bytes if rank.device_bytes is None else rank.device_bytes
        rows.append((f"rank {rank.rank} ({rank.device})", human(own, "B")))
        rows.append((f"rank {rank.rank}, cache", human(rank.cache_bytes, "B")))
    lines = ["| engine | now |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    return "\n".join(lines)
