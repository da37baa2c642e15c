"""The pages of one replica's cache: those of running sequences and those of kept prefixes, which may be the same.

A prefix page is kept by the index together with the snapshot of the recurrent state behind it. Who continues it holds
its rows as well, so nothing is copied. Pages that only the index holds are as good as free: where a sequence needs
pages, those unused for longest go.
"""

from __future__ import annotations

from collections.abc import Sequence

from workbench.serving.pool import PagePool
from workbench.serving.prefix import PrefixIndex
from workbench.serving.steps import RunnerInfo

__all__ = ["ReplicaCache", "page_size"]

POOL_PAGE_TOKENS = 64
PAGES_OF_LONGEST = 8  # at least, of the longest sequence: half a page of each sequence lies idle


def page_size(info: RunnerInfo, prefix_tokens: int) -> int:
    """Tokens of a page of the pool; 0 where every slot has rows of its own and nothing is shared.

    A prefix page of `prefix_tokens` (0: none are kept) is one page of the pool or several: the size is the largest with
    which a sequence of `max_tokens` finds room, for a rest of the rows that makes no whole page lies idle.
    """
    if not prefix_tokens and info.num_rows >= info.num_slots * info.max_tokens:
        return 0
    whole = prefix_tokens or POOL_PAGE_TOKENS
    largest = prefix_tokens or max(1, min(POOL_PAGE_TOKENS, info.max_tokens // PAGES_OF_LONGEST))
    sizes = (size for size in range(largest, 0, -1) if whole % size == 0)
    return next(size for size in sizes if info.num_rows // size * size >= info.max_tokens)


class ReplicaCache:
    """`page_tokens` is the size of a page of the pool, `prefix_tokens` a multiple of it: that of a kept one."""

    def __init__(self, num_rows: int, page_tokens: int, *, prefix_tokens: int = 0, prefix_pages: int = 0) -> None:
        assert not prefix_tokens % page_tokens, (prefix_tokens, page_tokens)
        self.page_tokens, self.prefix_tokens = page_tokens, prefix_tokens
        self.pool = PagePool(num_rows // page_tokens)
        self.index = PrefixIndex(prefix_pages)
        self._kept: dict[str, list[int]] = {}  # prefix page -> its pages of the pool
        self._gone: list[str] = []  # prefix pages whose snapshots the ranks still hold

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)

    def can_admit(self, keys: Sequence[str], num_tokens: int, *, spare: int) -> bool:
        """Whether `num_tokens` of a sequence with these prefix pages have room, and `spare` pages are left then."""
        hits = self.index.peek(keys)
        idle = sum(len(self._kept[key]) for key in self._idle() if key not in hits)
        shared = sum(len(self._kept[key]) for key in hits)
        return self.pages_for(num_tokens) - shared + spare <= self.pool.num_free + idle

    def admit(
        self, owner: int, keys: Sequence[str], num_tokens: int, *, room: int
    ) -> tuple[tuple[str, ...], list[int]]:
        """Prefix pages that the sequence begins with, pinned until they are restored, and all its pages.

        It may come to have `room` tokens. Only after `can_admit`.
        """
        hits = tuple(self.index.match(keys))
        pages = [page for key in hits for page in self._kept[key]]
        self.pool.share(pages)
        return hits, pages + self._take(owner, self.pages_for(num_tokens) - len(pages), room, pages)

    def grow(self, owner: int, pages: list[int], num_tokens: int, *, room: int) -> bool:
        """Let a sequence have `num_tokens`; False, and nothing is changed, where there are no pages for that."""
        missing = self.pages_for(num_tokens) - len(pages)
        if missing <= 0:
            return True
        if missing > self.pool.num_free + sum(len(self._kept[key]) for key in self._idle()):
            return False
        pages += self._take(owner, missing, room, pages)
        return True

    def release(self, owner: int, pages: Sequence[int], restore: Sequence[str]) -> None:
        """A sequence gives back what it had."""
        self.index.unpin(restore)
        self.pool.free(pages)
        self.pool.forget(owner)

    def restored(self, restore: Sequence[str]) -> None:
        """The ranks have copied the snapshot: from now on the pages may go."""
        self.index.unpin(restore)

    def keep(self, key: str, pages: Sequence[int], stop: int) -> None:
        """The ranks have kept the prefix page that ends at token `stop` of a sequence."""
        if key in self.index:
            return  # another sequence of the same step had it first
        last = stop // self.page_tokens
        self._kept[key] = list(pages[last - self.prefix_tokens // self.page_tokens : last])
        self.pool.share(self._kept[key])
        self.index.add(key)

    def evict(self) -> list[str]:
        """Prefix pages that the ranks have to drop: beyond the bound of the index, or taken by sequences since."""
        self._let_go(self.index.evict())
        gone, self._gone = self._gone, []
        return gone

    def clear(self) -> list[str]:
        """As `evict`, of all that is kept."""
        self._let_go(self.index.clear())
        return self.evict()

    def check(self, sequences: Sequence[Sequence[int]]) -> None:
        """Raises AssertionError where a page is lost or held by others than these sequences and the index."""
        self.pool.check([*sequences, *self._kept.values()])

    def _take(self, owner: int, count: int, room: int, pages: Sequence[int]) -> list[int]:
        """Free pages, idle prefix pages given up where need be."""
        if count > self.pool.num_free:
            for key in self._idle():
                self.index.drop(key)
                self._let_go([key])
                if count <= self.pool.num_free:
                    break
        return self.pool.take(owner, count, room=self.pages_for(room) - len(pages), after=pages[-1] if pages else -1)

    def _idle(self) -> list[str]:
        """Prefix pages that nobody but the index holds, unused for longest first."""
        return [key for key in self.index.unpinned() if all(self.pool.num_holders(p) == 1 for p in self._kept[key])]

    def _let_go(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.pool.free(self._kept.pop(key))
        self._gone += keys
