"""What a parity check found: tensors, choices of experts and greedy tokens over all prompts, with one verdict."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.align.compare import Comparison, TensorDiff
from workbench.align.trace import forward_order, layer_of, short_name
from workbench.base import Cell, Table

__all__ = ["GreedyCheck", "ParityReport"]

NOT_MEASURED = ("topk_idx", "route_margin", "route_regret")  # choices of experts are counted


@dataclass(frozen=True, kw_only=True, slots=True)
class GreedyCheck:
    """Generated tokens against the reference's own choice. `first_wrong` counts from 0, None where all agree.

    `gap` is by how much the reference rates its own choice above the generated token, at most over the tokens; up to
    `limit` two implementations may part. Where the precision rounds, a token may also come from other experts, chosen
    at a near tie while decoding: no single gap is bounded then, and both are averages (`is_mean`).
    """

    num_tokens: int
    num_equal: int
    first_wrong: int | None
    gap: float
    limit: float
    is_mean: bool = False

    @property
    def passed(self) -> bool:
        return self.gap <= self.limit

    def describe(self) -> str:
        """What is wrong, in words."""
        if self.is_mean:
            return (
                f"{self.num_tokens - self.num_equal} of {self.num_tokens} generated tokens are not the reference's "
                f"choice (logit gap {self.gap:.3g} on average, rounding explains {self.limit:.3g})"
            )
        return (
            f"generated token {self.first_wrong} is not the reference's choice "
            f"(logit gap {self.gap:.3g}, at most {self.limit:.0e})"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityReport:
    """Parity over all prompts. `suspect` is the failing tensor that a forward pass computes first, over all prompts.

    In a precision that rounds, `comparisons` goes step by step, each tensor from the served inputs of its step, and
    `end_to_end` all the way from the tokens; otherwise every comparison is end to end and `end_to_end` is empty.
    """

    root: str
    comparisons: tuple[Comparison, ...]
    greedy: tuple[GreedyCheck, ...]
    seconds: float
    end_to_end: tuple[Comparison, ...] = ()

    @property
    def every(self) -> tuple[Comparison, ...]:
        return self.comparisons + self.end_to_end

    @property
    def passed(self) -> bool:
        return bool(self.comparisons) and all(x.passed for x in self.every) and all(x.passed for x in self.greedy)

    @property
    def num_tensors(self) -> int:
        return sum(len(comparison.diffs) for comparison in self.every)

    @property
    def num_wrong_tensors(self) -> int:
        """Tensors out of tolerance or missing."""
        return sum(len(x.missing) + sum(not diff.passed for diff in x.diffs) for x in self.every)

    @property
    def num_wrong(self) -> int:
        """Tensors out of tolerance or missing, and prompts whose greedy tokens are wrong."""
        return self.num_wrong_tensors + sum(not greedy.passed for greedy in self.greedy)

    @property
    def worst(self) -> TensorDiff | None:
        """Largest difference over all prompts, in yardsticks where these were measured."""
        return max((x.worst for x in self.every if x.worst is not None), key=lambda diff: diff.severity, default=None)

    @property
    def suspect(self) -> TensorDiff | None:
        suspects = {x.suspect.name: x.suspect for x in reversed(self.every) if x.suspect is not None}
        return suspects[forward_order(suspects)[0]] if suspects else None

    def verdict(self) -> str:
        """One sentence for a report."""
        if not self.comparisons:
            return "nothing was compared"
        if self.suspect is not None:
            return next(x for x in self.every if x.suspect == self.suspect).verdict()
        if incomplete := next((x for x in self.every if x.missing), None):
            return incomplete.verdict()
        for comparison, greedy in zip(self.comparisons, self.greedy, strict=True):
            if not greedy.passed:
                return f"{comparison.label}: tensors agree, but {greedy.describe()}"
        tokens, equal = (sum(getattr(x, key) for x in self.greedy) for key in ("num_tokens", "num_equal"))
        few, others = ("", "") if tokens == equal else (f"{equal} of ", ", the others within what rounding explains")
        furthest = [f"{x.worst.describe()} at {x.worst.name}, {x.label}" for x in self._furthest() if x.worst]
        return (
            f"{self.num_tensors} tensors of {len(self.comparisons)} prompts and {few}{tokens} greedy tokens agree"
            f"{others}; furthest apart: {'; '.join(furthest)}"
        )

    def _furthest(self) -> list[Comparison]:
        """The comparison with the largest difference, of each way."""
        ways = [[x for x in way if x.worst is not None] for way in (self.comparisons, self.end_to_end)]
        return [max(way, key=_severity) for way in ways if way]

    def table(self) -> Table:
        """One row per comparison."""
        rows: list[tuple[Cell, ...]] = []
        nothing = GreedyCheck(num_tokens=0, num_equal=0, first_wrong=None, gap=0.0, limit=0.0)
        greedy_checks = [*self.greedy, *[nothing] * len(self.end_to_end)]
        for comparison, greedy in zip(self.every, greedy_checks, strict=True):
            choices = [diff for diff in comparison.diffs if short_name(diff.name) == "topk_idx"]
            worst = comparison.worst
            rows.append(
                (
                    comparison.label,
                    len(comparison.diffs),
                    "–" if worst is None else worst.describe(),
                    "–" if worst is None else worst.name,
                    f"{sum(int(d.max_abs) for d in choices)} of {sum(int(d.expected) for d in choices)}",
                    f"{greedy.num_equal} of {greedy.num_tokens}" if greedy.num_tokens else "–",
                    "ok" if comparison.passed and greedy.passed else "WRONG",
                )
            )
        columns = ("prompt", "tensors", "furthest apart", "at", "other experts", "greedy tokens", "verdict")
        limits = dict.fromkeys(comparison.tolerance.describe() for comparison in self.every)
        note = f"limit: {'; '.join(limits)}; {self.seconds:.1f} s"
        return Table(columns=columns, rows=tuple(rows), title=self.verdict(), note=note)

    def worst_by_layer(self) -> dict[int, TensorDiff]:
        """The largest difference in each layer over all prompts: where error enters and how it grows."""
        worst: dict[int, TensorDiff] = {}
        for diff in (diff for comparison in self.every for diff in comparison.diffs):
            layer = layer_of(diff.name)
            if layer is None or short_name(diff.name) in NOT_MEASURED:
                continue
            if layer not in worst or diff.severity > worst[layer].severity:
                worst[layer] = diff
        return dict(sorted(worst.items()))

    def relative_by_layer(self) -> dict[int, float]:
        """The largest relative difference end to end in each layer over all prompts: how error grows with depth."""
        worst: dict[int, float] = {}
        for comparison in self.end_to_end or self.comparisons:
            for diff in comparison.diffs:
                layer = layer_of(diff.name)
                if layer is not None and short_name(diff.name) not in NOT_MEASURED:
                    worst[layer] = max(worst.get(layer, 0.0), diff.relative)
        return dict(sorted(worst.items()))

    def by_layer(self) -> Table:
        """`worst_by_layer` as a table."""
        rows = tuple(
            (layer, diff.describe(), f"{diff.limit.relative:.1e}", short_name(diff.name), f"{diff.max_abs:.1e}")
            for layer, diff in self.worst_by_layer().items()
        )
        return Table(columns=("layer", "furthest apart", "limit", "tensor", "max|d|"), rows=rows)

    def render(self) -> str:
        failing = [x.table(only_failures=True).render() for x in self.every if not x.passed]
        return "\n\n".join([self.table().render(), *failing])

    def _repr_html_(self) -> str:
        failing = [x.table(only_failures=True).to_html() for x in self.every if not x.passed]
        return "".join([self.table().to_html(), *failing])

    def to_json(self) -> dict[str, object]:
        return {
            "root": self.root,
            "passed": self.passed,
            "verdict": self.verdict(),
            "suspect": None if self.suspect is None else self.suspect.name,
            "seconds": self.seconds,
            "prompts": [
                {
                    **comparison.to_json(),
                    "greedy": {
                        "tokens": greedy.num_tokens,
                        "equal": greedy.num_equal,
                        "first_wrong": greedy.first_wrong,
                        "gap": greedy.gap,
                        "limit": greedy.limit,
                        "is_mean": greedy.is_mean,
                    },
                }
                for comparison, greedy in zip(self.comparisons, self.greedy, strict=True)
            ],
            "end_to_end": [comparison.to_json() for comparison in self.end_to_end],
        }


def _severity(comparison: Comparison) -> float:
    return -1.0 if comparison.worst is None else comparison.worst.severity
