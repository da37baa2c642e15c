"""What a sequence leaves behind for its next token: a slot for its states, and rows in a slot or in pages of a pool.

KDA and delta nets keep a state of fixed size and the last inputs of their convolutions; MLA keeps one latent row per
token, grouped-query attention the key and value of each token and key-value head held here. A layer with a window keeps
all of them as well: nothing is overwritten before a sequence ends. Rows may be held in fewer bits than they are
computed in (`rows.py`); states never are, since what is rounded there is rounded again with every token.

All memory is allocated at the start. Where rows of a sequence lie is a matter of tables (`pages.py`), the same for all
layers: so several sequences may read the rows of one prefix, each with a copy of its state (`snapshots.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from workbench.base import RequestError
from workbench.nn.batch import Segments, TokenBatch
from workbench.nn.pages import PageTables, SlotPages
from workbench.nn.rewind import HeldChunks, HeldRows, settle
from workbench.nn.rows import RowTable, row_format
from workbench.nn.snapshots import Snapshot, SnapshotPool
from workbench.spec import GatedDeltaSpec, GQASpec, KDASpec, MLASpec, ModelSpec

__all__ = ["Cache", "StateCache"]


class Cache(Protocol):
    """What the mixers ask of a cache. `slots` are (S,) int64; a sequence that `is_fresh` starts from zeros."""

    def check(self, batch: TokenBatch) -> None:
        """Raises RequestError where the batch does not fit."""
        ...

    def read_state(self, layer_idx: int, slots: Tensor, is_fresh: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs of the P convolutions (S, P, C, K-1), oldest first, and state (S, H, Dv, Dk) fp32."""
        ...

    def write_state(self, layer_idx: int, slots: Tensor, conv: Tensor, state: Tensor) -> None: ...

    def hold_state(self, layer_idx: int, segments: Segments, rows: HeldRows) -> None:
        """Keep what the tentative sequences of a batch would write, until it is known what of it is true."""
        ...

    def append_latent(self, layer_idx: int, slots: Tensor, positions: Tensor, latent: Tensor) -> None:
        """Store rows (T, latent | shared key) at (slot, position), both (T,)."""
        ...

    def latents(self, layer_idx: int, slots: Tensor, num_tokens: int) -> Tensor:
        """The first rows of every slot (S, num_tokens, latent | shared key); beyond a sequence's end, anything."""
        ...

    def latent_view(self, layer_idx: int, slot: int, num_tokens: int) -> Tensor:
        """The first rows of one slot (num_tokens, latent | shared key)."""
        ...

    def latents_in_place(self, layer_idx: int) -> tuple[Tensor, PageTables] | None:
        """All rows as they lie (rows, latent | shared key), and where each slot has its own; None where they have to
        be decoded first."""
        ...

    def append_index(self, layer_idx: int, slots: Tensor, positions: Tensor, keys: Tensor) -> None:
        """Store index keys (T, W) at (slot, position), both (T,)."""
        ...

    def index_view(self, layer_idx: int, slot: int, num_tokens: int) -> Tensor:
        """The first index keys of one slot (num_tokens, W)."""
        ...

    def append_kv(self, layer_idx: int, slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys (T, G, W) and values (T, G, V) at (slot, position), both (T,)."""
        ...

    def kv(self, layer_idx: int, slots: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """The first keys and values of every slot, (S, num_tokens, G, W) and (..., V); beyond an end, anything."""
        ...

    def kv_view(self, layer_idx: int, slot: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """The first keys and values of one slot, (num_tokens, G, W) and (num_tokens, G, V)."""
        ...

    def kv_in_place(self, layer_idx: int) -> tuple[Tensor, Tensor, PageTables] | None:
        """All keys (rows, G, W) and values (rows, G, V) as they lie, and where each slot has its own; None where they
        have to be decoded first."""
        ...


class StateCache:
    """Slots for the layers of one stage, as one rank of `tp_size` holds them; no gradients pass through.

    `kv_dtype`: how rows of tokens are held, one of `spec.KV_DTYPES`. `cache_tokens`: rows of the pool that all slots
    share, dealt out in `pages`; None: each slot has its own `max_tokens`. `num_snapshots`: room for copies of the
    recurrent state. Raises ConfigError for another `kv_dtype`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layers: Iterable[int],
        *,
        num_slots: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        tp_size: int = 1,
        kv_dtype: str = "auto",
        cache_tokens: int | None = None,
        num_snapshots: int = 0,
    ):
        self.num_slots, self.max_tokens = num_slots, max_tokens
        self.device = torch.device(device)
        self.kv_dtype = kv_dtype
        self._held: list[HeldChunks] = []
        self._holding: Segments | None = None  # of the forward pass that the last of them belongs to
        self.conv: dict[int, Tensor] = {}  # layer -> (slots, P convolutions, C, K-1), their inputs
        self.state: dict[int, Tensor] = {}  # layer -> (slots, H, Dv, Dk) fp32
        self.latent: dict[int, RowTable] = {}  # layer -> (slots, max_tokens, latent | shared key)
        self.keys: dict[int, RowTable] = {}  # layer -> (slots, max_tokens, G, W)
        self.values: dict[int, RowTable] = {}  # layer -> (slots, max_tokens, G, V)
        self.index: dict[int, RowTable] = {}  # layer -> (slots, max_tokens, W) keys of its sparse indexer
        form = row_format(kv_dtype)
        blocks = (num_slots, max_tokens) if cache_tokens is None else (1, cache_tokens)
        self.pages = SlotPages(
            num_slots=num_slots, max_tokens=max_tokens, num_rows=blocks[0] * blocks[1], device=device
        )
        for layer_idx in layers:
            mixer = spec.layers[layer_idx].mixer
            if isinstance(mixer, MLASpec):
                shape = (*blocks, mixer.cache_dim)
                self.latent[layer_idx] = RowTable(shape, dtype=dtype, device=device, form=form, pages=self.pages)
                if mixer.indexer is not None and mixer.indexer.owns_choice:  # kept as computed: they decide
                    shape = (*blocks, mixer.indexer.head_dim)
                    self.index[layer_idx] = RowTable(shape, dtype=dtype, device=device, pages=self.pages)
                continue
            if isinstance(mixer, GQASpec):
                heads = max(1, mixer.num_kv_heads // tp_size)  # ranks beyond the heads share one with a neighbour
                for table, width in ((self.keys, mixer.head_dim), (self.values, mixer.v_dim)):
                    rows = (*blocks, heads, width)
                    table[layer_idx] = RowTable(rows, dtype=dtype, device=device, form=form, pages=self.pages)
                continue
            assert isinstance(mixer, KDASpec | GatedDeltaSpec)
            num_convs, channels, *state_shape = _state_shape(mixer, tp_size)
            conv_shape = (num_slots, num_convs, channels, mixer.conv_size - 1)
            state_dtype = torch.promote_types(dtype, torch.float32)
            self.conv[layer_idx] = torch.zeros(conv_shape, dtype=dtype, device=device)
            self.state[layer_idx] = torch.zeros((num_slots, *state_shape), dtype=state_dtype, device=device)
        self.snapshots = SnapshotPool(self.conv, self.state, num_snapshots)

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in self.tensors)

    @property
    def tensors(self) -> list[Tensor]:
        """All that memory is taken for; without a pool and snapshots the first dimension is the slots."""
        rows = [part for table in self._rows for part in table.parts]
        return [*self.conv.values(), *self.state.values(), *self.snapshots.tensors, *rows]

    @property
    def _rows(self) -> list[RowTable]:
        """Tables of one row per token."""
        return [table for tables in (self.latent, self.keys, self.values, self.index) for table in tables.values()]

    def reset(self, slot: int) -> None:
        """Forget what a slot holds, so that nothing of one sequence can reach the next."""
        for table in (self.conv, self.state):
            for values in table.values():
                values[slot].zero_()
        if self.pages.is_plain:
            self._clear([slice(slot * self.max_tokens, (slot + 1) * self.max_tokens)])
        else:
            self.pages.forget(slot)  # what a page holds is cleared when it is given to another slot
        for held in self._held:
            held.spans.pop(slot, None)
        self._drop_settled()

    def settle(self, starts: Mapping[int, int]) -> None:
        """Before slots go on at `starts`: what came true of their tentative tokens moves their state now.

        Raises RequestError for a start that does not fit what a slot holds.
        """
        self._holding = None
        for held in self._held:
            settle(held, starts, self, self.device)
        self._drop_settled()

    def _drop_settled(self) -> None:
        self._held = [held for held in self._held if held.spans]

    def use_pages(self, page_tokens: int) -> None:
        """Rows in pages of so many tokens from now on, or side by side (0). Where that is new, all rows are lost."""
        if self.pages.use(page_tokens):
            self._clear([slice(0, self.pages.num_rows)])

    def extend(self, slot: int, first: int, pages: Sequence[int], *, num_shared: int = 0) -> None:
        """Give pages to a slot, from entry `first` of its table on; the first `num_shared` hold what others wrote.

        Raises RequestError as `SlotPages.extend`.
        """
        self._clear(self.pages.extend(slot, first, pages, num_shared=num_shared))

    def _clear(self, spans: Iterable[slice]) -> None:
        for span in spans:
            for table in self._rows:
                table.clear(span)

    def keep(self, slot: int) -> Snapshot:
        """A copy of the recurrent state of a slot, until it is given back to `snapshots`."""
        return self.snapshots.take(slot)

    def restore(self, slot: int, snapshot: Snapshot) -> None:
        """Let the recurrent state of a slot go on from a copy, which stays as it is."""
        self.snapshots.restore(slot, snapshot)

    def check(self, batch: TokenBatch) -> None:
        for slot, start, length in zip(batch.slots, batch.starts, batch.lengths, strict=True):
            if not 0 <= slot < self.num_slots:
                raise RequestError(f"no cache slot {slot}", expected=f"0..{self.num_slots - 1}")
            if start + length > self.max_tokens:
                raise RequestError(
                    f"sequence in slot {slot} grows to {start + length} tokens",
                    expected=f"at most {self.max_tokens}",
                    next_step="Start with a larger max_tokens, or end the sequence",
                )
            self.pages.check(slot, start, start + length)

    def read_state(self, layer_idx: int, slots: Tensor, is_fresh: Tensor) -> tuple[Tensor, Tensor]:
        # masked_fill, not a product: whatever an ended sequence left behind (even NaN) must not reach a fresh one.
        fresh = is_fresh[:, None, None, None]
        return (
            self.conv[layer_idx][slots].masked_fill(fresh, 0),
            self.state[layer_idx][slots].masked_fill(fresh, 0),
        )

    @torch.no_grad()
    def write_state(self, layer_idx: int, slots: Tensor, conv: Tensor, state: Tensor) -> None:
        self.conv[layer_idx].index_copy_(0, slots, conv)
        self.state[layer_idx].index_copy_(0, slots, state)

    def hold_state(self, layer_idx: int, segments: Segments, rows: HeldRows) -> None:
        if self._holding is not segments:
            self._held.append(HeldChunks.of(segments))
            self._holding = segments
        self._held[-1].layers[layer_idx] = rows

    def append_latent(self, layer_idx: int, slots: Tensor, positions: Tensor, latent: Tensor) -> None:
        self.latent[layer_idx].write(slots, positions, latent)

    def latents(self, layer_idx: int, slots: Tensor, num_tokens: int) -> Tensor:
        return self.latent[layer_idx].first(slots, num_tokens)

    def latent_view(self, layer_idx: int, slot: int, num_tokens: int) -> Tensor:
        return self.latent[layer_idx].of_slot(slot, num_tokens)

    def latents_in_place(self, layer_idx: int) -> tuple[Tensor, PageTables] | None:
        rows = self.latent[layer_idx].in_place
        return None if rows is None else (rows, self.pages.tables)

    def append_index(self, layer_idx: int, slots: Tensor, positions: Tensor, keys: Tensor) -> None:
        self.index[layer_idx].write(slots, positions, keys)

    def index_view(self, layer_idx: int, slot: int, num_tokens: int) -> Tensor:
        return self.index[layer_idx].of_slot(slot, num_tokens)

    def append_kv(self, layer_idx: int, slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        self.keys[layer_idx].write(slots, positions, keys)
        self.values[layer_idx].write(slots, positions, values)

    def kv(self, layer_idx: int, slots: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        return self.keys[layer_idx].first(slots, num_tokens), self.values[layer_idx].first(slots, num_tokens)

    def kv_view(self, layer_idx: int, slot: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        return self.keys[layer_idx].of_slot(slot, num_tokens), self.values[layer_idx].of_slot(slot, num_tokens)

    def kv_in_place(self, layer_idx: int) -> tuple[Tensor, Tensor, PageTables] | None:
        keys, values = self.keys[layer_idx].in_place, self.values[layer_idx].in_place
        return None if keys is None or values is None else (keys, values, self.pages.tables)


def _state_shape(mixer: KDASpec | GatedDeltaSpec, tp_size: int) -> tuple[int, int, int, int, int]:
    """Convolutions and channels of each, heads, value and key width, as one rank of `tp_size` holds them."""
    if isinstance(mixer, KDASpec):
        heads = mixer.num_heads // tp_size
        return 3, heads * mixer.head_dim, heads, mixer.head_dim, mixer.head_dim
    heads = mixer.num_value_heads // tp_size
    return 1, mixer.conv_width // tp_size, heads, mixer.value_dim, mixer.key_dim
