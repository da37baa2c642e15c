"""What every rank entered last, kept in files that outlive the ranks, and compared while they still hang.

A rank that skips a collective is rarely the one that hangs, and often nothing hangs at once: its next operation pairs
with the one the others wait in, and the numbers are wrong from there on. So each rank notes the operations of every
group in order, with the step they belong to, and whoever watches compares: operation number n of a group must be the
same on all its ranks. A watchdog that ends the ranks first would leave nothing to compare.
"""

from __future__ import annotations

import json
import mmap
import struct
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from workbench.parallel.collectives import CollectiveLog, CollectiveRecord

__all__ = ["FlightEntry", "FlightFinding", "FlightRecorder", "compare_flights", "read_flights", "save_flights"]

_ENTRY = struct.Struct("<QqQdH")  # number from 1, step, place in its group, time, length of the text
_TEXT = 200
_SIZE = _ENTRY.size + _TEXT
NUM_ENTRIES = 512
MESSAGES = ("send", "receive")  # two ranks name the same message differently


@dataclass(frozen=True, kw_only=True, slots=True)
class FlightEntry:
    """One operation as a rank entered it: the `place`-th of its group (from 0), in the caller's `step`."""

    step: int
    place: int
    entered_s: float  # time.time()
    name: str
    dtype: str
    group: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} of step {self.step} (operation {self.place} over {self.group} ranks {list(self.ranks)})"


@dataclass(frozen=True, kw_only=True, slots=True)
class FlightFinding:
    """`ranks` are those that fell out of step; `message` says of what, in one line."""

    ranks: tuple[int, ...]
    step: int
    operation: str
    message: str


class FlightRecorder:
    """Notes the operations of a log in a file. Set `step` whenever a new one begins; the ring holds NUM_ENTRIES."""

    def __init__(self, path: Path, log: CollectiveLog) -> None:
        self.step = 0
        path.write_bytes(bytes(NUM_ENTRIES * _SIZE))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), NUM_ENTRIES * _SIZE)
        self._places: dict[tuple[str, tuple[int, ...]], int] = defaultdict(int)
        self._count = 0
        self._next = log.listener
        log.listener = self.note

    def note(self, record: CollectiveRecord) -> None:
        place = self._places[record.group, record.ranks]
        self._places[record.group, record.ranks] += 1
        ranks = ",".join(map(str, record.ranks))
        text = "\t".join((record.name, record.dtype, record.group, ranks)).encode()[:_TEXT]
        start = self._count % NUM_ENTRIES * _SIZE
        self._count += 1
        self._map[start + _ENTRY.size : start + _ENTRY.size + len(text)] = text
        _ENTRY.pack_into(self._map, start, self._count, self.step, place, time.time(), len(text))
        if self._next is not None:
            self._next(record)


def read_flights(paths: Mapping[int, Path]) -> dict[int, tuple[FlightEntry, ...]]:
    """Entries of each rank, oldest first. A file that is missing or cut gives what it holds."""
    flights = {}
    for rank, path in paths.items():
        try:
            data = path.read_bytes()
        except OSError:
            data = b""
        numbered = []
        for start in range(0, len(data) - _SIZE + 1, _SIZE):
            number, step, place, entered_s, length = _ENTRY.unpack_from(data, start)
            fields = data[start + _ENTRY.size : start + _ENTRY.size + length].decode("utf-8", "replace").split("\t")
            if number == 0 or len(fields) != 4 or not all(word.isdecimal() for word in fields[3].split(",")):
                continue
            name, dtype, group, ranks = fields
            entry = FlightEntry(
                step=step,
                place=place,
                entered_s=entered_s,
                name=name,
                dtype=dtype,
                group=group,
                ranks=tuple(map(int, ranks.split(","))),
            )
            numbered.append((number, entry))
        flights[rank] = tuple(entry for _, entry in sorted(numbered, key=lambda item: item[0]))
    return flights


