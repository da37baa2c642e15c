"""Tokens that may turn out not to have happened: read without moving the recurrent state, and replayed once they have.

A recurrent state has no way back: once a guessed token is in it, the state before is gone. So a chunk that ends in
guesses leaves the state of its slot where it was. Kept instead is what would have moved it, a few vectors per token
and layer: the inputs of the convolutions, and k, v, g and beta of the delta rule. The next chunk of the slot says by
its `start` how many of the tokens came true, and those are replayed into the state before it is read.

    state at 7      [7 8 9 10] are read from it, 9 and 10 wrong      next chunk starts at 9: 7 and 8 are replayed

Latent rows need none of this: a row beyond the end of a sequence is never looked at, and the next chunk overwrites it.
R tentative rows, S sequences, H heads, D head width, P convolutions of C channels each. KDA has three, for q, k and v,
and a decay per key channel; a delta net one, and a decay per head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from workbench.base import RequestError
from workbench.nn.batch import Segments, TokenBatch
from workbench.nn.delta_rule import delta_rule
from workbench.nn.short_conv import tail_of

__all__ = ["HeldChunks", "HeldRows", "Span", "settle"]


@dataclass(frozen=True, slots=True)
class HeldRows:
    """What the tentative rows would do to one layer's state."""

    inputs: Tensor  # (R, P, C) before the convolutions
    k: Tensor  # (R, H, Dk)
    v: Tensor  # (R, H, Dv)
    g: Tensor  # (R, H, Dk or 1)
    beta: Tensor  # (R, H)


@dataclass(frozen=True, slots=True)
class Span:
    """The held rows [first, first + length) of one slot, whose state holds the `start` tokens before them."""

    start: int
    first: int
    length: int


@dataclass(eq=False, slots=True)
class HeldChunks:
    """The tentative chunks of one forward pass: where each slot's rows are, and the rows of every layer."""

    spans: dict[int, Span]
    layers: dict[int, HeldRows] = field(default_factory=dict)

    @classmethod
    def of(cls, segments: Segments) -> HeldChunks:
        spans, first = {}, 0
        for sequence in segments.tentative:
            length = segments.lengths[sequence]
            spans[segments.slots[sequence]] = Span(segments.starts[sequence], first, length)
            first += length
        return cls(spans)


class StateTables(Protocol):
    """What replaying needs of a cache."""

    def read_state(self, layer_idx: int, slots: Tensor, is_fresh: Tensor) -> tuple[Tensor, Tensor]: ...
    def write_state(self, layer_idx: int, slots: Tensor, conv: Tensor, state: Tensor) -> None: ...


def settle(held: HeldChunks, starts: Mapping[int, int], cache: StateTables, device: torch.device) -> None:
    """Replay what came true into the slots that go on at `starts`; they are no longer among the held ones then.

    Raises RequestError for a slot that goes on before its held tokens or beyond them.
    """
    true: dict[int, tuple[Span, int]] = {}
    for slot in held.spans.keys() & starts.keys():
        span = held.spans.pop(slot)
        count = starts[slot] - span.start
        if not 0 <= count <= span.length:
            raise RequestError(
                f"slot {slot} goes on at {starts[slot]}",
                expected=f"{span.start} to {span.start + span.length}, for that is what it holds",
            )
        if count:
            true[slot] = (span, count)
    if not true:
        return
    lengths = tuple(count for _, count in true.values())
    batch = TokenBatch(
        token_ids=torch.zeros(sum(lengths), dtype=torch.int64, device=device),
        lengths=lengths,
        starts=tuple(span.start for span, _ in true.values()),
        slots=tuple(true),
        logit_rows=torch.zeros(0, dtype=torch.int64, device=device),
    )
    segments = Segments(batch)
    rows = segments.table(span.first + i for span, count in true.values() for i in range(count))
    for layer_idx, each in held.layers.items():
        before, state = cache.read_state(layer_idx, segments.slot_index, segments.is_fresh)
        k = each.k[rows]
        _, state = delta_rule(k, k, each.v[rows], each.g[rows], each.beta[rows], state, segments)  # nothing is asked: q
        tails = [
            tail_of(new, segments, old) for new, old in zip(each.inputs[rows].unbind(1), before.unbind(1), strict=True)
        ]
        cache.write_state(layer_idx, segments.slot_index, torch.stack(tails, 1), state)
