"""The ledger of a load: what the model holds, which bytes filled it, and whether every row was written exactly once.

It is opened from the model, not from the plan, so a parameter that the plan forgot shows up as missing.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn

from workbench.base import LoadError, Table
from workbench.nn.linear import MatrixStore

__all__ = ["Ledger", "LedgerEntry", "SourceRef", "Sums", "content_sums"]

BLOCK = 1 << 17  # elements looked at together by a content check, whose float copy is memory beside the window
SHOWN = 8
NAN_SCALE = 255.0  # of an E8M0 exponent
Sums = tuple[float, float]  # sum of squares, number of all-zero rows
GHOST_WARNING = "a ghost was loaded: there are no weights, every value is zero"


@dataclass(frozen=True, slots=True)
class SourceRef:
    """A stored tensor and the bytes of it that this rank read."""

    name: str
    file: str
    offset: int  # of the first byte read
    num_bytes: int


@dataclass(slots=True)
class LedgerEntry:
    """One tensor of the model, or one slot of a stacked one, and how it was filled.

    `norm` is the Euclidean norm of what was written (codes count as numbers; for rows that were encoded here, of the
    plain values before). Squares of norms add up over row and column slices, so shards can be held against the whole.
    """

    name: str  # of the parameter or buffer in the model
    slot: int | None  # row of a stacked parameter, None otherwise
    num_rows: int
    num_columns: int
    sources: tuple[SourceRef, ...] = ()
    transform: str = ""
    written: list[tuple[int, int]] = field(default_factory=list)  # row ranges [first, last)
    norm: float | None = None
    zero_rows: int | None = None

    @property
    def label(self) -> str:
        return self.name if self.slot is None else f"{self.name}[{self.slot}]"

    @property
    def is_matrix(self) -> bool:
        return self.num_rows > 1 and self.num_columns > 1

    @property
    def num_bytes(self) -> int:
        return sum(source.num_bytes for source in self.sources)

    def missing_rows(self) -> list[tuple[int, int]]:
        edges = [(0, 0), *sorted(self.written), (self.num_rows, self.num_rows)]
        return [(a[1], b[0]) for a, b in pairwise(edges) if b[0] > a[1]]


class Ledger:
    """Entries of one rank. `record` while loading, `close` at the end, then read `entries`, `warnings`, `summary()`.

    `is_ghost`: the files say that they hold no weights, so zeros are what must come, and nothing else.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        rank: int = 0,
        check: bool = True,
        device: torch.device | str = "cpu",
        is_ghost: bool = False,
    ) -> None:
        self.rank, self.check, self.is_ghost = rank, check, is_ghost
        self.warnings: list[str] = [GHOST_WARNING] if is_ghost else []
        self._entries = {(entry.name, entry.slot): entry for entry in _entries_of(model)}
        self._places = {key: place for place, key in enumerate(self._entries)}
        # Per entry: sum of squares, all-zero rows, largest stored scale byte (-1: none seen). One table made before the
        # load: a small tensor kept per entry would lie between freed temporaries and stop the allocator from reusing
        # them, which was seen to grow the process by as much as the checkpoint.
        self._table = torch.tensor([0.0, 0.0, -1.0], device=device).repeat(len(self._entries), 1)
        self._observed: set[int] = set()

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        return tuple(self._entries.values())

    def entry(self, name: str, slot: int | None = None) -> LedgerEntry:
        """Raises KeyError for a name the model does not have."""
        return self._entries[name, slot]

    def record(
        self,
        name: str,
        slot: int | None,
        rows: tuple[int, int],
        *,
        sources: tuple[SourceRef, ...] = (),
        transform: str = "",
    ) -> None:
        """Rows [first, last) are about to be written. Raises LoadError where the model has no such rows, or where one
        of them has been written before."""
        entry = self._entries.get((name, slot))
        if entry is None or not 0 <= rows[0] < rows[1] <= entry.num_rows:
            label = name if slot is None else f"{name}[{slot}]"
            raise LoadError(f"left over: rows {rows} of {label} have no place in the model", where=f"rank {self.rank}")
        for first, last in entry.written:
            if first < rows[1] and rows[0] < last:
                names = ", ".join(source.name for source in sources)
                raise LoadError(
                    f"written twice: rows {max(first, rows[0])}..{min(last, rows[1])} of {entry.label}, "
                    f"now from {names}",
                    where=f"rank {self.rank}",
                )
        if entry.written and entry.written[-1][1] == rows[0]:
            entry.written[-1] = (entry.written[-1][0], rows[1])
        else:
            entry.written.append(rows)
        entry.sources = tuple(dict.fromkeys([*entry.sources, *sources]))
        entry.transform = transform

    @torch.no_grad()
    def observe(self, name: str, slot: int | None, values: Tensor, sums: Sums | None = None) -> None:
        """Add rows that were written to the content check; `sums` are theirs, where they have been formed already."""
        if self.check:
            place = self._places[name, slot]
            self._observed.add(place)
            self._table[place, :2] += content_sums(values) if sums is None else torch.tensor(sums)

    @torch.no_grad()
    def observe_scale(self, name: str, slot: int | None, scale: Tensor) -> None:
        """Add rows of the stored scale that go with a tensor."""
        if self.check and scale.numel():
            highest = self._table[self._places[name, slot], 2]
            if scale.dtype != torch.uint8:  # in the terms of scale bytes: 0 is zero, 255 is NaN
                scale = scale.float()  # eight-bit floats have no such tests of their own
                scale = torch.where(scale.isfinite(), (scale != 0).to(torch.uint8), NAN_SCALE)
            torch.maximum(highest, scale.amax().float(), out=highest)

    def close(self, planned: Iterator[str] | None = None) -> None:
        """Check that every row was written and, with `check`, that contents are plausible; nothing is recorded later.

        `planned` names the stored tensors that were to be read. Raises LoadError naming what is missing, left over, or
        has a scale or matrix of zeros or values that are not finite. A vector of zeros and a matrix with rows of zeros
        are warnings: a correction bias may be zero, and rows of unused tokens may be.
        """
        problems: list[str] = []
        used: set[str] = set()
        for entry in self._entries.values():
            used.update(source.name for source in entry.sources)
            gaps = entry.missing_rows()
            if gaps:
                problems.append(f"missing: {entry.label} rows {', '.join(f'{a}..{b}' for a, b in gaps[:3])}")
        problems += [f"left over: {name} was planned and filled nothing" for name in planned or () if name not in used]
        problems += self._check_contents()
        if problems:
            more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
            raise LoadError(
                f"{len(problems)} problems: " + "; ".join(problems[:SHOWN]) + more,
                where=f"rank {self.rank}",
                next_step="Run `workbench audit` on the folder",
            )

    def _check_contents(self) -> Iterator[str]:
        rows = self._table.tolist()
        for place, entry in enumerate(self._entries.values()):
            if place not in self._observed:
                continue
            square, zero_rows, scale_peak = rows[place]
            entry.norm, entry.zero_rows = square**0.5, int(zero_rows)
            is_scale = entry.name.endswith(".weight_scale")
            names = ", ".join(source.name for source in entry.sources)
            if self.is_ghost:
                is_made_here = is_scale and "encode" in entry.transform
                if (square or scale_peak > 0) and not is_made_here:
                    yield f"not zero, in files that are marked as a ghost: {entry.label} (from {names})"
            elif not math.isfinite(square):
                yield f"not finite: {entry.label} (from {names})"
            elif scale_peak == NAN_SCALE:
                yield f"not finite: the scale of {entry.label} holds byte 255, which is NaN (from {names})"
            elif scale_peak == 0.0:
                yield f"all zero: the scale of {entry.label} (from {names})"
            elif square == 0.0 and (entry.is_matrix or is_scale):
                yield f"all zero: {entry.label} (from {names})"
            elif square == 0.0:
                self.warnings.append(f"{entry.label} is all zero (from {names})")
            elif entry.is_matrix and zero_rows:
                self.warnings.append(f"{entry.label} has {int(zero_rows)} of {entry.num_rows} rows all zero")

    def summary(self) -> dict[str, object]:
        """Counts and bytes by transform, and the warnings; JSON-ready."""
        by_transform: dict[str, dict[str, int]] = {}
        for entry in self._entries.values():
            row = by_transform.setdefault(entry.transform, {"tensors": 0, "bytes": 0})
            row["tensors"] += 1
            row["bytes"] += entry.num_bytes
        return {
            "rank": self.rank,
            "entries": len(self._entries),
            "rows": sum(entry.num_rows for entry in self._entries.values()),
            "rows_written": sum(b - a for entry in self._entries.values() for a, b in entry.written),
            "bytes": sum(entry.num_bytes for entry in self._entries.values()),
            "files": len({source.file for entry in self._entries.values() for source in entry.sources}),
            "transforms": by_transform,
            "checked": self.check,
            "is_ghost": self.is_ghost,
            "warnings": list(self.warnings),
        }

    def table(self, limit: int | None = 40) -> Table:
        """The first `limit` entries (None: all), and below them counts by transform and the warnings."""
        shown = list(self._entries.values())[:limit]
        counts = Counter(entry.transform for entry in self._entries.values())
        notes = [f"and {len(self._entries) - len(shown)} more"] if len(shown) < len(self._entries) else []
        notes.append("; ".join(f"{number} x {name}" for name, number in counts.most_common()))
        notes += [f"warning: {text}" for text in self.warnings]
        return Table(
            title=f"ledger of rank {self.rank}",
            columns=("parameter", "rows", "bytes", "norm", "transform", "file", "offset"),
            rows=tuple(
                (x.label, x.num_rows, x.num_bytes, x.norm, x.transform, x.sources[0].file, x.sources[0].offset)
                if x.sources
                else (x.label, x.num_rows, 0, x.norm, "", "", None)
                for x in shown
            ),
            note="\n".join(notes),
        )

    def render(self, limit: int | None = 40) -> str:
        """`table(limit)` as text."""
        return self.table(limit).render()

    def to_json(self) -> str:
        """Every entry as JSON."""
        entries = [
            {
                "name": entry.name,
                "slot": entry.slot,
                "rows": entry.num_rows,
                "columns": entry.num_columns,
                "written": entry.written,
                "transform": entry.transform,
                "norm": entry.norm,
                "zero_rows": entry.zero_rows,
                "sources": [
                    {"name": s.name, "file": s.file, "offset": s.offset, "bytes": s.num_bytes} for s in entry.sources
                ],
            }
            for entry in self._entries.values()
        ]
        return json.dumps({**self.summary(), "parameters": entries})


