"""Did loading keep its word? Rows written, bytes read and memory taken, as the ranks report them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from workbench.base import human
from workbench.day0.gates import GateBook
from workbench.deployment import LoadReport, LoadSummary
from workbench.report import Section
from workbench.view import load_timeline

__all__ = ["measure_loading"]


def measure_loading(
    gates: GateBook,
    sections: list[Section],
    reports: Sequence[LoadReport],
    *,
    samples: Mapping[int, Sequence[tuple[float, int]]],
    on_host: bool,
    say: Callable[[str], None],
) -> None:
    """Enter the gates about loading, each with the rank that is worst. `samples`: (seconds, bytes read) over time, by
    rank; `on_host`: the weights stay in host memory."""
    summary = LoadSummary.of(reports)
    table = summary.table()
    missing = {report.rank: LoadSummary.of([report]).rows_missing for report in reports}
    lines = [f"rank {rank} lacks {rows:,}" for rank, rows in missing.items() if rows]
    gates.measured(
        "loading.rows", summary.rows_missing, evidence="; ".join([f"ledgers of {len(reports)} ranks", *lines])
    )
    most = max(reports, key=lambda report: report.stats["read_ratio"])
    gates.measured(
        "loading.read_ratio",
        summary.read_ratio,
        evidence=f"{summary.bytes_read:,} bytes read, {summary.bytes_assigned:,} assigned; "
        f"rank {most.rank} read {most.stats['read_ratio']:.3f} times its own",
    )
    worst = max(reports, key=lambda report: LoadSummary.of([report]).memory_excess(on_host=on_host))
    grew, window, kept = (human(worst.stats[f"{name}_bytes"], "B") for name in ("peak_host", "window", "resident"))
    gates.measured(
        "loading.memory",
        summary.memory_excess(on_host=on_host),
        evidence=f"worst of {len(reports)} ranks, peak sampled while loading: rank {worst.rank} grew by {grew}, its "
        f"window is {window}" + (f", its weights {kept}" if on_host else ""),
    )
    charts = (load_timeline({rank: list(points) for rank, points in samples.items()}),) if any(samples.values()) else ()
    sections.append(Section(title="Loading", tables=(table,), charts=charts))
    say(table.title)
