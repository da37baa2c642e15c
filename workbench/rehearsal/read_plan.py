"""What one rank will read, counted before anything is read: bytes, read calls, by file and by role."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from workbench.base import Cell, Table
from workbench.loading import PreparedLoad, schedule
from workbench.placement import Layout, rule_for
from workbench.spec import ModelSpec, TensorSpec, published_tensors

__all__ = ["FileReads", "ReadPlan", "all_ranks_bytes", "read_plan"]

_SHOWN_FILES = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class FileReads:
    """One rank's reads of one file. `num_reads` counts calls: neighbours are joined, columns come apart."""

    file: str
    num_tensors: int
    num_bytes: int
    num_reads: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadPlan:
    """The reads of one rank. `bytes_by_role` adds up to `num_bytes` but for padding, which is read to be checked.

    `resident_bytes` is what the rank holds afterwards in `precision`, `largest_piece` the part of it (name, bytes) that
    is largest; `seconds` is how long planning took.
    """

    rank: int
    place: str  # "pp0 dp3 tp1 ep25"
    precision: str
    num_tensors: int
    num_bytes: int
    num_reads: int
    files: tuple[FileReads, ...]
    tensors_by_role: Mapping[str, int]
    bytes_by_role: Mapping[str, int]
    resident_bytes: int
    largest_piece: tuple[str, int]
    window_bytes: int
    seconds: float

    def role_table(self) -> Table:
        """Largest role first."""
        rows: list[tuple[Cell, ...]] = [
            (role, self.tensors_by_role[role], size, f"{size / max(1, self.num_bytes):.2%}")
            for role, size in sorted(self.bytes_by_role.items(), key=lambda item: -item[1])
        ]
        rows.append(("together", self.num_tensors, self.num_bytes, ""))
        return Table(
            title=f"What rank {self.rank} ({self.place}) reads",
            columns=("role", "stored tensors", "bytes", "share"),
            rows=tuple(rows),
            note=f"{self.num_reads:,} read calls in {len(self.files)} files; planned in {self.seconds:.1f} s",
        )

    def file_table(self, limit: int = _SHOWN_FILES) -> Table:
        shown = self.files[:limit]
        rest = self.files[limit:]
        rows: list[tuple[Cell, ...]] = [(x.file, x.num_tensors, x.num_bytes, x.num_reads) for x in shown]
        if rest:
            sums = (sum(x.num_tensors for x in rest), sum(x.num_bytes for x in rest), sum(x.num_reads for x in rest))
            rows.append((f"and {len(rest)} more files", *sums))
        return Table(columns=("file", "stored tensors", "bytes", "read calls"), rows=tuple(rows))

    def to_json(self) -> dict[str, object]:
        return {
            "rank": self.rank,
            "place": self.place,
            "precision": self.precision,
            "num_tensors": self.num_tensors,
            "num_bytes": self.num_bytes,
            "num_reads": self.num_reads,
            "files": [
                {"file": x.file, "tensors": x.num_tensors, "bytes": x.num_bytes, "reads": x.num_reads}
                for x in self.files
            ],
            "tensors_by_role": dict(self.tensors_by_role),
            "bytes_by_role": dict(self.bytes_by_role),
            "resident_bytes": self.resident_bytes,
            "largest_piece": {"name": self.largest_piece[0], "bytes": self.largest_piece[1]},
            "window_bytes": self.window_bytes,
            "seconds": self.seconds,
        }


def read_plan(prepared: PreparedLoad, precision: str) -> ReadPlan:
    """The reads that `load_in_pieces` will make, call by call."""
    plan, spec = prepared.plan, prepared.checkpoint.spec
    tensors, size, reads = Counter[str](), Counter[str](), Counter[str]()
    shares: dict[str, tuple[str, int]] = {}  # name -> file, bytes
    for x in plan.assignments:
        for source in x.sources.values():
            shares[source.entry.name] = (source.entry.file, source.num_bytes)
        for extent in x.padding:
            size[extent.file] += extent.num_bytes
    for file, num_bytes in shares.values():
        tensors[file] += 1
        size[file] += num_bytes
    for part in prepared.pieces().values():
        for batch in schedule(part, prepared.window):
            for read in batch.reads:
                reads[read.extent.file] += read.extent.count
    role_tensors, role_bytes = Counter[str](), Counter[str]()
    for tensor in published_tensors(spec):
        if (share := shares.get(tensor.name)) is not None:
            role_tensors[tensor.role] += 1
            role_bytes[tensor.role] += share[1]
    at = prepared.layout.coords(plan.rank)
    return ReadPlan(
        rank=plan.rank,
        place=f"pp{at.pp} dp{at.dp} tp{at.tp} ep{at.ep}",
        precision=precision,
        num_tensors=plan.num_tensors,
        num_bytes=sum(size.values()),
        num_reads=sum(reads.values()),
        files=tuple(
            FileReads(file=file, num_tensors=tensors[file], num_bytes=size[file], num_reads=reads[file])
            for file in plan.files
        ),
        tensors_by_role=dict(role_tensors),
        bytes_by_role=dict(role_bytes),
        resident_bytes=prepared.resident_bytes,
        largest_piece=max(prepared.piece_bytes().items(), key=lambda item: item[1]),
        window_bytes=prepared.window_bytes,
        seconds=prepared.seconds,
    )


def all_ranks_bytes(spec: ModelSpec, layout: Layout) -> int:
    """Bytes that all ranks of `layout` read together: each tensor as often as it is held, whole or in slices."""
    return sum(_copies(spec, layout, tensor) * tensor.num_bytes for tensor in published_tensors(spec))


def _copies(spec: ModelSpec, layout: Layout, tensor: TensorSpec) -> int:
    """How often the ranks of one stage hold a tensor, slices of it put together."""
    rule = rule_for(spec, layout, tensor.param)
    if tensor.expert is not None:
        sliced = 1 if rule.dim is None else layout.expert_tp
        return layout.dp * layout.tp // (layout.ep * sliced)
    return layout.dp * (layout.tp if rule.dim is None else 1)