def _entries_of(model: nn.Module) -> Iterator[LedgerEntry]:
    stacks = {
        prefix: module.logical_shape[0]
        for prefix, module in model.named_modules()
        if isinstance(module, MatrixStore) and len(module.logical_shape) == 3
    }
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        slots = stacks.get(name.rpartition(".")[0])
        shape = tuple(tensor.shape) if slots is None else tuple(tensor.shape[1:])
        columns = math.prod(shape[1:])
        if slots is None:
            yield LedgerEntry(name, None, shape[0], columns)
        else:
            yield from (LedgerEntry(name, slot, shape[0], columns) for slot in range(slots))


def content_sums(values: Tensor) -> Tensor:
    """[sum of squares, number of all-zero rows] of some rows, in float32; a vector is one row.

    Blocks are cast into one buffer that stays in the cache and their norms are one pass: 5 GB/s of bf16 on one core,
    where casts into fresh memory, squares and sums make 2.
    """
    rows = values.flatten(1) if values.dim() > 1 else values.unsqueeze(0)
    if rows.dtype in (torch.bfloat16, torch.float16) and rows.is_contiguous() and rows.device.type == "cpu":
        squares = _half_row_squares(rows)
        return torch.stack([squares.sum(), (squares == 0).sum()])
    num_rows, num_columns = rows.shape
    per_block = min(num_rows, max(1, BLOCK // max(1, num_columns)))
    is_float = rows.dtype == torch.float32
    buffer = torch.empty((0 if is_float else per_block, num_columns), device=values.device)
    norms = torch.empty(num_rows, device=values.device)
    for first in range(0, num_rows, per_block):
        block = rows[first : first + per_block]
        if not is_float:
            block = buffer[: len(block)].copy_(block)
        torch.linalg.vector_norm(block, dim=1, out=norms[first : first + per_block])
    squares = norms.square_()
    return torch.stack([squares.sum(), (squares == 0).sum()])


def _half_row_squares(rows: Tensor) -> Tensor:
    """Sums of squares of 16-bit rows (R, C) -> (R,) float32, by the statistics that a batch norm takes of R channels.

    Of torch's reductions on a CPU it is the one that reads 16 bits, adds up in 32 and gives 32 back, in one call that
    leaves the interpreter alone: two threads sum 11 GB/s, where blocks that are cast and normed get 4, waiting for each
    other between many short calls.
    """
    ignored = torch.zeros(2, len(rows))
    mean, variance = torch.batch_norm_update_stats(rows.unsqueeze(0), ignored[0], ignored[1], 0.0)
    return (variance + mean.square()) * rows.shape[1]
