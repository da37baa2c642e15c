"""Two traces of one prompt, tensor by tensor: how far apart, where, by which limit, and which is the first suspect."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.align.tolerance import FP32_TOLERANCE, Limit, Limits
from workbench.align.trace import forward_order, layer_of, produced_by, short_name
from workbench.base import Cell, Table

__all__ = ["Comparison", "TensorDiff", "aligned", "compare_traces"]

ROUTER_CHOICES = "topk_idx"
ROUTER_WEIGHTS = "topk_w"
ROUTER_MARGIN = "route_margin"
ROUTER_REGRET = "route_regret"
CONV_INPUTS = "kda_conv"


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDiff:
    """One tensor compared. `relative` and `peak` are infinite where found holds a value that is not finite. `stretch`
    says how much longer (above 0) or shorter found is along expected. `yardstick` is what rounding alone does to
    `relative`, where that was measured.

    For router choices `relative` is the share of tokens whose set of experts differs, `unexplained` counts those whose
    margin does not excuse it, and `worst` is the token with the largest such margin.
    """

    name: str
    shape: tuple[int, ...]
    max_abs: float
    relative: float
    peak: float
    stretch: float
    cosine: float
    worst: tuple[int, ...]
    expected: float
    found: float
    passed: bool
    limit: Limit
    unexplained: int = 0
    note: str = ""

    @property
    def yardstick(self) -> float | None:
        return self.limit.yardstick

    @property
    def severity(self) -> float:
        """What the worst tensor is chosen by: yardsticks where they were measured, else the relative difference."""
        return self.relative if self.yardstick is None else self.relative / self.yardstick

    def describe(self) -> str:
        """The distance in words, with its yardstick where there is one."""
        if self.yardstick is None:
            return f"relative {self.relative:.1e}"
        return f"{self.severity:.2f} yardsticks (relative {self.relative:.1e}, yardstick {self.yardstick:.1e})"

    def to_json(self) -> dict[str, object]:
        numbers = {
            key: _json_number(getattr(self, key))
            for key in ("max_abs", "relative", "peak", "stretch", "cosine", "expected", "found")
        }
        return {
            "name": self.name,
            "shape": list(self.shape),
            **numbers,
            "limit": _json_number(self.limit.relative),
            "yardstick": self.yardstick,
            "worst": list(self.worst),
            "passed": self.passed,
            "unexplained": self.unexplained,
            "note": self.note,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """All tensors of one prompt in forward order. `suspect` is the first that fails: what feeds it agreed.

    `is_followed`: the expected trace was computed with the experts that the other one chose.
    """

    diffs: tuple[TensorDiff, ...]
    missing: tuple[str, ...]
    tolerance: Limits
    label: str = ""
    is_followed: bool = False

    @property
    def suspect(self) -> TensorDiff | None:
        return next((diff for diff in self.diffs if not diff.passed), None)

    @property
    def passed(self) -> bool:
        """Something was compared, nothing required is missing, and every tensor is within tolerance."""
        return bool(self.diffs) and not self.missing and self.suspect is None

    @property
    def worst(self) -> TensorDiff | None:
        """Largest difference, in yardsticks where these were measured, among tensors compared by value (router choices
        are counted, not measured)."""
        values = [diff for diff in self.diffs if short_name(diff.name) != ROUTER_CHOICES]
        return max(values, key=lambda diff: diff.severity, default=None)

    def verdict(self) -> str:
        """One sentence: agreement with the worst figure, or the first wrong layer and tensor."""
        head = f"{self.label}: " if self.label else ""
        if not self.diffs:
            return f"{head}nothing was compared"
        if self.missing:
            return f"{head}{len(self.missing)} tensors were not captured, first {self.missing[0]}"
        if (suspect := self.suspect) is None:
            worst = "" if self.worst is None else f"; furthest apart: {self.worst.describe()} at {self.worst.name}"
            return f"{head}{len(self.diffs)} tensors agree{worst}"
        layer = layer_of(suspect.name)
        where = f"layer {layer}, tensor {short_name(suspect.name)}" if layer is not None else f"tensor {suspect.name}"
        origin = produced_by(suspect.name)
        figures = (
            f"max|d|={suspect.max_abs:.3e} at {list(suspect.worst)}, {suspect.describe()}, "
            f"cosine {suspect.cosine:.6f}, tolerance {suspect.limit.relative:.1e}"
        )
        parts = [
            "" if short_name(suspect.name) == ROUTER_CHOICES else figures,
            f"look at {origin}" if origin else "",
            suspect.note,
            self._after_near_tie(suspect),
        ]
        return f"{head}first wrong: {where}: {'; '.join(filter(None, parts))}"

    def _after_near_tie(self, suspect: TensorDiff) -> str:
        if self.is_followed:
            return ""
        earlier = self.diffs[: self.diffs.index(suspect)]
        ties = [diff.name for diff in earlier if short_name(diff.name) == ROUTER_CHOICES and diff.relative > 0]
        return f"follows other experts after a near tie in {ties[0]}" if ties else ""

    def table(self, *, only_failures: bool = False) -> Table:
        """One row per tensor in forward order."""
        rows: list[tuple[Cell, ...]] = [
            (
                diff.name,
                "x".join(map(str, diff.shape)),
                f"{diff.max_abs:.2e}",
                f"{diff.relative:.2e}",
                f"{diff.limit.relative:.2e}",
                f"{diff.cosine:.7f}",
                str(list(diff.worst)),
                f"{diff.expected:.5g}",
                f"{diff.found:.5g}",
                "ok" if diff.passed else "WRONG",
                diff.note,
            )
            for diff in self.diffs
            if not (only_failures and diff.passed)
        ]
        rows.extend((name, *["–"] * 8, "MISSING", "") for name in self.missing)
        columns = (
            "tensor",
            "shape",
            "max|d|",
            "relative",
            "limit",
            "cosine",
            "worst at",
            "expected",
            "found",
            "verdict",
            "note",
        )
        return Table(
            columns=columns, rows=tuple(rows), title=self.verdict(), note=f"limit: {self.tolerance.describe()}"
        )

    def render(self) -> str:
        return self.table().render()

    def _repr_html_(self) -> str:
        return self.table().to_html()

    def to_json(self) -> dict[str, object]:
        return {
            "label": self.label,
            "passed": self.passed,
            "verdict": self.verdict(),
            "suspect": None if self.suspect is None else self.suspect.name,
            "missing": list(self.missing),
            "tolerance": self.tolerance.to_json(),
            "tensors": [diff.to_json() for diff in self.diffs],
        }


def _everything(name: str) -> bool:
    return True


def compare_traces(
    expected: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    tolerance: Limits = FP32_TOLERANCE,
    *,
    required: Callable[[str], bool] = _everything,
    label: str = "",
) -> Comparison:
    """Compare every tensor that both traces hold, in forward order.

    An expected name that is not found counts as missing where `required(name)`; names that only `found` holds are
    ignored. Where `found` has more rows than `expected` (a trace kept only the last rows) the last rows are compared.
    Router choices are compared as sets and router weights only for tokens whose sets agree.
    """
    diffs = []
    for name in forward_order(expected.keys() & found.keys()):
        want, have = aligned(name, expected[name], found[name])
        stem, limit = name.removesuffix(short_name(name)), tolerance.limit(name)
        if short_name(name) == ROUTER_CHOICES:
            excuse = expected.get(stem + ROUTER_REGRET, expected.get(stem + ROUTER_MARGIN))
            diffs.append(_compare_choices(name, want, have, excuse, limit, tolerance.choice_limit(stem)))
        elif short_name(name) in (ROUTER_WEIGHTS, ROUTER_MARGIN):
            same = _same_sets(expected, found, stem)
            diffs.append(_compare_tensor(name, want, have, limit, rows=same))
        else:
            diffs.append(_compare_tensor(name, want, have, limit))
    missing = [name for name in forward_order(expected.keys() - found.keys()) if required(name)]
    return Comparison(
        diffs=tuple(diffs),
        missing=tuple(missing),
        tolerance=tolerance,
        label=label,
        is_followed=any(short_name(name) == ROUTER_REGRET for name in expected),
    )


def aligned(name: str, expected: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
    """The comparable parts: last rows of a longer trace, and as many convolution inputs as both sides keep."""
    if short_name(name) == CONV_INPUTS and expected.ndim == found.ndim:
        kept = min(expected.shape[-1], found.shape[-1])  # one less than the kernel is enough to go on
        return expected[..., -kept:], found[..., -kept:]
    return expected, _last_rows(found, expected)


def _last_rows(found: Tensor, expected: Tensor) -> Tensor:
    if found.ndim == expected.ndim and found.ndim and found.shape[1:] == expected.shape[1:]:
        return found[max(0, found.shape[0] - expected.shape[0]) :]
    return found


def _same_sets(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], stem: str) -> Tensor | None:
    """(T,) bool: tokens whose chosen experts agree; None where all tokens are comparable or no choices are known."""
    want, have = expected.get(stem + ROUTER_CHOICES), found.get(stem + ROUTER_CHOICES)
    if want is None or have is None or stem + ROUTER_REGRET in expected:  # followed: comparable whatever was chosen
        return None
    have = _last_rows(have, want)
    if want.shape != have.shape:
        return None
    return (want.long().cpu().sort(-1).values == have.long().cpu().sort(-1).values).all(-1)


def _compare_tensor(
    name: str, expected: Tensor, found: Tensor, limit: Limit, *, rows: Tensor | None = None
) -> TensorDiff:
    if expected.shape != found.shape:
        note = f"shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
        return _unlike(name, expected, note, limit)
    want, have = expected.detach().to("cpu", torch.float64), found.detach().to("cpu", torch.float64)
    note = ""
    if rows is not None and not bool(rows.all()):
        note = f"{int((~rows).sum())} of {len(rows)} tokens left out: they chose other experts"
        want, have = want.clone(), have.clone()
        want[~rows] = have[~rows] = 0.0
    if want.numel() == 0:
        return _unlike(name, expected, note or "empty tensor", limit, passed=True)
    # A value that is not finite equals only itself; subtracting would give nan for equal infinities.
    delta = torch.where(want == have, torch.zeros_like(want), (have - want).abs())
    delta = torch.where(delta.isnan(), torch.full_like(delta, math.inf), delta)
    worst = tuple(int(i) for i in torch.unravel_index(delta.argmax(), delta.shape))
    finite = torch.where(want.isfinite(), want, torch.zeros_like(want))
    norm, rms = finite.norm().item(), finite.square().mean().sqrt().item()
    max_abs = delta.max().item()
    if bad := int((~have.isfinite() & want.isfinite()).sum()):
        note = f"{bad} values are not finite"
    relative, peak = _ratio(delta.norm().item(), norm), _ratio(max_abs, rms)
    size = (finite * finite).sum().item()
    stretch = _ratio((finite * (have - want).nan_to_num(math.inf)).sum().item(), size)
    wrong = []
    if limit.peak is not None and not peak <= limit.peak:
        wrong.append(f"a single element off by {peak:.1e} of the rms, at most {limit.peak:.1e}")
    if limit.stretch is not None and not abs(stretch) <= limit.stretch:
        wrong.append(f"scaled by 1{stretch:+.1e} on the whole, rounding explains {limit.stretch:.1e}")
    return TensorDiff(
        name=name,
        shape=tuple(expected.shape),
        max_abs=max_abs,
        relative=relative,
        peak=peak,
        stretch=stretch,
        cosine=_cosine(want, have),
        worst=worst,
        expected=want[worst].item(),
        found=have[worst].item(),
        passed=relative <= limit.relative and not wrong,
        limit=limit,
        note="; ".join(filter(None, [note, *wrong])),
    )


def _compare_choices(
    name: str, expected: Tensor, found: Tensor, excuse: Tensor | None, limit: Limit, near: float | Tensor
) -> TensorDiff:
    """`near`: up to this difference of the scores another choice is excused; for all tokens, or (T,)."""
    if expected.shape != found.shape:
        return _unlike(name, expected, f"shape {tuple(found.shape)} instead of {tuple(expected.shape)}", limit)
    want, have = (x.detach().long().cpu().sort(-1).values for x in (expected, found))
    differ = (want != have).any(-1)
    # Without a margin in the trace nothing excuses another choice.
    gap = torch.full((len(want),), math.inf, dtype=torch.float64) if excuse is None else excuse.double().cpu()
    unexplained = differ & (gap >= near)
    tokens = unexplained if bool(unexplained.any()) else differ
    note, worst, at = "", (0,), 0
    if bool(differ.any()):
        at = int(torch.where(tokens, gap, torch.full_like(gap, -1.0)).argmax())
        worst = (at,)
        note = (
            f"{int(differ.sum())} of {len(differ)} tokens chose other experts, {int(unexplained.sum())} of them beyond "
            f"a near tie; token {at}: {want[at].tolist()} became {have[at].tolist()}, score gap {gap[at].item():.1e}"
        )
    share = differ.double().mean().item() if len(differ) else 0.0
    return TensorDiff(
        name=name,
        shape=tuple(expected.shape),
        max_abs=float(differ.sum().item()),
        relative=share,
        peak=0.0,
        stretch=0.0,
        cosine=1.0 - share,
        worst=worst,
        expected=float(len(differ)),
        found=float((~differ).sum().item()),
        passed=not bool(unexplained.any()),
        limit=limit,
        unexplained=int(unexplained.sum()),
        note=note,
    )


def _unlike(name: str, expected: Tensor, note: str, limit: Limit, *, passed: bool = False) -> TensorDiff:
    size = 0.0 if passed else math.inf
    return TensorDiff(
        name=name,
        shape=tuple(expected.shape),
        max_abs=size,
        relative=size,
        peak=size,
        stretch=size,
        cosine=1.0 if passed else 0.0,
        worst=(),
        expected=math.nan,
        found=math.nan,
        passed=passed,
        limit=limit,
        note=note,
    )


def _ratio(difference: float, size: float) -> float:
    if difference == 0.0:
        return 0.0
    return difference / size if size > 0.0 else math.inf


def _cosine(want: Tensor, have: Tensor) -> float:
    size = want.norm().item() * have.norm().item()
    if size == 0.0:
        return 1.0 if bool((want == have).all()) else 0.0
    return (want.flatten() @ have.flatten()).item() / size


def _json_number(value: float) -> float | str:
    """JSON has no infinity and no nan; they are spelled as text."""
    return value if math.isfinite(value) else str(value)
