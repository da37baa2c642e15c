"""What a comparison allows: a fixed limit for fp32, measured yardsticks for a precision that rounds.

In bf16 no fixed limit is right: rounding noise grows with depth and differs between models, prompts and tensors, and a
limit wide enough for the worst hides mistakes everywhere else. So the reference itself is run with bf16 roundings
(`yardstick.py`); how far that moves a tensor is its yardstick, and a served tensor may lie a few yardsticks away.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from workbench.align.rounding import BF16_GRIDS, BF16_UNIT
from workbench.align.trace import short_name

__all__ = [
    "BF16_TOLERANCE",
    "FP32_NOISE",
    "FP32_TOLERANCE",
    "Limit",
    "Limits",
    "MeasuredTolerance",
    "Noise",
    "RoundingTolerance",
    "Tolerance",
    "tolerance_for",
]


class Limit(NamedTuple):
    """What one tensor is allowed; None: not bounded, and no yardstick where the limit is fixed."""

    relative: float
    peak: float | None = None
    stretch: float | None = None
    yardstick: float | None = None


class Limits(Protocol):
    """What `compare_traces` asks of a tolerance."""

    def limit(self, name: str) -> Limit: ...
    def choice_limit(self, stem: str) -> float | Tensor:
        """For the router of layer `stem` ("L3."): scores closer than this may change places; for all tokens or (T,)."""
        ...

    def describe(self) -> str: ...
    def to_json(self) -> dict[str, object]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """A fixed limit, and why.

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

    def limit(self, name: str) -> Limit:
        return Limit(self.relative, self.peak)

    def choice_limit(self, stem: str) -> float:
        return self.route_margin

    def describe(self) -> str:
        peak = "" if self.peak is None else f", single element {self.peak:.0e} of the rms"
        return f"relative {self.relative:.0e}{peak} ({self.reason})"

    def to_json(self) -> dict[str, object]:
        return {
            "relative": self.relative,
            "peak": self.peak,
            "route_margin": self.route_margin,
            "logit_gap": self.logit_gap,
            "reason": self.reason,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundingTolerance:
    """How many yardsticks a model that rounds to bf16 may lie away from the exact reference, and why.

    A tensor passes within `factor` times its yardstick, which counts as at least `floor`: one rounding more or less.
    End to end it is `end_factor`: noise that is carried along has a long tail, since a head whose query and key nearly
    cancel may turn a hundredth into a half. Step by step more is asked: of single elements, at most `peak_factor` times
    the largest that the draws show; of the length along the expected tensor, which rounding, having no direction,
    changes by about a yardstick over the square root of the number of elements that count, while a wrong epsilon or
    scale changes all elements alike, at most `stretch_factor` times that; of experts that change places, scores no
    further apart than `choice_factor` times the noise of one score.

    A prompt's greedy tokens may fall short of the exact reference's by `token_factor` times what those of the rounded
    reference do, in logits, on average. `min_tokens`: shorter prompts are judged step by step only. `grids`: the draws
    of rounding that a yardstick is measured on.
    """

    factor: float
    end_factor: float
    peak_factor: float
    stretch_factor: float
    choice_factor: float
    token_factor: float
    floor: float
    min_tokens: int
    grids: tuple[float, ...]
    reason: str

    def scaled(self, factor: float) -> RoundingTolerance:
        """The same for a difference that is `factor` times as noisy."""
        if factor == 1.0:
            return self
        names = ("factor", "end_factor", "peak_factor", "stretch_factor", "choice_factor", "token_factor")
        return replace(self, **{name: factor * getattr(self, name) for name in names})

    def describe(self) -> str:
        return (
            f"{self.factor:g} yardsticks step by step and {self.end_factor:g} end to end (one is how far "
            f"{'bf16' if self.grids else 'float32'} roundings move the reference itself, at least {self.floor:.1e}): "
            f"{self.reason}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """What rounding alone does to one prompt: its reference with roundings against the same without.

    `relative`: root mean square over the draws of ||rounded - exact|| / ||exact||; `peak`: the largest single
    difference of any draw, or one rounding of the largest element, over the root mean square of the exact tensor;
    `count`: (sum x^2)^2 / sum x^4, how many elements of the exact tensor count; `scores`: by router ("L3.") the root
    mean square of the score differences of each token, (T,); `tokens`: by draw, the highest logit at each position.
    """

    relative: Mapping[str, float]
    peak: Mapping[str, float]
    count: Mapping[str, float]
    scores: Mapping[str, Tensor]
    tokens: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredTolerance:
    """A `RoundingTolerance` with the yardsticks of one prompt.

    "step by step": every tensor is computed from the served inputs of its step, so that noise does not add up; single
    elements, lengths and choices are judged too. "end to end": the whole way from the tokens, where early noise is
    carried along and grows; choices are counted there, since a choice is made on the served inputs.
    """

    rounding: RoundingTolerance
    noise: Noise
    way: Literal["step by step", "end to end"]

    def limit(self, name: str) -> Limit:
        names = [name]
        if short_name(name) == "topk_w":  # few numbers that sum to one: at least as noisy as what the router reads
            names.append(name.replace("topk_w", "mlp_in"))
        yardstick = max(self.rounding.floor, *(self.noise.relative.get(n, 0.0) for n in names))
        if self.way == "end to end":
            return Limit(self.rounding.end_factor * yardstick, yardstick=yardstick)
        peak = self.rounding.peak_factor * max(self.noise.peak.get(n, 0.0) for n in names)
        stretch = self.rounding.stretch_factor * yardstick / math.sqrt(self.noise.count.get(name, 1.0))
        return Limit(self.rounding.factor * yardstick, peak, stretch, yardstick)

    def choice_limit(self, stem: str) -> float | Tensor:
        if self.way == "end to end":
            return math.inf
        return torch.clamp(self.rounding.choice_factor * self.noise.scores[stem], min=FP32_TOLERANCE.route_margin)

    def describe(self) -> str:
        return self.rounding.describe()

    def to_json(self) -> dict[str, object]:
        return {
            "way": self.way,
            "factor": self.rounding.factor,
            "end_factor": self.rounding.end_factor,
            "peak_factor": self.rounding.peak_factor,
            "stretch_factor": self.rounding.stretch_factor,
            "choice_factor": self.rounding.choice_factor,
            "token_factor": self.rounding.token_factor,
            "floor": self.rounding.floor,
            "grids": list(self.rounding.grids),
            "reason": self.rounding.reason,
        }


FP32_TOLERANCE = Tolerance(
    relative=5e-5,
    peak=5e-4,
    route_margin=2e-6,
    logit_gap=1e-3,
    reason="fp32 rounding grows to about 1e-5 through nine layers; a wrong epsilon shows as 1e-4 or more",
)
# Measured on three kinds of tiny models (random weights, 8 and 9 layers; 14 checkpoints) in 124 runs of four prompts,
# on one rank, tp2, tp4, tp2 with ep2, pp2 and dp2 with ep2, all on CPUs. Step by step, in 70,264 tensors: at most 2.12
# yardsticks; single elements at most 0.61, lengths 0.60 and 276 other choices of experts 0.65 of their limits.
# End to end, in 52,698 tensors: 57 above 2 yardsticks, two above 3, at most 3.50. Draws of the reference against each
# other: at most 3.27 in 273,088 and 2.95 in 204,816 comparisons. A prompt of one token reached 12.7 end to end: it is a
# single draw from the tail. Greedy tokens of a draw, in 2,720 runs of eight: six above 3, at most 4.99; random tokens
# in their place: 10.1 in the median, below 4.7 in one of a hundred.
# Not measured: more ranks, other devices. The partial sums of n tp ranks, added in bf16, should raise the noise of what
# they reduce by sqrt(1 + n / 2), less where they are added in fp32.
BF16_TOLERANCE = RoundingTolerance(
    factor=3.0,
    end_factor=5.0,
    peak_factor=6.0,
    stretch_factor=12.0,
    choice_factor=6.0,
    token_factor=6.0,
    floor=BF16_UNIT,
    min_tokens=4,
    grids=BF16_GRIDS,
    reason="another order of roundings is another draw of the same noise, seen up to 2.1 and 3.5",
)
# The noise of float32 is that of one pass of the reference in it, accumulations included; sums in another order, and a
# recurrence taken in chunks instead of token by token, draw it anew and somewhat larger. Seen on a tiny model of eight
# layers: at most 1.5 in some 300 tensors, none near a limit; longer prompts and wider sums were not measured, hence the
# room. A wrong epsilon lies a hundred times beyond it.
FP32_NOISE = RoundingTolerance(
    factor=12.0,
    end_factor=24.0,
    peak_factor=24.0,
    stretch_factor=48.0,
    choice_factor=24.0,
    token_factor=24.0,
    floor=2.0**-22,
    min_tokens=4,
    grids=(),
    reason="sums in another order are another draw of the same noise",
)
# mxfp4: the published weights, exactly; activations in bf16.
_BY_PRECISION: dict[str, Tolerance | RoundingTolerance] = {
    "fp32": FP32_TOLERANCE,
    "bf16": BF16_TOLERANCE,
    "mxfp4": BF16_TOLERANCE,
}


def tolerance_for(precision: str) -> Tolerance | RoundingTolerance | None:
    """What a model held in `precision` is allowed; None where the weights themselves are approximated and only a
    measurement can say how far apart is right."""
    return _BY_PRECISION.get(precision)
