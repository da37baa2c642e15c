"""How far rounding alone moves a prompt's tensors: the reference with bf16 roundings beside the reference without.

All runs go side by side through one pass over the weights, as sequences of one batch. Of a rounded run only its
distances from the exact one are kept, so memory does not grow with the number of draws.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from workbench.align.reference import ReferencePrompt, Trace, reference_traces
from workbench.align.rounding import BF16_UNIT
from workbench.align.tolerance import Noise
from workbench.align.trace import short_name

__all__ = ["ExactAndNoise", "noisy_references"]

FLOAT32_UNIT = 2.0**-25


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactAndNoise:
    """The exact trace of a prompt, and how far roundings move it."""

    trace: Trace
    noise: Noise


def noisy_references(
    root: Path | str,
    prompts: Sequence[ReferencePrompt],
    *,
    grids: Sequence[float],
    follow: Sequence[Mapping[str, Tensor]] | None = None,
    keep: Callable[[int, str], bool] = lambda prompt_idx, name: True,
    held: Callable[[str, Tensor], Tensor] | None = None,
) -> list[ExactAndNoise]:
    """Each prompt exactly, and once per rounding grid; all of them follow `follow` as in `reference_traces`.

    `keep(number of the prompt, name)` chooses what is recorded and measured; `held` as in `reference_traces`.
    Without grids the noise is that of float32: the same passes in that type, their accumulations included.
    """
    if not grids:
        return _float32_references(root, prompts, follow, keep, held)
    num = len(prompts)
    exact: list[Trace] = [{} for _ in prompts]
    found = [_NoiseSums(exact[n]) for n in range(num)]

    def take(lane: int, name: str, value: Tensor) -> None:
        prompt_idx = lane % num
        if not keep(prompt_idx, name):
            return
        if lane < num:
            exact[prompt_idx][name] = value.clone()
        else:
            found[prompt_idx].add(name, value)

    lanes = [*prompts, *(replace(prompt, bf16_grid=grid) for grid in grids for prompt in prompts)]
    repeated = None if follow is None else [*follow] * (1 + len(grids))
    reference_traces(root, lanes, take=take, follow=repeated, held=held)
    return [ExactAndNoise(trace=sums.exact, noise=sums.noise(len(grids))) for sums in found]


def _float32_references(
    root: Path | str,
    prompts: Sequence[ReferencePrompt],
    follow: Sequence[Mapping[str, Tensor]] | None,
    keep: Callable[[int, str], bool],
    held: Callable[[str, Tensor], Tensor] | None,
) -> list[ExactAndNoise]:
    def take(prompt_idx: int, name: str, value: Tensor) -> Tensor | None:
        return value.clone() if keep(prompt_idx, name) else None

    exact, rounded = (
        reference_traces(root, prompts, dtype=dtype, take=take, follow=follow, held=held)
        for dtype in (torch.float64, torch.float32)
    )
    result = []
    for trace, other in zip(exact, rounded, strict=True):
        sums = _NoiseSums(trace)
        for name in trace:
            sums.add(name, other[name].double())
        result.append(ExactAndNoise(trace=trace, noise=sums.noise(1, FLOAT32_UNIT)))
    return result


class _NoiseSums:
    """Sums over the draws of one prompt's noise."""

    def __init__(self, exact: Trace) -> None:
        self.exact = exact
        self._squares: dict[str, float] = defaultdict(float)
        self._peaks: dict[str, float] = defaultdict(float)
        self._scores: dict[str, Tensor] = {}
        self._tokens: list[Tensor] = []

    def add(self, name: str, rounded: Tensor) -> None:
        kind = short_name(name)
        if kind in ("topk_idx", "route_margin", "route_regret"):
            return
        delta = rounded - self.exact[name]
        if kind == "router_scores":
            stem = name.removesuffix(kind)
            self._scores[stem] = self._scores.get(stem, 0) + delta.square().mean(-1)
        if kind == "logits":
            self._tokens.append(rounded.argmax(-1))
        self._squares[name] += delta.square().sum().item()
        self._peaks[name] = max(self._peaks[name], delta.abs().max().item())

    def noise(self, num_draws: int, unit: float = BF16_UNIT) -> Noise:
        """`unit`: the most that one rounding changes a value, relative to its power of two."""
        relative, peak, count = {}, {}, {}
        for name, squares in self._squares.items():
            x = self.exact[name]
            total, rms = x.square().sum().item(), x.square().mean().sqrt().item()
            relative[name] = math.sqrt(squares / num_draws / total) if total else 0.0
            peak[name] = max(self._peaks[name], unit * x.abs().max().item()) / rms if total else 0.0
            count[name] = total**2 / x.square().square().sum().item() if total else 1.0
        scores = {stem: (total / num_draws).sqrt() for stem, total in self._scores.items()}
        return Noise(relative=relative, peak=peak, count=count, scores=scores, tokens=tuple(self._tokens))
