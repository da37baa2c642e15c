"""The record of an alignment: every tensor with its two errors, the first guilty operator, what would explain it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from workbench.align.compare import Comparison
from workbench.align.counter_report import CounterTests
from workbench.align.metrics import Distance, LogitAgreement, RouterAgreement
from workbench.align.trace import forward_order, layer_of, produced_by, short_name
from workbench.base import Cell, Table

__all__ = ["AlignReport", "Blame", "OperatorError", "Sides"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorError:
    """One tensor of one prompt. `added`: made by this step from equal inputs; `inherited`: the rest of `total`,
    relative to the expected tensor. `floor`: what roundings of the served dtype do to this step on the same inputs, and
    `limit` the multiple of it that is allowed. None where nothing was measured: choices of experts are counted."""

    prompt: str
    name: str
    layer: int | None
    added: Distance | None
    total: Distance | None
    inherited: float | None
    floor: float | None
    limit: float
    passed: bool
    total_passed: bool
    note: str = ""

    @property
    def severity(self) -> float:
        """The added error in noise floors."""
        if self.added is None:
            return 0.0 if self.passed else math.inf
        return self.added.relative / self.floor if self.floor else self.added.relative

    def to_json(self) -> dict[str, object]:
        return {
            "prompt": self.prompt,
            "name": self.name,
            "layer": self.layer,
            "operator": produced_by(self.name),
            "added": None if self.added is None else self.added.to_json(),
            "inherited": self.inherited,
            "total": None if self.total is None else self.total.to_json(),
            "floor": self.floor,
            "limit": self.limit if math.isfinite(self.limit) else str(self.limit),
            "passed": self.passed,
            "total_passed": self.total_passed,
            "note": self.note,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Sides:
    """The comparisons of one prompt. `added`: served against reference on the reference's inputs; `total`: end to end
    (None for a prompt too short to judge so); `ours`, `theirs`: each side against the equations, on these inputs."""

    label: str
    added: Comparison
    total: Comparison | None
    ours: Comparison
    theirs: Comparison | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Blame:
    """The first tensor that differs beyond its noise on equal inputs, and the side that departs from the equations
    ("either": both are within the noise of their dtypes, yet further apart than these explain)."""

    name: str
    side: Literal["served", "reference", "both", "either"]

    @property
    def layer(self) -> int | None:
        return layer_of(self.name)

    @property
    def operator(self) -> str:
        return produced_by(self.name)

    def to_json(self) -> dict[str, object]:
        return {"name": self.name, "layer": self.layer, "operator": self.operator, "side": self.side}


@dataclass(frozen=True, kw_only=True, slots=True)
class AlignReport:
    """What `align_model` found. `evidence` (not saved): per prompt the given inputs and what each side made of them."""

    root: str
    served: str
    reference: str
    dtype: str
    sides: tuple[Sides, ...]
    rows: tuple[OperatorError, ...]
    logits: LogitAgreement | None
    routers: tuple[RouterAgreement, ...]
    blame: Blame | None
    seconds: float
    counter_tests: CounterTests | None = None
    evidence: tuple[Mapping[str, Mapping[str, Tensor]], ...] = field(default=(), repr=False, compare=False)

    @property
    def passed(self) -> bool:
        """Every step within its noise on equal inputs, every tensor end to end, and nothing missing."""
        totals = [side.total for side in self.sides if side.total is not None]
        return bool(self.rows) and self.blame is None and all(total.passed for total in totals)

    def with_counter_tests(self, counter_tests: CounterTests | None) -> AlignReport:
        return replace(self, counter_tests=counter_tests)

    def worst_rows(self) -> list[OperatorError]:
        """For each tensor the prompt with the largest added error, in the order of a forward pass."""
        worst: dict[str, OperatorError] = {}
        for row in self.rows:
            if row.name not in worst or (not row.passed, row.severity) > (
                not worst[row.name].passed,
                worst[row.name].severity,
            ):
                worst[row.name] = row
        return [worst[name] for name in forward_order(worst)]

    def verdict(self) -> str:
        """One sentence: agreement, or the first guilty operator with its figures."""
        if not self.rows:
            return "nothing was compared"
        if self.blame is None:
            for side in self.sides:
                if side.total is not None and not side.total.passed:
                    return f"every step agrees on equal inputs, but end to end {side.total.verdict()}"
            worst = max(self.worst_rows(), key=lambda row: row.severity if row.added is not None else 0.0)
            return (
                f"{self.served} agrees with {self.reference}: {len(self.rows)} tensors of {len(self.sides)} prompts; "
                f"largest added error {worst.severity:.2f} noise floors, at {worst.name}"
            )
        row = next(row for row in self.worst_rows() if row.name == self.blame.name)
        where = f"layer {row.layer}, {short_name(row.name)}" if row.layer is not None else row.name
        figures = row.note
        if row.added is not None:
            figures = (
                f"adds relative {row.added.relative:.2e} (max {row.added.max_abs:.2e}, {row.added.ulp:.3g} ulp, cosine "
                f"{row.added.cosine:.6f}) where roundings explain {row.limit:.1e}"
            )
            if row.inherited is not None:
                figures += f"; inherited {row.inherited:.1e}"
        guilty = {
            "served": self.served,
            "reference": self.reference,
            "both": "both sides",
            "either": "the two sides together",
        }[self.blame.side]
        text = f"first guilty: {where} ({self.blame.operator or 'unknown operator'}) of {guilty}: {figures}"
        return text if self.counter_tests is None else f"{text}. {self.counter_tests.verdict()}"

    def table(self, *, only_failures: bool = False) -> Table:
        rows: list[tuple[Cell, ...]] = [
            (
                row.name,
                *_cells(row.added),
                "–" if row.inherited is None else f"{row.inherited:.1e}",
                "–" if row.total is None else f"{row.total.relative:.1e}",
                "–" if row.floor is None else f"{row.floor:.1e}",
                f"{row.limit:.1e}",
                "ok" if row.passed else "WRONG",
                row.note,
            )
            for row in self.worst_rows()
            if not (only_failures and row.passed)
        ]
        columns = (
            "tensor",
            "added",
            "max|d|",
            "ulp",
            "cosine",
            "inherited",
            "total",
            "floor",
            "limit",
            "verdict",
            "note",
        )
        note = f"{self.served} against {self.reference}, activations {self.dtype}, {self.seconds:.1f} s"
        return Table(columns=columns, rows=tuple(rows), title=self.verdict(), note=note)

    def by_layer(self) -> Table:
        """The largest added, inherited and total error of each layer."""
        layers: dict[int, list[OperatorError]] = {}
        for row in self.rows:
            if row.layer is not None and row.added is not None:
                layers.setdefault(row.layer, []).append(row)
        rows: list[tuple[Cell, ...]] = []
        for layer, own in sorted(layers.items()):
            worst = max(own, key=lambda row: row.severity)
            rows.append(
                (
                    layer,
                    f"{max(x.added.relative for x in own if x.added is not None):.1e}",
                    f"{max((x.inherited for x in own if x.inherited is not None), default=0.0):.1e}",
                    f"{max((x.total.relative for x in own if x.total is not None), default=0.0):.1e}",
                    f"{worst.severity:.2f}",
                    short_name(worst.name),
                    "ok" if all(x.passed for x in own) else "WRONG",
                )
            )
        columns = ("layer", "added", "inherited", "total", "noise floors", "at", "verdict")
        return Table(columns=columns, rows=tuple(rows), title="errors by layer, the largest over tensors and prompts")

    def agreement(self) -> str:
        """Logits and experts in words."""
        lines = [] if self.logits is None else [self.logits.describe()]
        if self.routers:
            tokens = sum(x.tokens for x in self.routers)
            same = sum(x.tokens * x.same_sets for x in self.routers) / tokens
            lowest = min(self.routers, key=lambda x: x.same_sets)
            lines.append(
                f"experts: {same:.2%} of {tokens} token choices are the same set, least in layer {lowest.layer} "
                f"({lowest.same_sets:.2%}, overlap {lowest.overlap:.2%})"
            )
        return "\n".join(lines)

    def render(self) -> str:
        tables = [self.by_layer().render()]
        if not self.passed:
            tables.insert(0, self.table(only_failures=True).render())
        if self.counter_tests is not None:
            tables.append(self.counter_tests.render())
        return "\n\n".join([self.verdict(), *tables, self.agreement()])

    def _repr_html_(self) -> str:
        parts = [self.table(only_failures=not self.passed).to_html(), self.by_layer().to_html()]
        if self.counter_tests is not None:
            parts.append(self.counter_tests.table().to_html())
        return "".join(parts)

    def to_json(self) -> dict[str, Any]:
        return {
            "root": self.root,
            "served": self.served,
            "reference": self.reference,
            "dtype": self.dtype,
            "passed": self.passed,
            "verdict": self.verdict(),
            "guilty": None if self.blame is None else self.blame.to_json(),
            "counter_tests": None if self.counter_tests is None else self.counter_tests.to_json(),
            "logits": None if self.logits is None else self.logits.to_json(),
            "routers": [router.to_json() for router in self.routers],
            "tensors": [row.to_json() for row in self.rows],
            "missing": sorted({name for side in self.sides if side.total is not None for name in side.total.missing}),
            "seconds": self.seconds,
        }


def _cells(distance: Distance | None) -> tuple[str, str, str, str]:
    if distance is None:
        return ("–", "–", "–", "–")
    return (
        f"{distance.relative:.1e}",
        f"{distance.max_abs:.1e}",
        f"{distance.ulp:.3g}",
        f"{distance.cosine:.6f}",
    )
