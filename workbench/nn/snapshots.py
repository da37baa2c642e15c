"""Copies of recurrent states at the end of a prefix, which other sequences go on from.

A recurrent state cannot be cut back to an earlier token, so one is copied where a prefix ends. The copies have places
that are allocated at the start; beyond those each takes memory of its own and gives it back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Snapshot", "SnapshotPool"]


@dataclass(frozen=True, eq=False, slots=True)
class Snapshot:
    """What the recurrent layers hold of one sequence: inputs of the convolutions (P, C, K-1) and states (H, Dv, Dk)."""

    conv: dict[int, Tensor]
    state: dict[int, Tensor]
    place: int = -1  # in the pool; -1: memory of its own


class SnapshotPool:
    """Room for `num_places` copies of one slot of each table; the tables have the slots in front."""

    def __init__(self, conv: Mapping[int, Tensor], state: Mapping[int, Tensor], num_places: int = 0) -> None:
        self._sources = (conv, state)
        self._pools = tuple({layer: _room(x, num_places) for layer, x in table.items()} for table in self._sources)
        self._free = list(reversed(range(num_places)))

    @property
    def tensors(self) -> list[Tensor]:
        """All that memory is taken for."""
        return [x for pool in self._pools for x in pool.values() if len(x)]

    @property
    def num_free(self) -> int:
        return len(self._free)

    @torch.no_grad()
    def take(self, slot: int) -> Snapshot:
        """A copy of what a slot holds now."""
        place = self._free.pop() if self._free else -1
        conv, state = (
            {layer: pool[layer][place] if place >= 0 else torch.empty_like(x[slot]) for layer, x in table.items()}
            for table, pool in zip(self._sources, self._pools, strict=True)
        )
        for table, copies in zip(self._sources, (conv, state), strict=True):
            for layer, x in table.items():
                copies[layer].copy_(x[slot])
        return Snapshot(conv=conv, state=state, place=place)

    @torch.no_grad()
    def restore(self, slot: int, snapshot: Snapshot) -> None:
        """Let a slot go on from the copy, which stays as it is."""
        for table, copies in zip(self._sources, (snapshot.conv, snapshot.state), strict=True):
            for layer, x in table.items():
                x[slot].copy_(copies[layer])

    def give_back(self, snapshot: Snapshot) -> None:
        """Nobody will go on from it any more."""
        if snapshot.place >= 0:
            assert snapshot.place not in self._free, f"snapshot {snapshot.place} was given back before"
            self._free.append(snapshot.place)


def _room(table: Tensor, num_places: int) -> Tensor:
    return torch.zeros(num_places, *table.shape[1:], dtype=table.dtype, device=table.device)
