"""New tokens of several sequences, packed one behind another, and the index tables that every layer needs of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from workbench.base import RequestError
from workbench.nn.gather import RowMap

__all__ = ["Segments", "TokenBatch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBatch:
    """One forward pass of T new tokens of S sequences, without padding. Raises RequestError where sizes disagree.

    Tokens of one sequence are neighbours, sequences stand in the order of `lengths`. T = 0 is allowed: a rank without
    tokens still takes part in collectives.
    """

    token_ids: Tensor  # (T,) int64
    lengths: tuple[int, ...]  # new tokens of each sequence, at least 1
    starts: tuple[int, ...]  # tokens of each sequence that are in the cache already
    slots: tuple[int, ...]  # cache slot of each sequence
    logit_rows: Tensor  # (R,) int64 rows of T whose logits are wanted
    image_rows: Tensor | None = None  # (M,) int64 rows of T whose embeddings are image features
    image_features: Tensor | None = None  # (M, D), with n states of DeepStack (M, (1 + n) D)
    rope_positions: Tensor | None = None  # (3, T) int64 time, height, width of M-RoPE; None: places in the sequence
    zero_rows: Tensor | None = None  # (Z,) int64 rows whose embedding is zeroed (pad tokens of a prompt with images)
    tentative: tuple[int, ...] = ()  # sequences whose tokens may turn out not to have happened; see `nn.rewind`

    def __post_init__(self) -> None:
        if not len(self.lengths) == len(self.starts) == len(self.slots):
            raise RequestError(
                "lengths, starts and slots count different sequences",
                found=(len(self.lengths), len(self.starts), len(self.slots)),
            )
        if sum(self.lengths) != self.num_tokens or min(self.lengths, default=1) < 1 or min(self.starts, default=0) < 0:
            raise RequestError(
                f"lengths {self.lengths} from {self.starts} do not describe {self.num_tokens} tokens",
                expected="at least one new token of every sequence, and the sum of all lengths",
            )
        if len(set(self.slots)) != len(self.slots):
            raise RequestError(f"two sequences share a cache slot: {self.slots}")
        if (self.image_rows is None) != (self.image_features is None):
            raise RequestError("image_rows and image_features go together")
        if self.rope_positions is not None and self.rope_positions.shape != (3, self.num_tokens):
            raise RequestError(
                "positions of M-RoPE are three for each token",
                found=tuple(self.rope_positions.shape),
                expected=(3, self.num_tokens),
            )

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @classmethod
    def whole(
        cls,
        sequences: Sequence[Sequence[int]],
        *,
        all_logits: bool = False,
        device: torch.device | str | None = None,
    ) -> TokenBatch:
        """Whole sequences from their first token, in slots 0, 1, ...; logits of the last token of each, or of all."""
        ids = [token for sequence in sequences for token in sequence]
        ends = list(accumulate(len(sequence) for sequence in sequences))
        rows = list(range(len(ids))) if all_logits else [end - 1 for end in ends]
        return cls(
            token_ids=torch.tensor(ids, dtype=torch.int64, device=device),
            lengths=tuple(len(sequence) for sequence in sequences),
            starts=(0,) * len(sequences),
            slots=tuple(range(len(sequences))),
            logit_rows=torch.tensor(rows, dtype=torch.int64, device=device),
        )


class Segments:
    """Where the sequences of a batch lie among its T packed rows; built once per forward pass, used by every layer.

    Tables are int64 tensors on the device of the batch. `rows_of(s)` is the slice of sequence s.
    """

    def __init__(self, batch: TokenBatch):
        self.device = batch.token_ids.device
        self.num_tokens = batch.num_tokens
        self.lengths, self.starts, self.slots = batch.lengths, batch.starts, batch.slots
        self.offsets = (0, *accumulate(batch.lengths))
        self.slot_index = self.table(self.slots)  # (S,)
        self.is_fresh = self.table(self.starts) == 0  # (S,)
        # Cache coordinates of every row: the slot, and the position in the sequence.
        self.token_slots = self.table(s for s, n in zip(self.slots, self.lengths, strict=True) for _ in range(n))
        self.positions = self.table(p for a, n in zip(self.starts, self.lengths, strict=True) for p in range(a, a + n))
        self.rope_positions = batch.rope_positions  # (3, T) or None
        self.tentative = batch.tentative
        singles = [s for s, length in enumerate(self.lengths) if length == 1]
        self.singles = self.table(singles)  # sequences of one new token, and the rows where those stand
        self.single_rows = self.table(self.offsets[s] for s in singles)
        self.choice: list[Tensor] | None = None  # of the last sparse indexer: (n, L) bool of every sequence
        self._windows: dict[int, tuple[Tensor, Tensor]] = {}
        self._reach: dict[int, Tensor] = {}
        self._chunks: dict[int, ChunkTable] = {}
        self._padded: tuple[PaddedGroup, ...] | None = None
        self._once: dict[Hashable, Any] = {}

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths, default=0)

    @cached_property
    def settled(self) -> Tensor:
        """(S',) the sequences that are not tentative."""
        return self.table(s for s in range(self.num_sequences) if s not in self.tentative)

    @cached_property
    def tentative_rows(self) -> Tensor:
        """(R,) the rows of the tentative sequences, one sequence behind another."""
        return self.table(row for s in self.tentative for row in range(self.offsets[s], self.offsets[s + 1]))

    def rows_of(self, sequence: int) -> slice:
        return slice(self.offsets[sequence], self.offsets[sequence + 1])

    def windows(self, size: int) -> tuple[Tensor, Tensor]:
        """Rows that a causal window of `size` covers, in the list [S * (size - 1) rows before | T new rows].

        Returns (T, size), oldest first and ending with the row itself, and (S, size - 1): the last rows of every
        sequence, which the next call will need as its rows before.

            sequence s:   before_0 before_1 before_2 | new_0 new_1 ...        (size 4)
            window of new_1:       before_1 before_2   new_0 new_1
        """
        if size not in self._windows:
            before = size - 1
            lists = [
                [*range(s * before, (s + 1) * before), *range(first, first + length)]
                for s, (length, first) in enumerate(
                    zip(self.lengths, (before * self.num_sequences + x for x in self.offsets), strict=False)
                )
            ]
            windows = [rows[i : i + size] for rows in lists for i in range(len(rows) - before)]
            tails = [rows[len(rows) - before :] for rows in lists]
            self._windows[size] = (
                self.table(windows).view(self.num_tokens, size),
                self.table(tails).view(self.num_sequences, before),
            )
        return self._windows[size]

    def reach(self, size: int) -> Tensor:
        """(size - 1, T, 1) float32: entry [j - 1, t] is 1 where the row j before row t is new and of its sequence."""
        if size not in self._reach:
            within = self.table(place for length in self.lengths for place in range(length))
            back = torch.arange(1, size, device=self.device)[:, None]
            self._reach[size] = (within >= back)[..., None].float()
        return self._reach[size]

    def padded(self) -> tuple[PaddedGroup, ...]:
        """The new rows as tables of similar length, for work on whole sequences side by side."""
        if self._padded is None:
            order = sorted(range(self.num_sequences), key=lambda s: -self.lengths[s])
            groups: list[list[int]] = []
            for s in order:
                if not groups or 2 * self.lengths[s] <= self.lengths[groups[-1][0]]:
                    groups.append([])
                groups[-1].append(s)
            self._padded = tuple(PaddedGroup(self, group) for group in groups)
        return self._padded

    def chunks(self, size: int) -> ChunkTable:
        """Sequences of two or more new tokens cut into chunks of `size` rows."""
        if size not in self._chunks:
            self._chunks[size] = ChunkTable(self, size)
        return self._chunks[size]

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` gives, made by the first layer that asks and kept for the others of this pass."""
        if key not in self._once:
            self._once[key] = make()
        return self._once[key]

    def table(self, values: Iterable[object]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self.device)


class PaddedGroup:
    """Some sequences as rows (S', L) of a table, filled up behind their ends; all are longer than half of L."""

    def __init__(self, segments: Segments, sequences: list[int]):
        self.num_sequences = len(sequences)
        self.length = max(segments.lengths[s] for s in sequences)
        spans = [segments.rows_of(s) for s in sequences]
        rows = [[*range(x.start, x.stop), *(-1 for _ in range(self.length - x.stop + x.start))] for x in spans]
        self._map = RowMap(segments.table(rows).flatten(), segments.num_tokens)

    def table(self, x: Tensor) -> Tensor:
        """(T, ...) -> (S', L, ...), zeros behind the ends."""
        return self._map(x).unflatten(0, (self.num_sequences, self.length))

    def rows(self, table: Tensor) -> Tensor:
        """(S', L, ...) -> (T, ...), zeros at the rows of other sequences."""
        return self._map.back(table.flatten(0, 1))


class ChunkTable:
    """Sequences of two or more new tokens, cut into N chunks of C rows that never cross a sequence.

    Longest sequence first, and wave by wave: wave j holds the j-th chunk of every sequence that has one. So the
    sequences of a wave are the first ones of the wave before, and their chunks are neighbours.

        lengths 3, 1, 8, 5  and C = 4:     sequences = 2, 3, 0      active = 3, 2
        chunks:  2[0:4]  3[0:4]  0[0:3] | 2[4:8]  3[4:5]
    """

    def __init__(self, segments: Segments, size: int):
        order = [s for s, length in enumerate(segments.lengths) if length > 1]
        order.sort(key=lambda s: -segments.lengths[s])
        rows: list[list[int]] = []
        self.size, self.num_tokens = size, segments.num_tokens
        self.active: list[int] = []  # sequences in each wave
        for start in range(0, max(segments.lengths, default=0), size):
            wave = [segments.rows_of(s) for s in order if segments.lengths[s] > start]
            if wave:
                rows += [list(range(span.start + start, min(span.start + start + size, span.stop))) for span in wave]
                self.active.append(len(wave))
        padded = [chunk + [-1] * (size - len(chunk)) for chunk in rows]
        self.sequences = segments.table(order)  # (M,)
        self.rows = segments.table(padded).view(-1, size)  # (N, C) packed rows, -1 where a chunk is short
        self._by_head: dict[int, RowMap] = {}

    def by_head(self, num_heads: int) -> RowMap:
        """From rows (T * H) of packed tokens and their heads to rows (N * H * C): head by head within each chunk."""
        if num_heads not in self._by_head:
            heads = torch.arange(num_heads, device=self.rows.device)[:, None]
            rows = self.rows[:, None]  # (N, 1, C)
            index = torch.where(rows < 0, -1, rows * num_heads + heads).flatten()
            self._by_head[num_heads] = RowMap(index, self.num_tokens * num_heads)
        return self._by_head[num_heads]
