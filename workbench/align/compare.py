"""Two traces of one prompt, tensor by tensor: how far apart, where, by which limit, and which is the first suspect."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.align.trace import forward_order, layer_of, produced_by, short_name
from workbench.base import Cell, Table

__all__ = ["FP32_TOLERANCE", "Comparison", "TensorDiff", "Tolerance", "compare_traces", "tolerance_for"]

ROUTER_CHOICES = "topk_idx"
ROUTER_WEIGHTS = "topk_w"
ROUTER_MARGIN = "route_margin"
ROUTER_REGRET = "route_regret"
CONV_INPUTS = "kda_conv"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """What one comparison allows, and why.

    `relative` bounds ||found - expected|| / ||expected||; `peak` bounds the largest single difference over the root
    mean square of the expected tensor, so that one wrong element cannot hide in a large tensor (None: not bounded);
    `route_margin`: a token may choose other experts only where the expected scores differ by less than this. What
    follows from another choice is comparable only where the expected trace followed that choice. `logit_gap`: a greedy
    token may differ from the expected one only where its expected logit is less than this below the highest.
    """

    relative: float
    peak: float | None
    route_margin: float
    logit_gap: float
    reason: str


FP32_TOLERANCE = Tolerance(
    relative=5e-5,
    peak=5e-4,
    route_margin=2e-6,
    logit_gap=1e-3,
    reason="fp32 rounding grows to about 1e-5 through nine layers; a wrong epsilon shows as 1e-4 or more",
)
_BY_PRECISION = {
    "fp32": FP32_TOLERANCE,
    "bf16": Tolerance(
        relative=0.2,
        peak=None,
        route_margin=0.1,
        logit_gap=0.5,
        reason="bf16 rounding: up to 0.12 seen through 8 layers, with expert choices followed",
    ),
}
_BY_PRECISION["mxfp4"] = _BY_PRECISION["bf16"]  # the published weights, exactly; activations in bf16


def tolerance_for(precision: str) -> Tolerance | None:
    """Limit for a model held in `precision`; None where the weights themselves are approximated and only a measurement
    can say how far apart is right."""
    return _BY_PRECISION.get(precision)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDiff:
    """One tensor compared. `relative` and `peak` are infinite where found holds a value that is not finite.

    For router choices `relative` is the share of tokens whose set of experts differs, `unexplained` counts those whose
    margin does not excuse it, and `worst` is the token with the largest such margin.
    """

    name: str
    shape: tuple[int, ...]
    max_abs: float
    relative: float
    peak: float
    cosine: float
    worst: tuple[int, ...]
    expected: float
    found: float
    passed: bool
    unexplained: int = 0
    note: str = ""

    def to_json(self) -> dict[str, object]:
        numbers = {
            key: _json_number(getattr(self, key))
            for key in ("max_abs", "relative", "peak", "cosine", "expected", "found")
        }
        return {
            "name": self.name,
            "shape": list(self.shape),
            **numbers,
            "worst": list(self.worst),
            "passed": self.passed,
            "unexplained": self.unexplained,
            "note": self.note,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """All tensors of one prompt in forward order. `suspect` is the first that fails: what feeds it agreed."""

    diffs: tuple[TensorDiff, ...]
    missing: tuple[str, ...]
    tolerance: Tolerance
    label: str = ""

    @property
    def suspect(self) -> TensorDiff | None:
        return next((diff for diff in self.diffs if not diff.passed), None)

    @property
    def passed(self) -> bool:
        """Something was compared, nothing required is missing, and every tensor is within tolerance."""
        return bool(self.diffs) and not self.missing and self.suspect is None

    @property
    def worst(self) -> TensorDiff | None:
        """Largest relative difference among tensors compared by value (router choices are counted, not measured)."""
        values = [diff for diff in self.diffs if short_name(diff.name) != ROUTER_CHOICES]
        return max(values, key=lambda diff: diff.relative, default=None)

    def verdict(self) -> str:
        """One sentence: agreement with the worst figure, or the first wrong layer and tensor."""
        head = f"{self.label}: " if self.label else ""
        if not self.diffs:
            return f"{head}nothing was compared"
        if self.missing:
            return f"{head}{len(self.missing)} tensors were not captured, first {self.missing[0]}"
        if (suspect := self.suspect) is None:
            text = f"{head}{len(self.diffs)} tensors agree"
            return (
                text
                if self.worst is None
                else (f"{text}; largest relative difference {self.worst.relative:.1e} at {self.worst.name}")
            )
        layer = layer_of(suspect.name)
        where = f"layer {layer}, tensor {short_name(suspect.name)}" if layer is not None else f"tensor {suspect.name}"
        origin = produced_by(suspect.name)
        return (
            f"{head}first wrong: {where}: max|d|={suspect.max_abs:.3e} at {list(suspect.worst)}, "
            f"relative {suspect.relative:.1e}, cosine {suspect.cosine:.6f}, tolerance {self.tolerance.relative:.1e}"
            + (f"; look at {origin}" if origin else "")
            + (f"; {suspect.note}" if suspect.note else "")
            + self._after_near_tie(suspect)
        )

    def _after_near_tie(self, suspect: TensorDiff) -> str:
        earlier = self.diffs[: self.diffs.index(suspect)]
        ties = [diff.name for diff in earlier if short_name(diff.name) == ROUTER_CHOICES and diff.relative > 0]
        return f"; follows other experts after a near tie in {ties[0]}" if ties else ""

    def table(self, *, only_failures: bool = False) -> Table:
        """One row per tensor in forward order."""
        rows: list[tuple[Cell, ...]] = [
            (
                diff.name,
                "x".join(map(str, diff.shape)),
                f"{diff.max_abs:.2e}",
                f"{diff.relative:.2e}",
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
        rows.extend((name, *["–"] * 7, "MISSING", "") for name in self.missing)
        columns = (
            "tensor",
            "shape",
            "max|d|",
            "relative",
            "cosine",
            "worst at",
            "expected",
            "found",
            "verdict",
            "note",
        )
        peak = "" if self.tolerance.peak is None else f", single element {self.tolerance.peak:.0e} of the rms"
        limit = f"limit: relative {self.tolerance.relative:.0e}{peak} ({self.tolerance.reason})"
        return Table(columns=columns, rows=tuple(rows), title=self.verdict(), note=limit)

    def render(self) -> str:
        return self.table().render()

    def _repr_html_(self) -> str:
        return self.table().to_html()

    def to_json(self) -> dict[str, object]:
        limit = self.tolerance
        return {
            "label": self.label,
            "passed": self.passed,
            "verdict": self.verdict(),
            "suspect": None if self.suspect is None else self.suspect.name,
            "missing": list(self.missing),
            "tolerance": {
                "relative": limit.relative,
                "peak": limit.peak,
                "route_margin": limit.route_margin,
                "logit_gap": limit.logit_gap,
                "reason": limit.reason,
            },
            "tensors": [diff.to_json() for diff in self.diffs],
        }


def _everything(name: str) -> bool:
    return True


def compare_traces(
    expected: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    tolerance: Tolerance = FP32_TOLERANCE,
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
        want, have = _aligned(name, expected[name], found[name])
        stem = name.removesuffix(short_name(name))
        if short_name(name) == ROUTER_CHOICES:
            excuse = expected.get(stem + ROUTER_REGRET, expected.get(stem + ROUTER_MARGIN))
            diffs.append(_compare_choices(name, want, have, excuse, tolerance))
        elif short_name(name) in (ROUTER_WEIGHTS, ROUTER_MARGIN):
            same = _same_sets(expected, found, stem)
            diffs.append(_compare_tensor(name, want, have, tolerance, rows=same))
        else:
            diffs.append(_compare_tensor(name, want, have, tolerance))
    missing = [name for name in forward_order(expected.keys() - found.keys()) if required(name)]
    return Comparison(diffs=tuple(diffs), missing=tuple(missing), tolerance=tolerance, label=label)


def _aligned(name: str, expected: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
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
    name: str, expected: Tensor, found: Tensor, tolerance: Tolerance, *, rows: Tensor | None = None
) -> TensorDiff:
    if expected.shape != found.shape:
        note = f"shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
        return _unlike(name, expected, note)
    want, have = expected.detach().to("cpu", torch.float64), found.detach().to("cpu", torch.float64)
    note = ""
    if rows is not None and not bool(rows.all()):
        note = f"{int((~rows).sum())} of {len(rows)} tokens left out: they chose other experts"
        want, have = want.clone(), have.clone()
        want[~rows] = have[~rows] = 0.0
    if want.numel() == 0:
        return _unlike(name, expected, note or "empty tensor", passed=True)
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
    passed = relative <= tolerance.relative and (tolerance.peak is None or peak <= tolerance.peak)
    return TensorDiff(
        name=name,
        shape=tuple(expected.shape),
        max_abs=max_abs,
        relative=relative,
        peak=peak,
        cosine=_cosine(want, have),
        worst=worst,
        expected=want[worst].item(),
        found=have[worst].item(),
        passed=passed,
        note=note,
    )


def _compare_choices(
    name: str, expected: Tensor, found: Tensor, excuse: Tensor | None, tolerance: Tolerance
) -> TensorDiff:
    if expected.shape != found.shape:
        return _unlike(name, expected, f"shape {tuple(found.shape)} instead of {tuple(expected.shape)}")
    want, have = (x.detach().long().cpu().sort(-1).values for x in (expected, found))
    differ = (want != have).any(-1)
    # Without a margin in the trace nothing excuses another choice.
    gap = torch.full((len(want),), math.inf, dtype=torch.float64) if excuse is None else excuse.double().cpu()
    unexplained = differ & (gap >= tolerance.route_margin)
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
        cosine=1.0 - share,
        worst=worst,
        expected=float(len(differ)),
        found=float((~differ).sum().item()),
        passed=not bool(unexplained.any()),
        unexplained=int(unexplained.sum()),
        note=note,
    )


def _unlike(name: str, expected: Tensor, note: str, *, passed: bool = False) -> TensorDiff:
    size = 0.0 if passed else math.inf
    return TensorDiff(
        name=name,
        shape=tuple(expected.shape),
        max_abs=size,
        relative=size,
        peak=size,
        cosine=1.0 if passed else 0.0,
        worst=(),
        expected=math.nan,
        found=math.nan,
        passed=passed,
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
