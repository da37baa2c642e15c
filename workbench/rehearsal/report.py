"""The record of a rehearsal: what was planned, what was loaded and kept, what it took, and what that says of the real
load."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass

from workbench.base import Cell, Quantity, Table, human
from workbench.checkpoint import AuditReport, Origin
from workbench.loading import LoadStats, Piece
from workbench.rehearsal.read_plan import ReadPlan
from workbench.rehearsal.shares import StageShare, collective_table, share_table

__all__ = ["LoadFigures", "RehearsalReport"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadFigures:
    """One rank's share as it was loaded here. `predicted_peak_bytes` was said before, `stats` is what was measured.

    `kept`: the whole share was held at the end; otherwise each piece was let go when the ledger had seen it.
    """

    stats: LoadStats
    predicted_peak_bytes: int
    kept: bool
    ledger: Mapping[str, object]  # Ledger.summary()
    pieces: tuple[Piece, ...]
    kinds: Mapping[str, str]  # piece -> kind it is counted under

    @property
    def peak_ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted_peak_bytes / max(1, self.stats.peak_host_bytes)

    @property
    def what_was_kept(self) -> str:
        if self.kept:
            return f"the whole share was held at once ({human(self.stats.resident_bytes, 'B')})"
        return f"nothing was kept: {len(self.pieces)} pieces, each loaded, checked and let go before the next"

    def table(self) -> Table:
        stats, ledger = self.stats, self.ledger
        rows: list[tuple[str, Cell]] = [
            ("bytes assigned", stats.bytes_assigned),
            ("bytes read", stats.bytes_read),
            ("read calls", stats.num_reads),
            ("seconds", round(stats.seconds, 2)),
            ("of them waiting for reads", round(stats.read_seconds, 2)),
            ("rate", human(stats.bytes_per_s, "B/s")),
            ("rows of the ledger / written", f"{ledger['rows']:,} / {ledger['rows_written']:,}"),
            ("parameters in the ledger", int(str(ledger["entries"]))),
            ("load peak predicted, bytes", self.predicted_peak_bytes),
            ("load peak measured, bytes", stats.peak_host_bytes),
            ("predicted / measured", round(self.peak_ratio, 3)),
        ]
        return Table(title="Loaded here", columns=("what", "value"), rows=tuple(rows), note=self.what_was_kept)

    def piece_table(self) -> Table:
        """Pieces by kind: how many, their bytes, and how long one took."""
        groups: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            groups.setdefault(self.kinds.get(piece.name, piece.name), []).append(piece)
        rows = tuple(
            (
                kind,
                len(group),
                sum(p.num_params for p in group),
                sum(p.bytes_read for p in group),
                max(p.resident_bytes for p in group),
                round(sum(p.seconds for p in group), 3),
            )
            for kind, group in groups.items()
        )
        columns = ("piece", "number", "parameters", "bytes read", "largest resident", "seconds, all")
        return Table(columns=columns, rows=rows)

    def to_json(self) -> dict[str, object]:
        return {
            "stats": self.stats.to_dict(),
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "peak_ratio": self.peak_ratio,
            "kept": self.kept,
            "ledger": dict(self.ledger),
            "pieces": self.piece_table().to_json(),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsalReport:
    """Outcome of `rehearse`. Where only the plan was asked for `load` is None and `shares` speak for every rank;
    where the audit found an error there is neither.

    `estimates`: what the plan means for the weights themselves, each with its basis.
    """

    root: str
    origin: Origin
    layout: str
    num_ranks: int
    audit: AuditReport
    plan: ReadPlan | None
    load: LoadFigures | None
    all_ranks_bytes: int
    estimates: Mapping[str, Quantity]
    seconds: float
    shares: tuple[StageShare, ...] = ()

    @property
    def ok(self) -> bool:
        """The audit found no error, and every row of the share was written once where a load was made."""
        return self.audit.ok and (self.load is None or self.load.ledger["rows"] == self.load.ledger["rows_written"])

    def summary(self) -> str:
        verdict = "rehearsed" if self.ok else "NOT ready"
        done = "" if self.load is None else f", {human(self.load.stats.bytes_read, 'B')} loaded"
        rank = "" if self.plan is None else f", rank {self.plan.rank}"
        return (
            f"{self.root}: {verdict}: {self.layout} on {self.num_ranks} ranks{rank}{done}, {self.seconds:.1f} s\n"
            f"weights: {self.origin.note}"
        )

    def tables(self) -> tuple[Table, ...]:
        tables: list[Table] = []
        if not self.audit.ok:
            tables.append(self.audit.findings_table())
        if self.plan is not None:
            tables += [self.plan.role_table(), self.plan.file_table()]
        if self.load is not None:
            tables += [self.load.table(), self.load.piece_table()]
        if self.shares:
            tables += [share_table(self.shares), collective_table(self.shares)]
        rows = tuple((what, human(q.value, q.unit), q.basis, q.source) for what, q in self.estimates.items())
        if rows:
            title = "What this says of the weights themselves"
            tables.append(Table(title=title, columns=("estimate", "value", "basis", "from"), rows=rows))
        return tuple(tables)

    def render(self) -> str:
        parts = [self.summary(), f"audit: {self.audit.summary()}", *(table.render() for table in self.tables())]
        return "\n\n".join(parts)

    def to_json(self) -> dict[str, object]:
        return {
            "root": self.root,
            "ok": self.ok,
            "weights": {
                "note": self.origin.note,
                "is_ghost": self.origin.is_ghost,
                "is_dummy": self.origin.is_dummy,
            },
            "layout": self.layout,
            "num_ranks": self.num_ranks,
            "audit": self.audit.to_json(),
            "plan": None if self.plan is None else self.plan.to_json(),
            "load": None if self.load is None else self.load.to_json(),
            "shares": [share.to_json() for share in self.shares],
            "all_ranks_bytes": self.all_ranks_bytes,
            "estimates": {
                what: {"value": q.value, "unit": q.unit, "basis": q.basis, "from": q.source}
                for what, q in self.estimates.items()
            },
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        return self.render()

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self.summary())}</p>" + "".join(table.to_html() for table in self.tables())
