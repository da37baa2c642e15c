"""Where the rows of a slot lie: side by side, or in pages of a pool that somebody deals out.

    plain    slot s has the rows [s * max_tokens, (s + 1) * max_tokens) for itself
    paged    slot s has a table of pages; token t is row  table[s][t // P] * P + t % P

Who deals pages out sends what is new of each table (`extend`); all layers of a rank follow the same tables. A page that
was given to a slot may be written by that slot alone, and by nobody once it has been sealed: others read it then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from workbench.base import RequestError

__all__ = ["PageTables", "SlotPages"]


@dataclass(frozen=True, slots=True)
class PageTables:
    """Token t of slot s is row `pages[s, t // tokens] * tokens + t % tokens`; a plain slot is one page.

    `pages` (slots, N) int64, contiguous; entries beyond a slot's end lead to some page of its own.
    """

    pages: Tensor
    tokens: int


class SlotPages:
    """Tables of `num_slots` slots over `num_rows` rows, for sequences of up to `max_tokens` tokens; plain at first."""

    def __init__(self, *, num_slots: int, max_tokens: int, num_rows: int, device: torch.device | str = "cpu") -> None:
        self.num_slots, self.max_tokens, self.num_rows = num_slots, max_tokens, num_rows
        self.device = torch.device(device)
        self.page_tokens = 0  # P; 0 where slots are plain
        self._tables: list[list[int]] = [[] for _ in range(num_slots)]
        self._members: list[set[int]] = [set() for _ in range(num_slots)]  # the same pages, in no order
        self._is_run: list[bool] = [True] * num_slots  # whether the pages stand side by side, in order
        self._owners: dict[int, int] = {}  # page -> the slot that may write it
        self._index = self._plain_index()  # (slots, pages), the same on the device
        # What the layers of a forward pass ask for one after another, and the rows that it led to.
        self._last: tuple[Tensor, Tensor, Tensor] | None = None
        self._last_first: tuple[tuple[int, ...], Tensor] | None = None

    @property
    def is_plain(self) -> bool:
        return not self.page_tokens

    def use(self, page_tokens: int) -> bool:
        """Pages of `page_tokens` from now on, 0 for plain slots; whether that is new. What was held is lost then."""
        if page_tokens == self.page_tokens:
            return False
        self.page_tokens, self._last, self._last_first = page_tokens, None, None
        self._tables = [[] for _ in range(self.num_slots)]
        self._members = [set() for _ in range(self.num_slots)]
        self._is_run = [True] * self.num_slots
        self._owners.clear()
        if self.is_plain:
            self._index = self._plain_index()
        else:
            width = -(-self.max_tokens // page_tokens)
            self._index = torch.zeros(self.num_slots, width, dtype=torch.int64, device=self.device)
        return True

    def _plain_index(self) -> Tensor:
        return torch.arange(self.num_slots, dtype=torch.int64, device=self.device)[:, None]

    @property
    def tables(self) -> PageTables:
        """Where all slots have their rows, on the device, as long as nobody deals out pages anew."""
        return PageTables(self._index, self.page_tokens or self.max_tokens)

    def table(self, slot: int) -> tuple[int, ...]:
        """Pages of a slot, in the order of its tokens."""
        return tuple(self._tables[slot])

    def forget(self, slot: int) -> None:
        """The slot has no pages any longer."""
        self._tables[slot], self._members[slot], self._is_run[slot] = [], set(), True
        self._last = self._last_first = None

    def extend(self, slot: int, first: int, pages: Sequence[int], *, num_shared: int = 0) -> list[slice]:
        """Pages from entry `first` of a slot's table on; the first `num_shared` of them were written by others.

        Returns the rows of the fresh ones: what an ended sequence left there is still in them. Raises RequestError
        where the table is not that long, a page is none or twice there, or a shared page may still be written.
        """
        table, num_pages = self._tables[slot], self.num_rows // self.page_tokens
        if first != len(table):
            raise RequestError(f"slot {slot} has {len(table)} pages", expected=f"{first} before the new ones")
        if first + len(pages) > self._index.shape[1] or not all(0 <= page < num_pages for page in pages):
            raise RequestError(
                f"slot {slot} cannot have pages {list(pages)} from entry {first} on",
                expected=f"pages 0..{num_pages - 1}, at most {self._index.shape[1]} of them",
            )
        if len(set(pages)) != len(pages) or any(page in self._members[slot] for page in pages):
            raise RequestError(f"slot {slot} would have a page twice", found=[*table, *pages])
        if torn := [page for page in pages[:num_shared] if page in self._owners]:
            raise RequestError(f"slot {slot} shares pages {torn}, which slot {self._owners[torn[0]]} may still write")
        self._owners.update(dict.fromkeys(pages[num_shared:], slot))
        self._is_run[slot] &= all(b == a + 1 for a, b in pairwise([*table[-1:], *pages]))
        self._members[slot].update(pages)
        table += pages
        if pages:
            # Entries beyond the end lead to the slot's own first page: nothing of others is ever read in their place.
            if not first:
                self._index[slot].fill_(table[0])
            self._index[slot, first : len(table)] = torch.tensor(pages, dtype=torch.int64, device=self.device)
        self._last = self._last_first = None
        return [slice(page * self.page_tokens, (page + 1) * self.page_tokens) for page in pages[num_shared:]]

    def seal(self, slot: int, start: int, stop: int) -> tuple[int, ...]:
        """The pages of tokens [start, stop), which nobody may write from now on."""
        pages = tuple(self._tables[slot][start // self.page_tokens : -(-stop // self.page_tokens)])
        if stop % self.page_tokens or start % self.page_tokens or len(pages) * self.page_tokens != stop - start:
            raise RequestError(
                f"tokens {start} to {stop} of slot {slot} are no whole pages", expected=f"pages of {self.page_tokens}"
            )
        for page in pages:
            self._owners.pop(page, None)
        return pages

    def check(self, slot: int, start: int, stop: int) -> None:
        """Raises RequestError where tokens [start, stop) of a slot have no rows, or rows that are not its own."""
        if self.is_plain:
            if slot * self.max_tokens + stop > self.num_rows:
                raise RequestError(
                    f"slot {slot} has no rows of its own for {stop} tokens in a pool of {self.num_rows}",
                    next_step="Use an engine, which deals pages out, or a pool of num_slots x max_tokens",
                )
            return
        table = self._tables[slot]
        if stop > len(table) * self.page_tokens:
            raise RequestError(
                f"slot {slot} has {len(table)} pages of {self.page_tokens} tokens", expected=f"enough for {stop} tokens"
            )
        for page in table[start // self.page_tokens : -(-stop // self.page_tokens)]:
            if self._owners.get(page) != slot:
                raise RequestError(
                    f"slot {slot} would write page {page}, which others read",
                    found=f"tokens {start} to {stop}",
                    expected="pages given to this slot and not kept since",
                )

    def rows(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Rows of tokens at (slot, position), all (T,)."""
        if self._last is not None and self._last[0] is slots and self._last[1] is positions:
            return self._last[2]
        if self.is_plain:
            rows = slots * self.max_tokens + positions
        else:
            rows = self._index[slots, positions // self.page_tokens] * self.page_tokens + positions % self.page_tokens
        self._last = (slots, positions, rows)
        return rows

    def span(self, slot: int, num_tokens: int) -> slice | Tensor:
        """Rows of the first tokens of one slot: a range where they lie side by side, else (num_tokens,)."""
        if self.is_plain:
            return slice(slot * self.max_tokens, slot * self.max_tokens + num_tokens)
        table = self._tables[slot]
        if table and self._is_run[slot] and num_tokens <= len(table) * self.page_tokens:
            return slice(table[0] * self.page_tokens, table[0] * self.page_tokens + num_tokens)
        return self.first(torch.tensor([slot], device=self.device), num_tokens)[0]

    def first(self, slots: Tensor, num_tokens: int) -> Tensor:
        """Rows of the first tokens of each slot, (S, num_tokens); beyond a table's end, some row of the same slot."""
        if self.is_plain:
            return slots[:, None] * self.max_tokens + torch.arange(num_tokens, device=slots.device)
        # Reading numbers from an accelerator would wait for it, so there every layer works them out anew.
        asked = (num_tokens, *slots.tolist()) if slots.device.type == "cpu" else ()
        if asked and self._last_first is not None and self._last_first[0] == asked:
            return self._last_first[1]
        pages = self._index[slots, : -(-num_tokens // self.page_tokens)]
        within = torch.arange(self.page_tokens, device=slots.device)
        rows = (pages[..., None] * self.page_tokens + within).flatten(1)[:, :num_tokens]
        self._last_first = (asked, rows)
        return rows
