"""Time in collectives, taken apart: waiting for a late rank, and moving bytes.

A collective cannot end before its last rank has entered. What a rank spends in it until then is waiting, caused by that
rank; the rest is transfer. Bytes over the whole time would call a slow neighbour a slow link.

    rank 0   |entered ......... waiting .........|== transfer ==|
    rank 1         |entered ...... waiting ......|== transfer ==|
    rank 2                              (late)   |== transfer ==|

Entry times of different machines are compared after their clocks were (see `clocks`); waits below the error of that are
not believed. Where an accelerator queues work, entry on the host says nothing: there a barrier before each operation is
timed instead ("barrier" mode), at the price of changing what it measures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from workbench.base import Cell, Table, human

__all__ = ["CollectiveTime", "Communication", "OperationTime", "RankShare", "split_communication"]

POINT_TO_POINT = ("send", "receive")


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveTime:
    """One collective as one rank saw it, seconds of that rank's clock.

    `place` counts operations of this name in this group from the start of the profile. `barrier_s`: the wait in a
    barrier just before `entered_s`, where there was one.
    """

    name: str
    group: str
    ranks: tuple[int, ...]
    place: int
    num_bytes: int
    entered_s: float
    left_s: float
    barrier_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShare:
    """One rank's seconds in collectives, and those that others spent waiting for it."""

    rank: int
    count: int
    waiting_s: float
    transfer_s: float
    caused_s: float

    @property
    def seconds(self) -> float:
        return self.waiting_s + self.transfer_s


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationTime:
    """One kind of collective in one group over all ranks; `num_bytes` is what ranks put in."""

    name: str
    group: str
    count: int
    num_bytes: int
    waiting_s: float
    transfer_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Communication:
    """`seconds` is the time that each rank was watched. `num_unmatched` operations were not seen by all their ranks and
    are in no figure. `clock_error_s`: entries closer than that count as simultaneous."""

    ranks: tuple[RankShare, ...]
    operations: tuple[OperationTime, ...]
    seconds: float
    clock_error_s: float = 0.0
    num_unmatched: int = 0
    mode: str = "entry"

    @property
    def latest(self) -> int | None:
        """The rank that others waited for most; None where nobody waited."""
        worst = max(self.ranks, key=lambda share: share.caused_s, default=None)
        return worst.rank if worst is not None and worst.caused_s > 0 else None

    def share(self, kind: str = "seconds") -> float | None:
        """Mean over ranks of the share of the time that went into "seconds", "waiting_s" or "transfer_s"."""
        if not self.ranks or self.seconds <= 0:
            return None
        return float(sum(getattr(share, kind) for share in self.ranks)) / len(self.ranks) / self.seconds

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "latest": self.latest,
            "share": self.share(),
            "waiting_share": self.share("waiting_s"),
            "transfer_share": self.share("transfer_s"),
        }

    def tables(self) -> tuple[Table, ...]:
        def percent(seconds: float) -> str:
            return f"{seconds / self.seconds:.1%}" if self.seconds > 0 else "–"

        rows: list[tuple[Cell, ...]] = [
            (x.rank, x.count, human(x.waiting_s, "s"), percent(x.waiting_s), human(x.transfer_s, "s"),
             percent(x.transfer_s), human(x.caused_s, "s"))
            for x in self.ranks
        ]  # fmt: skip
        found = "nobody waited" if self.latest is None else f"ranks waited for rank {self.latest} most"
        note = f"of {human(self.seconds, 's')}; measured by {self.mode}"
        note += f"; waits below {human(self.clock_error_s, 's')} are lost in the clocks" if self.clock_error_s else ""
        note += f"; {self.num_unmatched} operations not seen by all ranks" if self.num_unmatched else ""
        columns = ("rank", "collectives", "waiting", "", "transfer", "", "others waited for it")
        by_rank = Table(title=f"Communication: {found}", columns=columns, rows=tuple(rows), note=note)
        kinds: list[tuple[Cell, ...]] = [
            (x.name, x.group, x.count, x.num_bytes, human(x.waiting_s, "s"), human(x.transfer_s, "s"))
            for x in sorted(self.operations, key=lambda x: -(x.waiting_s + x.transfer_s))
        ]
        names = ("operation", "group", "count", "bytes", "waiting", "transfer")
        return by_rank, Table(columns=names, rows=tuple(kinds), note="summed over ranks")

    def render(self) -> str:
        return "\n\n".join(table.render() for table in self.tables())

    def _repr_html_(self) -> str:
        return "".join(table.to_html() for table in self.tables())


