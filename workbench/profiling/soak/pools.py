"""Everything a server takes for a request and must give back, counted in one place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from workbench.profiling.soak.memory import open_files, threads

if TYPE_CHECKING:
    from workbench.profiling.soak.run import Subject

__all__ = ["count_pools", "pool_faults"]

# Must be exactly as before; what is not named here may only shrink.
EXACT = ("free slots", "cache bytes")
THREADS = 4  # pools of threads fill on demand, up to a bound; whoever loses one now and then loses more in a long run


def count_pools(subject: Subject) -> dict[str, int]:
    """Counts by name. Those of ranks are summed over the replicas, so that they compare with the engine's own."""
    engine = subject.service.engine
    stats = engine.stats()
    counts = {
        "free slots": stats.num_free_slots,
        "requests in slots": stats.num_running,
        "requests waiting": stats.num_waiting,
        "requests the engine knows": engine.num_requests,
        "requests inside the server": subject.num_inside(),
        "pictures held": stats.num_images,
        "pages kept": stats.num_pages,
    }
    for place, held in sorted(subject.rank_counts().items()):
        counts |= {f"{name} {place}": number for name, number in held.items()}
    for name, pid in subject.processes().items():
        for what, number in (("open files", open_files(pid)), ("threads", threads(pid))):
            if number is not None:
                counts[f"{what}, {name}"] = number
    return counts


def pool_faults(before: Mapping[str, int], after: Mapping[str, int], *, max_pages: int) -> list[str]:
    """What was not given back, or is not held where the engine believes it to be."""
    faults = []
    for name, number in after.items():
        was = before.get(name)
        if name.startswith("pages kept"):
            if number > max_pages or number != after["pages kept"]:
                faults.append(f"{name}: {number}, at most {max_pages}, the engine counts {after['pages kept']}")
        elif was is None:
            faults.append(f"{name}: {number}, unknown before")
        elif number > was + (THREADS if name.startswith("threads") else 0) or (
            number != was and name.startswith(EXACT)
        ):
            faults.append(f"{name}: {number}, before {was}")
    return faults
