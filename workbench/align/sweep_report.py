"""The record of a precision sweep: what each group costs in each format, the mixes on the way, and the one chosen."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from workbench.base import Cell, Table, human
from workbench.nn.precision_map import PrecisionMap

__all__ = ["Mix", "Sensitivity", "SweepReport"]

SHOWN = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensitivity:
    """One group of modules held in one format, everything else plain. `kl` in nats, mean over positions."""

    group: str
    scheme: str
    bytes_plain: int
    bytes_stored: int
    kl: float
    top1: float  # share of positions with the same highest logit

    @property
    def bytes_saved(self) -> int:
        return self.bytes_plain - self.bytes_stored

    @property
    def kl_per_byte(self) -> float:
        """Nats per byte saved; infinite where nothing is saved."""
        return self.kl / self.bytes_saved if self.bytes_saved > 0 else math.inf

    def to_json(self) -> dict[str, Any]:
        price = self.kl_per_byte
        return {**asdict(self), "bytes_saved": self.bytes_saved, "kl_per_byte": price if math.isfinite(price) else None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """A whole model in a mix of formats. `kl_predicted` adds up what each group costs alone; `kl` and `top1` are
    measured with everything held at once, None where that was not done. `name` is of a uniform precision, or "mix"."""

    name: str
    schemes: tuple[tuple[str, str], ...]  # group, scheme
    bytes_total: int
    ratio: float  # over the same model in bf16
    kl_predicted: float
    kl: float | None = None
    top1: float | None = None
    matrices_ratio: float = 1.0  # the matrices that can be held in a format, over the same in bf16

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "schemes": dict(self.schemes)}


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepReport:
    """`mixes` are measured points, smallest last; `uniform` the named precisions for comparison. `chosen` meets the
    budget; None where no mix does, which `verdict` says. `top1_counts` positions that a share of agreement is of."""

    root: str
    budget: str
    positions: int
    bytes_bf16: int
    sensitivities: tuple[Sensitivity, ...]
    mixes: tuple[Mix, ...]
    uniform: tuple[Mix, ...]
    chosen: Mix | None
    precision_map: PrecisionMap | None
    seconds: float

    @property
    def ok(self) -> bool:
        return self.chosen is not None

    def verdict(self) -> str:
        if self.chosen is None:
            return f"no mix meets {self.budget}"
        mix = self.chosen
        measured = (
            "" if mix.kl is None or mix.top1 is None else f", KL {mix.kl:.2e} nats, same first choice {mix.top1:.2%}"
        )
        counts: dict[str, int] = {}
        for _, scheme in mix.schemes:
            counts[scheme] = counts.get(scheme, 0) + 1
        parts = ", ".join(f"{count} groups {scheme}" for scheme, count in sorted(counts.items()))
        return f"{self.budget}: {human(mix.bytes_total, 'B')}, {mix.ratio:.3f} of bf16{measured} ({parts})"

    def table(self) -> Table:
        """Uniform precisions and measured mixes, by size."""
        rows: list[tuple[Cell, ...]] = [
            (
                mix.name + (" (chosen)" if mix is self.chosen else ""),
                human(mix.bytes_total, "B"),
                f"{mix.ratio:.3f}",
                f"{mix.matrices_ratio:.3f}",
                f"{mix.kl_predicted:.2e}",
                "–" if mix.kl is None else f"{mix.kl:.2e}",
                "–" if mix.top1 is None else f"{mix.top1:.2%}",
            )
            for mix in sorted((*self.uniform, *self.mixes), key=lambda mix: -mix.bytes_total)
        ]
        columns = ("precision", "weights", "of bf16", "matrices", "KL added up", "KL measured", "same first choice")
        note = f"{self.positions} positions, {self.seconds:.1f} s; matrices: those that can be held so, of bf16"
        return Table(columns=columns, rows=tuple(rows), title=self.verdict(), note=note)

    def by_group(self) -> Table:
        """What a byte saved costs, the dearest first."""
        ordered = sorted(self.sensitivities, key=lambda x: -x.kl_per_byte)
        rows: list[tuple[Cell, ...]] = [
            (
                x.group,
                x.scheme,
                human(x.bytes_saved, "B"),
                f"{x.kl:.2e}",
                f"{x.kl_per_byte * 1e6:.2e}",
                f"{x.top1:.2%}",
            )
            for x in ordered[:SHOWN]
        ]
        columns = ("group", "format", "saved", "KL", "KL per MB saved", "same first choice")
        note = f"{len(ordered)} pairs of group and format" + (f", the {SHOWN} dearest" if len(ordered) > SHOWN else "")
        return Table(columns=columns, rows=tuple(rows), title="sensitivity of each group alone", note=note)

    def render(self) -> str:
        return f"{self.table().render()}\n\n{self.by_group().render()}"

    def _repr_html_(self) -> str:
        return self.table().to_html() + self.by_group().to_html()

    def to_json(self) -> dict[str, Any]:
        return {
            "root": self.root,
            "budget": self.budget,
            "verdict": self.verdict(),
            "positions": self.positions,
            "bytes_bf16": self.bytes_bf16,
            "sensitivities": [x.to_json() for x in self.sensitivities],
            "uniform": [mix.to_json() for mix in self.uniform],
            "mixes": [mix.to_json() for mix in self.mixes],
            "chosen": None if self.chosen is None else self.chosen.to_json(),
            "precision_map": None if self.precision_map is None else self.precision_map.to_json(),
            "seconds": self.seconds,
        }
