"""What loading cost, over all ranks: exact bytes, memory against its bound, and whether every ledger closed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.base import Cell, Table, human
from workbench.deployment.records import LoadReport

__all__ = ["LoadSummary"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSummary:
    """Load reports of all ranks of a deployment, as the gates of a report need them."""

    reports: tuple[LoadReport, ...]

    @classmethod
    def of(cls, reports: Sequence[LoadReport]) -> LoadSummary:
        return cls(reports=tuple(reports))

    @property
    def bytes_read(self) -> int:
        return sum(int(report.stats["bytes_read"]) for report in self.reports)

    @property
    def bytes_assigned(self) -> int:
        return sum(int(report.stats["bytes_assigned"]) for report in self.reports)

    @property
    def read_ratio(self) -> float:
        """Bytes that all ranks read over bytes that the placement table assigns them."""
        return self.bytes_read / self.bytes_assigned if self.bytes_assigned else 1.0

    @property
    def seconds(self) -> float:
        """Of the slowest rank."""
        return max(report.stats["seconds"] for report in self.reports)

    def memory_excess(self, *, on_host: bool) -> int:
        """Largest growth of a rank's host memory beyond the staging window and, with `on_host`, the weights themselves.

        At most 0 where the bound holds.
        """
        return max(int(_beyond_bound(report, on_host)) for report in self.reports)

    @property
    def rows_missing(self) -> int:
        """Parameter rows that some rank's ledger does not show as written."""
        return sum(_count(report, "rows") - _count(report, "rows_written") for report in self.reports)

    @property
    def warnings(self) -> tuple[str, ...]:
        found: list[str] = []
        for report in self.reports:
            lines = report.ledger["warnings"]
            assert isinstance(lines, list)
            found += [f"rank {report.rank}: {line}" for line in lines]
        return tuple(found)

    def table(self) -> Table:
        rows: list[tuple[Cell, ...]] = [
            (
                report.place,
                int(report.stats["bytes_assigned"]),
                int(report.stats["bytes_read"]),
                int(report.stats["resident_bytes"]),
                int(report.stats["window_bytes"]),
                int(report.stats["peak_host_bytes"]),
                f"{report.stats['seconds']:.2f} s",
                f"{_count(report, 'rows_written'):,} of {_count(report, 'rows'):,}",
            )
            for report in self.reports
        ]
        title = (
            f"{len(self.reports)} ranks read {human(self.bytes_read, 'B')} in {self.seconds:.2f} s, "
            f"{self.read_ratio:.3f} of the bytes assigned"
        )
        columns = ("rank", "assigned B", "read B", "resident B", "window B", "peak growth B", "time", "rows written")
        return Table(columns=columns, rows=tuple(rows), title=title, note="\n".join(self.warnings))

    def render(self) -> str:
        return self.table().render()

    def _repr_html_(self) -> str:
        return self.table().to_html()

    def to_json(self) -> dict[str, object]:
        return {
            "bytes_read": self.bytes_read,
            "bytes_assigned": self.bytes_assigned,
            "read_ratio": self.read_ratio,
            "seconds": self.seconds,
            "rows_missing": self.rows_missing,
            "ranks": [
                {
                    "place": r.place,
                    "stats": r.stats,
                    "ledger": r.ledger,
                    "seconds_by_stage": r.stages["seconds_by_stage"],
                }
                for r in self.reports
            ],
        }


def _count(report: LoadReport, key: str) -> int:
    value = report.ledger[key]
    assert isinstance(value, int)
    return value


def _beyond_bound(report: LoadReport, on_host: bool) -> float:
    stats = report.stats
    return stats["peak_host_bytes"] - stats["window_bytes"] - (stats["resident_bytes"] if on_host else 0)
