"""Which pages of a cache belong to whom, and which are free. Pure bookkeeping, no tensors.

A page may have several holders: the sequences that read it and the index of kept prefixes. It is free again when the
last of them lets go. Rows that lie side by side are read without a copy, so a sequence that comes gets a run of pages
as long as it may grow, of which the rest stays free but is set aside; where nothing else is left, that is dealt out
too.

    holders   2 2 1 1 0 0 0 0 1 0 0        a prefix shared by two, the tail of one, four pages set aside for it, ...
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

__all__ = ["PagePool"]

Run = tuple[int, int]  # pages [first, stop)


class PagePool:
    """Pages 0 to `num_pages` - 1. Owners are numbers of the caller's; each has at most one run set aside."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._holders = [0] * num_pages
        self._open: list[Run] = [(0, num_pages)] if num_pages else []  # free and set aside for nobody, in order
        self._aside: dict[int, Run] = {}  # free, by owner
        self.num_free = num_pages

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    def num_holders(self, page: int) -> int:
        return self._holders[page]

    def take(self, owner: int, count: int, *, room: int = 0, after: int = -1) -> list[int]:
        """`count` free pages for an owner that may come to need `room` in all, next to page `after` where possible.

        Raises AssertionError where fewer are free.
        """
        assert count <= self.num_free, f"{count} pages wanted, {self.num_free} free"
        pages: list[int] = []
        while len(pages) < count:
            if owner not in self._aside:
                missing = count - len(pages)
                self._set_aside(owner, max(missing, room - len(pages)), (pages[-1] if pages else after) + 1)
            first, stop = self._aside.pop(owner)
            last = min(stop, first + count - len(pages))
            pages += range(first, last)
            if last < stop:
                self._aside[owner] = (last, stop)
        for page in pages:
            self._holders[page] = 1
        self.num_free -= count
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One holder more of pages that are held."""
        for page in pages:
            assert self._holders[page], f"page {page} is free"
            self._holders[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """One holder less."""
        for page in pages:
            assert self._holders[page], f"page {page} is free already"
            self._holders[page] -= 1
            if not self._holders[page]:
                self.num_free += 1
                self._insert((page, page + 1))

    def forget(self, owner: int) -> None:
        """Nothing is set aside for this owner any longer."""
        if owner in self._aside:
            self._insert(self._aside.pop(owner))

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless the holders are those of `held`, each a list of pages, and all else is free."""
        counts = [0] * self.num_pages
        for pages in held:
            assert len(set(pages)) == len(pages), f"a page twice in {pages}"
            for page in pages:
                counts[page] += 1
        assert counts == self._holders, "pages are held by others than those who should"
        free = [page for first, stop in (*self._open, *self._aside.values()) for page in range(first, stop)]
        assert len(free) == len(set(free)) == self.num_free, "a free page twice, or lost"
        assert all(not counts[page] for page in free), "a held page among the free ones"
        assert self.num_free + sum(count > 0 for count in counts) == self.num_pages, "a page is lost"

    def _set_aside(self, owner: int, wanted: int, next_page: int) -> None:
        """A run for an owner that has none: right there, else the smallest that is long enough, else the longest."""
        if not self._open:
            for other in list(self._aside):
                self.forget(other)
        right_there = next((run for run in self._open if next_page > 0 and run[0] == next_page), None)
        run = right_there or min(
            self._open, key=lambda run: (run[1] - run[0] < wanted, abs(run[1] - run[0] - wanted), run[0])
        )
        self._open.remove(run)
        stop = min(run[1], run[0] + wanted)
        self._aside[owner] = (run[0], stop)
        if stop < run[1]:
            self._insert((stop, run[1]))

    def _insert(self, run: Run) -> None:
        """Into the open runs, one with its neighbours."""
        place = bisect_left(self._open, run)
        first, stop = run
        if place < len(self._open) and self._open[place][0] == stop:
            stop = self._open.pop(place)[1]
        if place and self._open[place - 1][1] == first:
            first = self._open.pop(place - 1)[0]
            place -= 1
        self._open.insert(place, (first, stop))
