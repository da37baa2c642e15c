"""Collectives of one rank: each is counted, and the last one is remembered for the post-mortem.

`Group` is a set of ranks that talk for one purpose; with one member every operation is the identity and nothing is
counted. Backends send plain bytes only, so a tensor of a type they do not know (8-bit floats) travels as uint8.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["CollectiveLog", "CollectiveRecord", "CollectiveTotal", "Group"]

# torch 2.13 renamed these two and warns at the old name; 2.11 knows only the old one.
_HAS_NEW_NAME = hasattr(dist, "all_gather_single")
_all_gather_flat: Callable[..., object] = dist.all_gather_single if _HAS_NEW_NAME else dist.all_gather_into_tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveRecord:
    """One operation as this rank entered it. `num_bytes` is what this rank puts in (or takes out, for a receive)."""

    sequence: int
    name: str
    group: str
    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    started_s: float  # time.monotonic()

    def __str__(self) -> str:
        return f"#{self.sequence} {self.name} {self.dtype}{list(self.shape)} over {self.group} ranks {list(self.ranks)}"


@dataclass(slots=True)
class CollectiveTotal:
    count: int = 0
    num_bytes: int = 0


@dataclass(slots=True)
class CollectiveLog:
    """Counts and bytes by (group, operation), and the most recent operations of this rank.

    `last` is set before the operation starts and `is_last_finished` after it returns: a rank that is stuck shows the
    operation it waits in. (An accelerator's backend returns once the operation is queued.) `listener`, where set, is
    called with each record before the operation starts, and `finished` after it returns.
    """

    totals: dict[tuple[str, str], CollectiveTotal] = field(default_factory=dict)
    recent: deque[CollectiveRecord] = field(default_factory=lambda: deque(maxlen=32))
    last: CollectiveRecord | None = None
    is_last_finished: bool = True
    listener: Callable[[CollectiveRecord], None] | None = None
    finished: Callable[[CollectiveRecord], None] | None = None
    num_operations: int = 0

    @contextmanager
    def record(self, name: str, group: Group, tensor: Tensor) -> Iterator[None]:
        size = tensor.numel() * tensor.element_size()
        entry = CollectiveRecord(
            sequence=self.num_operations,
            name=name,
            group=group.name,
            ranks=group.ranks,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            num_bytes=size,
            started_s=time.monotonic(),
        )
        self.num_operations += 1
        self.last, self.is_last_finished = entry, False
        self.recent.append(entry)
        if self.listener is not None:
            self.listener(entry)
        yield
        self.is_last_finished = True  # not in a `finally`: an operation that raised has not finished
        total = self.totals.setdefault((group.name, name), CollectiveTotal())
        total.count += 1
        total.num_bytes += size
        if self.finished is not None:
            self.finished(entry)

    def reset(self) -> None:
        """Forget the totals; the sequence number and the last operation stay."""
        self.totals.clear()

    def count(self, name: str | None = None, group: str | None = None) -> int:
        """Operations finished, of one name or of one group where given."""
        return sum(t.count for (g, n), t in self.totals.items() if name in (None, n) and group in (None, g))

    def num_bytes(self, name: str | None = None, group: str | None = None) -> int:
        return sum(t.num_bytes for (g, n), t in self.totals.items() if name in (None, n) and group in (None, g))

    def describe_last(self) -> str:
        """One line for a post-mortem."""
        if self.last is None:
            return "no collective was started"
        state = "finished" if self.is_last_finished else "not finished"
        return f"{self.last}, {state}, started {time.monotonic() - self.last.started_s:.1f} s ago"

    def render(self) -> str:
        lines = [f"{'group':<16}{'operation':<14}{'count':>8}{'bytes':>16}"]
        for (group, name), total in sorted(self.totals.items()):
            lines.append(f"{group:<16}{name:<14}{total.count:>8}{total.num_bytes:>16,}")
        return "\n".join(lines)


class Group:
    """Ranks that talk for one purpose. `rank` is the place of this process among `ranks` (global ranks, ascending)."""

    def __init__(
        self,
        name: str,
        *,
        ranks: tuple[int, ...] = (0,),
        rank: int = 0,
        handle: dist.ProcessGroup | None = None,
        log: CollectiveLog | None = None,
    ) -> None:
        assert len(ranks) == 1 or handle is not None, f"group {name} of {len(ranks)} ranks needs a process group"
        self.name, self.ranks, self.rank, self.handle = name, ranks, rank, handle
        self.log = log if log is not None else CollectiveLog()

    @property
    def size(self) -> int:
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"Group({self.name!r}, ranks={list(self.ranks)}, rank={self.rank})"

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in the dtype of `x`; `x` itself is left alone. Shapes must be equal on all ranks."""
        if self.size == 1:
            return x
        out = x.clone(memory_format=torch.contiguous_format)
        with self.log.record("all_reduce", self, out):
            dist.all_reduce(out, group=self.handle)
        return out

    def all_gather(self, x: Tensor) -> Tensor:
        """Equal pieces stacked in rank order: shape (size, *x.shape)."""
        if self.size == 1:
            return x.unsqueeze(0)
        x = x.contiguous()
        out = x.new_empty((self.size, *x.shape))
        with self.log.record("all_gather", self, x):
            _all_gather_flat(_as_bytes(out), _as_bytes(x.unsqueeze(0)), group=self.handle)
        return out

    def gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Pieces of `counts[r]` rows one behind another: (sum(counts), ...). The largest piece sets what is sent."""
        assert len(counts) == self.size, (counts, self)
        assert x.shape[0] == counts[self.rank], (x.shape, counts, self)
        if self.size == 1:
            return x
        most = max(counts)
        if min(counts) == most:
            return self.all_gather(x).flatten(0, 1)
        padded = x
        if x.shape[0] < most:
            padded = torch.cat([x, x.new_zeros((most - x.shape[0], *x.shape[1:]))])
        pieces = self.all_gather(padded)
        return torch.cat([pieces[r, :count] for r, count in enumerate(counts)])

    def exchange(self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        """All-to-all of rows: the first `send_counts[0]` rows go to rank 0, and so on; received in rank order."""
        if self.size == 1:
            return x
        x = x.contiguous()
        out = x.new_empty((sum(receive_counts), *x.shape[1:]))
        with self.log.record("all_to_all", self, x):
            dist.all_to_all_single(
                _as_bytes(out), _as_bytes(x), list(receive_counts), list(send_counts), group=self.handle
            )
        return out

    def row_counts(self, count: int, device: torch.device) -> tuple[int, ...]:
        """The row count of every rank; one small all-gather."""
        if self.size == 1:
            return (count,)
        return tuple(self.all_gather(torch.tensor([count], dtype=torch.int64, device=device)).flatten().tolist())

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """`x` of the rank at place `source`; shape and dtype must be equal on all ranks."""
        if self.size == 1:
            return x
        out = x.contiguous() if self.rank == source else torch.empty_like(x, memory_format=torch.contiguous_format)
        with self.log.record("broadcast", self, out):
            dist.broadcast(_as_bytes(out), group=self.handle, group_src=source)
        return out

    def send(self, x: Tensor, to: int) -> None:
        """To the rank at place `to`; blocks until the tensor may be reused."""
        x = x.contiguous()
        with self.log.record("send", self, x):
            dist.send(_as_bytes(x), group=self.handle, group_dst=to)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, source: int) -> Tensor:
        """From the rank at place `source`."""
        out = torch.empty(tuple(shape), dtype=dtype, device=device)
        with self.log.record("receive", self, out):
            dist.recv(_as_bytes(out), group=self.handle, group_src=source)
        return out

    def barrier(self) -> None:
        if self.size > 1:
            with self.log.record("barrier", self, torch.empty(0)):
                dist.barrier(group=self.handle)


def _as_bytes(x: Tensor) -> Tensor:
    """8-bit floats as uint8, the same memory; other dtypes unchanged."""
    return x.view(torch.uint8) if x.is_floating_point() and x.element_size() == 1 else x