def compare_flights(
    flights: Mapping[int, Sequence[FlightEntry]], *, stall_s: float = 5.0, now: float | None = None
) -> FlightFinding | None:
    """The earliest disagreement among ranks of one group, else the oldest operation that a rank has entered `stall_s`
    ago and another has not; None where all are in step."""
    now = time.time() if now is None else now
    groups: dict[tuple[str, tuple[int, ...]], dict[int, dict[int, FlightEntry]]] = {}
    for rank, entries in flights.items():
        for entry in entries:
            if entry.name not in MESSAGES:
                groups.setdefault((entry.group, entry.ranks), {}).setdefault(rank, {})[entry.place] = entry
    found = []
    for (_, members), by_rank in groups.items():
        watched = {rank: by_rank.get(rank, {}) for rank in members if rank in flights}
        finding = _disagreement(watched) or _stall(watched, stall_s, now)
        if finding is not None:
            found.append(finding)
    return min(found, key=lambda item: item[0])[1] if found else None


def _disagreement(by_rank: Mapping[int, Mapping[int, FlightEntry]]) -> tuple[float, FlightFinding] | None:
    for place in sorted({place for entries in by_rank.values() for place in entries}):
        here = {rank: entries[place] for rank, entries in by_rank.items() if place in entries}
        kinds = {(entry.step, entry.name, entry.dtype) for entry in here.values()}
        if len(kinds) < 2:
            continue
        # Who skips is ahead of the others: its entry belongs to a later step. Within one step the fewest are off.
        first = min(entry.step for entry in here.values())
        ahead = [rank for rank, entry in here.items() if entry.step > first]
        if ahead:
            waiting = next(entry for entry in here.values() if entry.step == first)
            text = f"skipped {waiting}: entered {here[ahead[0]].name} of step {here[ahead[0]].step} instead"
        else:
            by_kind: dict[tuple[str, str], list[int]] = defaultdict(list)
            for rank, entry in here.items():
                by_kind[entry.name, entry.dtype].append(rank)
            ahead = min(by_kind.values(), key=len)
            waiting = next(entry for rank, entry in here.items() if rank not in ahead)
            text = f"entered {here[ahead[0]].name} in {here[ahead[0]].dtype} where others entered {waiting}"
            text += f" in {waiting.dtype}"
        return waiting.entered_s, _finding(ahead, waiting, text)
    return None


def _stall(
    by_rank: Mapping[int, Mapping[int, FlightEntry]], stall_s: float, now: float
) -> tuple[float, FlightFinding] | None:
    last = {rank: max(entries, default=-1) for rank, entries in by_rank.items()}
    furthest = max(last.values(), default=-1)
    behind = [rank for rank, place in last.items() if place < furthest]
    if not behind:
        return None
    place = min(last[rank] for rank in behind) + 1
    entry = next((entries[place] for entries in by_rank.values() if place in entries), None)
    if entry is None or now - entry.entered_s < stall_s:
        return None
    late = [rank for rank in behind if last[rank] < place]
    return entry.entered_s, _finding(late, entry, f"did not enter {entry}, entered {now - entry.entered_s:.1f} s ago")


def _finding(ranks: Sequence[int], entry: FlightEntry, text: str) -> FlightFinding:
    names = f"rank{'s' if len(ranks) > 1 else ''} {' '.join(map(str, ranks))}"
    return FlightFinding(ranks=tuple(ranks), step=entry.step, operation=entry.name, message=f"{names} {text}")


def save_flights(
    path: Path, flights: Mapping[int, Sequence[FlightEntry]], finding: FlightFinding | None = None
) -> None:
    """The evidence as JSON: what was found, and every rank's entries."""
    record = {
        "saved_at": time.time(),
        "finding": None if finding is None else asdict(finding),
        "flights": {str(rank): [asdict(entry) for entry in entries] for rank, entries in flights.items()},
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
