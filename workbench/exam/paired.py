"""Two models on the same questions: what one lost against the other, with the uncertainty of that difference.

Both answer the same questions, so only those count that one got right and the other wrong; the rest says nothing about
the difference, and an interval that ignored the pairing would be several times too wide.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from workbench.training.data.exam import ExamItem
from workbench.training.data.score import is_right

__all__ = ["PairedMarks", "compare_replies"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedMarks:
    """Right answers of a model and of the one it is held against, question by question."""

    kinds: str
    num: int
    both_right: int
    only_model: int  # right here, wrong there
    only_other: int

    @property
    def points_lost(self) -> float:
        """Percentage points lost against the other; negative where this model is the better one."""
        return 100 * (self.only_other - self.only_model) / self.num if self.num else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Bounds of the points lost with 95 % confidence.

        Half a question is added to each of the four outcomes; without it, two models that never differ would have an
        interval of no width. Source: A. Agresti and Y. Min, "Simple improved confidence intervals for comparing matched
        proportions", Statistics in Medicine 24 (2005), 729-740.
        """
        num, lost, won = self.num + 2.0, self.only_other + 0.5, self.only_model + 0.5
        middle = (lost - won) / num
        half = 1.959964 * math.sqrt(lost + won - (lost - won) ** 2 / num) / num
        return 100 * max(-1.0, middle - half), 100 * min(1.0, middle + half)

    @property
    def num_right(self) -> int:
        return self.both_right + self.only_model

    @property
    def other_right(self) -> int:
        return self.both_right + self.only_other

    def to_json(self) -> dict[str, Any]:
        low, high = self.interval
        return {**asdict(self), "points_lost": self.points_lost, "low": low, "high": high}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> PairedMarks:
        """Derived figures are computed anew."""
        return cls(**{name: record[name] for name in cls.__slots__})


def compare_replies(
    items: Sequence[ExamItem],
    replies: Sequence[str],
    other_replies: Sequence[str],
    kinds: Iterable[str],
    *,
    name: str,
) -> PairedMarks:
    """Marks over the questions of `kinds`. Raises ValueError where not every question has both replies."""
    chosen, counts = set(kinds), {(True, True): 0, (True, False): 0, (False, True): 0, (False, False): 0}
    for item, reply, other in zip(items, replies, other_replies, strict=True):
        if item.kind in chosen:
            counts[is_right(item, reply), is_right(item, other)] += 1
    return PairedMarks(
        kinds=name,
        num=sum(counts.values()),
        both_right=counts[True, True],
        only_model=counts[True, False],
        only_other=counts[False, True],
    )
