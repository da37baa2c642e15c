"""Which beginnings of prompts are kept, page by page, so that equal ones are read once. Pure bookkeeping, no tensors.

A page is `page_tokens` tokens of a prompt, counted from its start. Its cached rows stay where they are, in pages of the
pool that whoever continues it shares (`replica_cache`); and since recurrent layers cannot be cut later, each rank
copies their state right behind the page's last token. So a hit always ends where a state was kept, never inside a page.

The key of a page covers everything that could have made its content: all tokens before and in it, the content and
place of every image, how pad tokens are read, and whose prompt it was. Equal keys mean equal content.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from itertools import takewhile

from workbench.serving.requests import GenerationRequest

__all__ = ["PrefixIndex", "page_keys"]


def page_keys(request: GenerationRequest, page_tokens: int, *, most: int | None = None) -> list[str]:
    """Key of every page that could be restored for the prompt, or of the first `most`: at least one token is always
    left to read."""
    keys: list[str] = []
    chain = hashlib.sha256(f"{page_tokens} {bool(request.images)} {request.tenant}".encode()).digest()
    num_pages = (len(request.token_ids) - 1) // page_tokens
    for start in range(0, (num_pages if most is None else min(most, num_pages)) * page_tokens, page_tokens):
        stop = start + page_tokens
        link = hashlib.sha256(chain)
        link.update(array("q", request.token_ids[start:stop]).tobytes())
        for image in request.images:
            if image.row < stop and image.stop > start:
                # Place and full content key: the rows themselves all hold the same placeholder id.
                link.update(f"|{image.row} {image.count} {image.key}".encode())
        chain = link.digest()
        keys.append(f"page-{chain.hex()}")
    return keys


class PrefixIndex:
    """Pages that one replica holds, at most `max_pages`; those unused for longest go first, deeper ones before others.

    Pinned pages stay until they are unpinned: somebody is about to read them.
    """

    def __init__(self, max_pages: int) -> None:
        self.max_pages = max_pages
        self._pages: OrderedDict[str, None] = OrderedDict()  # least recently used first
        self._pins: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: str) -> bool:
        return key in self._pages

    def peek(self, keys: Iterable[str]) -> list[str]:
        """The longest run of pages from the start that are here."""
        return list(takewhile(self._pages.__contains__, keys))

    def match(self, keys: Iterable[str]) -> list[str]:
        """The longest run of pages from the start that are here; they are pinned and count as used now."""
        found = self.peek(keys)
        for key in reversed(found):  # the first page is used by most: it ends up as the most recent
            self._pages.move_to_end(key)
            self._pins[key] += 1
        return found

    def unpin(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._pins[key] -= 1
            if self._pins[key] <= 0:
                del self._pins[key]

    def add(self, key: str) -> None:
        """A page that the ranks have kept now."""
        self._pages[key] = None
        self._pages.move_to_end(key)

    def unpinned(self) -> list[str]:
        """Pages that may go, those unused for longest first."""
        return [key for key in self._pages if key not in self._pins]

    def drop(self, key: str) -> None:
        """A page that is no longer here."""
        assert key not in self._pins, f"{key} is about to be read"
        del self._pages[key]

    def clear(self) -> list[str]:
        """All pages, none of which is here any longer."""
        gone = list(self._pages)
        self._pages.clear()
        self._pins.clear()
        return gone

    def evict(self) -> list[str]:
        """Pages beyond the bound, to be dropped; they are no longer here."""
        gone: list[str] = []
        for key in list(self._pages):
            if len(self._pages) <= self.max_pages:
                break
            if key not in self._pins:
                del self._pages[key]
                gone.append(key)
        return gone