def split_communication(
    by_rank: Mapping[int, Sequence[CollectiveTime]],
    *,
    seconds: float,
    offsets: Mapping[int, float] | None = None,
    clock_error_s: float = 0.0,
) -> Communication:
    """Waiting and transfer of every rank. `offsets` of each rank's clock from a common one are subtracted.

    A receive waits for its sender, the rank before it in the group's order; a send is transfer.
    """
    offsets = offsets or {}
    totals = {rank: [0.0, 0.0, 0.0, 0.0] for rank in sorted(by_rank)}  # count, waiting, transfer, caused
    kinds: dict[tuple[str, str], list[float]] = {}
    meetings: dict[tuple[str, tuple[int, ...], str, int, int], dict[int, CollectiveTime]] = {}
    for rank, times in by_rank.items():
        for each in times:
            is_pair = each.name in POINT_TO_POINT
            at = each.ranks.index(rank) if is_pair else 0
            first = at - 1 if each.name == "receive" else at  # a message belongs to the rank that sends it
            key = (each.group, each.ranks, "message" if is_pair else each.name, first, each.place)
            meetings.setdefault(key, {})[rank] = each
    num_unmatched = 0
    for (_, ranks, kind, start, _), here in meetings.items():
        expected = set(ranks[start : start + 2] if kind == "message" else ranks)
        if set(here) != expected:
            num_unmatched += 1
            continue
        for rank, (waiting, culprit) in _waits(here, offsets, clock_error_s).items():
            each = here[rank]
            took = each.left_s - each.entered_s + (each.barrier_s or 0.0)
            total = totals[rank]
            total[0] += 1
            total[1] += waiting
            total[2] += max(0.0, took - waiting)
            totals[culprit][3] += waiting
            found = kinds.setdefault((each.name, each.group), [0.0, 0.0, 0.0, 0.0])
            for idx, value in enumerate((1, each.num_bytes, waiting, max(0.0, took - waiting))):
                found[idx] += value
    has_barriers = any(x.barrier_s is not None for times in by_rank.values() for x in times)
    return Communication(
        ranks=tuple(
            RankShare(rank=rank, count=int(count), waiting_s=waiting, transfer_s=transfer, caused_s=caused)
            for rank, (count, waiting, transfer, caused) in totals.items()
        ),
        operations=tuple(
            OperationTime(
                name=name, group=group, count=int(count), num_bytes=int(size), waiting_s=waiting, transfer_s=transfer
            )
            for (name, group), (count, size, waiting, transfer) in sorted(kinds.items())
        ),
        seconds=seconds,
        clock_error_s=clock_error_s,
        num_unmatched=num_unmatched,
        mode="barrier before each operation" if has_barriers else "entry times",
    )


def _waits(
    here: Mapping[int, CollectiveTime], offsets: Mapping[int, float], error_s: float
) -> dict[int, tuple[float, int]]:
    """rank -> (seconds it waited, the rank that it waited for)."""
    barriers = {rank: each.barrier_s for rank, each in here.items() if each.barrier_s is not None}
    if len(barriers) == len(here):
        late = min(barriers, key=lambda rank: barriers[rank])  # who comes last waits least; that is what it costs
        return {rank: (wait - barriers[late], late) for rank, wait in barriers.items()}
    entered = {rank: each.entered_s - offsets.get(rank, 0.0) for rank, each in here.items()}
    late = max(entered, key=lambda rank: entered[rank])
    sender = next((rank for rank, each in here.items() if each.name == "send"), None)
    waits = {}
    for rank, each in here.items():
        left = each.left_s - offsets.get(rank, 0.0)
        wait = min(left, entered[late]) - entered[rank]
        is_waiting = wait > error_s and rank not in (late, sender)
        waits[rank] = (wait if is_waiting else 0.0, late)
    return waits
