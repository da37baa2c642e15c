"""Memory that reading a chunk of a long text takes beside the cache, and how its work is divided to keep to a limit.

n new tokens behind a context, L tokens together, need keys and values of all L in all heads, and n x L numbers that say
which pairs are seen. Neither heads nor queries meet in attention: taken in groups and blocks they have the very sums
that they have all at once, and only one group's keys and values, and one block's mask, are there at a time.

What cannot be divided so is one head's keys and values of all L tokens: over them the softmax of every query runs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["WORKSPACE_BYTES", "BlockMasks", "attend_in_blocks", "is_within", "mask_bytes", "spans"]

# One half for keys and values, one for a mask. At 131,072 tokens of K3 in bf16 the least of each fills its half: one
# head (192 + 192 + 128 columns while they are made), and 512 new tokens. Such work takes far longer than a call.
WORKSPACE_BYTES = 256 << 20
# Queries that a fused kernel takes at once on the CPU, and how many there must be for it to take so many: a block of
# fewer goes through other, thinner products.
ROWS, LEAST_ROWS = 64, 192


def is_within(num_bytes: int) -> bool:
    """Whether something may be done all at once."""
    return num_bytes <= WORKSPACE_BYTES


def mask_bytes(num_new: int, num_all: int, itemsize: int) -> int:
    """Of truth values and the numbers that a fused kernel makes of them."""
    return num_new * num_all * (1 + itemsize)


def spans(count: int, num_bytes: int, *, multiple: int = 1, least: int = 1) -> list[slice]:
    """`count` things of `num_bytes` each in runs that keep to half of the limit.

    A run is a multiple of `multiple`, but for the last, and no less than `least`: then it takes what it takes.
    """
    fitting = WORKSPACE_BYTES // 2 // max(1, num_bytes) // multiple * multiple
    each = max(least, fitting)
    return [slice(first, min(first + each, count)) for first in range(0, count, each)]


class BlockMasks:
    """What the last n of L tokens see, block of queries by block: numbers to add to scores, 0 or -inf.

    All up to the own place; with a `window` those less than so far back; or what `is_seen` (n, L) says. In dtype and
    place of `like`. One piece of memory holds one block after the other; numbers, since truth values would be there
    beside the numbers that a fused kernel makes of them.
    """

    def __init__(
        self, num_new: int, num_all: int, *, is_seen: Tensor | None = None, window: int | None = None, like: Tensor
    ) -> None:
        self.num_new, self.num_all, self.is_seen = num_new, num_all, is_seen
        self.window = None if window is None or window >= num_all else window
        self._memory: Tensor | None = None
        self._held: slice | None = None
        if num_new == num_all and is_seen is None and self.window is None:
            self.blocks = [slice(0, num_new)]  # a whole sequence, which needs no mask
            return
        self.blocks = spans(num_new, num_all * like.element_size(), multiple=ROWS, least=LEAST_ROWS)
        self._memory = like.new_zeros(min(self.blocks[0].stop, num_new), num_all)

    def of(self, rows: slice) -> Tensor | None:
        """(b, L) of one of `blocks`, until another is asked for."""
        if self._memory is None:
            return None
        mask, before = self._memory[: rows.stop - rows.start], self.num_all - self.num_new
        if rows == self._held:
            return mask
        self._held = rows
        if self.is_seen is not None:
            return mask.zero_().masked_fill_(~self.is_seen[rows], -torch.inf)
        # What stands before the new tokens is seen by all of them, where no window ends.
        changed, first = (mask, before + rows.start) if self.window else (mask[:, before:], rows.start)
        changed.fill_(-torch.inf).triu_(first + 1)
        if self.window is not None:
            changed.masked_fill_(torch.ones_like(mask, dtype=torch.bool).tril_(first - self.window), -torch.inf)
        return mask


def attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, masks: BlockMasks, *, scale: float) -> Tensor:
    """Attention of the last n of L tokens, a block at a time: (n, H, W), (L, H, W), (L, H, V) -> (n, H, V)."""
    keys, values = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    pieces = []
    for rows in masks.blocks:
        own, mask = q[rows].transpose(0, 1)[None], masks.of(rows)
        y = F.scaled_dot_product_attention(own, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale)
        pieces.append(y[0].transpose(0, 1))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
