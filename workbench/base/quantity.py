"""A number with its unit and its origin; arithmetic keeps the weaker origin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["BASES", "Basis", "Quantity"]

Basis = Literal["exact", "measured", "datasheet", "modelled", "assumed"]  # from firm to weak
BASES: tuple[Basis, ...] = get_args(Basis)


@dataclass(frozen=True, slots=True)
class Quantity:
    """`value` in `unit`, known by `basis` from `source`.

    Addition needs equal units; multiplication and division combine the unit names. The result carries the weaker of
    the two bases, so a sum with one assumed part is itself assumed. Raises ValueError on a unit mismatch.
    """

    value: float
    unit: str
    basis: Basis = "measured"
    source: str = ""

    def __post_init__(self) -> None:
        if self.basis not in BASES:
            raise ValueError(f"basis {self.basis!r} is not one of {BASES}")

    def __add__(self, other: Quantity) -> Quantity:
        self._same_unit(other)
        return self._joined(self.value + other.value, self.unit, other)

    def __sub__(self, other: Quantity) -> Quantity:
        self._same_unit(other)
        return self._joined(self.value - other.value, self.unit, other)

    def __mul__(self, other: Quantity | float) -> Quantity:
        if isinstance(other, Quantity):
            return self._joined(self.value * other.value, f"{self.unit}*{other.unit}", other)
        return Quantity(self.value * other, self.unit, self.basis, self.source)

    __rmul__ = __mul__

    def __truediv__(self, other: Quantity | float) -> Quantity:
        if not isinstance(other, Quantity):
            return Quantity(self.value / other, self.unit, self.basis, self.source)
        return self._joined(self.value / other.value, _divided(self.unit, other.unit), other)

    def __str__(self) -> str:
        return f"{self.value:,.6g} {self.unit} ({self.basis}{': ' + self.source if self.source else ''})"

    def _same_unit(self, other: Quantity) -> None:
        if self.unit != other.unit:
            raise ValueError(f"cannot combine {self.unit!r} with {other.unit!r}")

    def _joined(self, value: float, unit: str, other: Quantity) -> Quantity:
        weaker = max(self, other, key=lambda q: BASES.index(q.basis))
        return Quantity(value, unit, weaker.basis, weaker.source)


def _divided(top: str, bottom: str) -> str:
    if top == bottom:
        return "1"
    head, _, tail = bottom.partition("/")
    if head == top and tail:  # B / (B/s) = s
        return tail
    return f"{top}/{bottom}"
