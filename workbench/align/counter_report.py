"""What the counter-tests found: each suspected mistake with the residual that it leaves."""

from __future__ import annotations

import math
from dataclasses import dataclass

from workbench.base import Cell, Table

__all__ = ["CounterTests", "SuspectResult"]

SHOWN = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class SuspectResult:
    """One mistake replayed on the guilty layer. `residual`: the worst distance of what it makes to what was observed,
    in limits (within 1 it explains everything); `distance`: the sum of relative distances over the layer's tensors."""

    name: str
    text: str
    residual: float
    distance: float

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "text": self.text,
            "residual": _number(self.residual),
            "distance": _number(self.distance),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class CounterTests:
    """All suspects of one layer, the best first. `unexplained`: the residual of the right equations.

    `equal`: suspects that explain the observation just as well as the best one: they compute the same here.
    """

    name: str  # the guilty tensor
    side: str
    unexplained: float
    results: tuple[SuspectResult, ...]
    equal: tuple[str, ...] = ()

    @property
    def explanation(self) -> SuspectResult | None:
        """The suspect that leaves nothing beyond noise, or removes nine tenths of the residual; or two thirds of it and
        no other one half as much: a mistake of rounding cannot be repeated to the last bit."""
        if not self.results:
            return None
        best = self.results[0]
        others = [x.residual for x in self.results if x.name != best.name and x.name not in self.equal]
        is_clear = best.residual <= self.unexplained / 3 and all(2 * best.residual <= x for x in others)
        is_enough = best.residual <= 1.0 or best.residual <= 0.1 * self.unexplained or is_clear
        return best if is_enough and best.residual < self.unexplained else None

    def verdict(self) -> str:
        found = self.explanation
        if found is None:
            return f"None of {len(self.results)} counter-tests explains it"
        others = f", as would {', '.join(self.equal)}" if self.equal else ""
        left = "within the noise" if found.residual <= 1.0 else f"from {self.unexplained:.3g} to {found.residual:.3g}"
        return f"Explained by: {found.text} ({found.name}{others}); the residual falls {left}"

    def table(self) -> Table:
        rows: list[tuple[Cell, ...]] = [
            (x.name, x.text, f"{x.residual:.3g}", f"{x.distance:.2e}") for x in self.results[:SHOWN]
        ]
        rows.append(("–", "the equations as published", f"{self.unexplained:.3g}", "–"))
        return Table(
            columns=("suspect", "mistake", "residual (limits)", "distance"),
            rows=tuple(rows),
            title=f"counter-tests on {self.name}: {self.verdict()}",
            note=f"{len(self.results)} suspects",
        )

    def render(self) -> str:
        return self.table().render()

    def to_json(self) -> dict[str, object]:
        found = self.explanation
        return {
            "name": self.name,
            "side": self.side,
            "unexplained": _number(self.unexplained),
            "explanation": None if found is None else found.to_json(),
            "equal": list(self.equal),
            "results": [x.to_json() for x in self.results],
        }


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
