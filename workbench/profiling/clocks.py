"""How far the clocks of ranks lie apart: from the time a question about the time takes.

    handle   asked |-------------------------------| answered
    rank                      shown

The rank read its clock somewhere in between, so half the round trip is the error. Ranks of one machine share one clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["ClockReading", "ClockSample", "compare_clocks"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockReading:
    """What a rank answers: its monotonic clock, and the boot of the machine that the clock counts from."""

    boot: str
    shown_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockSample:
    """One round: asked and answered on the handle's clock, readings by rank."""

    asked_s: float
    answered_s: float
    readings: tuple[ClockReading, ...]


def compare_clocks(samples: Sequence[ClockSample]) -> tuple[dict[int, float], float]:
    """Offset of every rank's clock from that of rank 0, and the error of the worst. Exactly 0 on rank 0's machine.

    The quickest round is believed. Raises ValueError for no samples.
    """
    if not samples:
        raise ValueError("no clock was read")
    best = min(samples, key=lambda sample: sample.answered_s - sample.asked_s)
    middle = (best.asked_s + best.answered_s) / 2
    first = best.readings[0]
    by_boot: Mapping[str, float] = {x.boot: x.shown_s - middle for x in reversed(best.readings)}
    offsets = {
        rank: 0.0 if x.boot == first.boot else by_boot[x.boot] - by_boot[first.boot]
        for rank, x in enumerate(best.readings)
    }
    is_shared = len({x.boot for x in best.readings}) == 1
    # Both readings lie anywhere in the round.
    return offsets, 0.0 if is_shared else best.answered_s - best.asked_s
