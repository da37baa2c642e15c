"""How evenly experts are used: tokens by expert and layer, their busiest over the mean, and the entropy of routing.

Random weights collapse routing onto few experts, and a run over few experts reads few weights: a time measured there is
too good. So how many experts were hit belongs beside every time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.base import Cell, Table

__all__ = ["ExpertLoad", "LayerLoad", "merge_counts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerLoad:
    """Tokens that each expert of one layer got."""

    layer: int
    counts: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Choices of experts: tokens times experts per token."""
        return sum(self.counts)

    @property
    def num_hit(self) -> int:
        return sum(count > 0 for count in self.counts)

    @property
    def busiest(self) -> float:
        """Busiest expert over the mean; 1 is even. 0 where nothing was routed."""
        return max(self.counts, default=0) * len(self.counts) / self.num_tokens if self.num_tokens else 0.0

    @property
    def entropy(self) -> float:
        """Of the choice of an expert, over that of an even one: 1 is even, 0 always the same expert."""
        if not self.num_tokens or len(self.counts) < 2:
            return 0.0
        shares = [count / self.num_tokens for count in self.counts if count]
        return max(0.0, -math.fsum(p * math.log(p) for p in shares)) / math.log(len(self.counts))


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLoad:
    layers: tuple[LayerLoad, ...]

    @property
    def worst(self) -> LayerLoad | None:
        return max(self.layers, key=lambda layer: layer.busiest, default=None)

    def to_json(self) -> dict[str, Any]:
        return {
            "layers": [
                {
                    "layer": x.layer,
                    "counts": list(x.counts),
                    "num_hit": x.num_hit,
                    "busiest": x.busiest,
                    "entropy": x.entropy,
                }
                for x in self.layers
            ]
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> ExpertLoad:
        return cls(layers=tuple(LayerLoad(layer=x["layer"], counts=tuple(x["counts"])) for x in record["layers"]))

    def table(self) -> Table:
        rows: list[tuple[Cell, ...]] = [
            (x.layer, x.num_tokens, f"{x.num_hit} of {len(x.counts)}", f"{x.busiest:.2f}", f"{x.entropy:.3f}")
            for x in self.layers
        ]
        title = ""
        if self.worst is not None:
            title = f"The busiest expert gets {self.worst.busiest:.2f} times its share, in layer {self.worst.layer}"
        columns = ("layer", "choices", "experts hit", "busiest / mean", "entropy / even")
        return Table(title=title, columns=columns, rows=tuple(rows))

    def render(self) -> str:
        return self.table().render()

    def _repr_html_(self) -> str:
        return self.table().to_html()


def merge_counts(parts: Sequence[Mapping[int, Sequence[int]]]) -> ExpertLoad:
    """One load from counts by layer of ranks that saw different tokens or layers."""
    merged: dict[int, list[int]] = {}
    for part in parts:
        for layer, counts in part.items():
            total = merged.setdefault(layer, [0] * len(counts))
            for expert, count in enumerate(counts):
                total[expert] += count
    return ExpertLoad(layers=tuple(LayerLoad(layer=n, counts=tuple(merged[n])) for n in sorted(merged)))
