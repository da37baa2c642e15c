"""Which mistake would make what was observed: each suspect replayed on the guilty layer's own inputs.

Nothing is run again. The layer's inputs and results lie in the evidence of an alignment; every suspect is computed from
these inputs in float64, and the one whose results lie closest to the observed ones, over all tensors of the layer, is
the explanation. Reads the weights of one layer, at most two neighbours' beside them.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from workbench.align.align_report import AlignReport, Sides
from workbench.align.compare import aligned
from workbench.align.counter_report import CounterTests, SuspectResult
from workbench.align.equations import Facts, LayerBench, Weights
from workbench.align.equations_edge import EdgeBench
from workbench.align.held import WeightChange
from workbench.align.parity import ParityPrompt
from workbench.align.reference_weights import PublishedWeights, read_reference_config
from workbench.align.suspect import Suspect
from workbench.align.suspects import edge_suspects, layer_suspects
from workbench.align.trace import short_name

__all__ = ["counter_test"]

KEPT_BYTES = 1 << 30  # of decoded weights between suspects
MOST_PROMPTS = 2
Bench = LayerBench | EdgeBench
NOT_FINITE = SuspectResult(
    name="not_finite",
    text="values that are not finite: an overflow, a division by zero, or memory that was never written",
    residual=0.0,
    distance=0.0,
)


@dataclass(frozen=True)
class _Case:
    """One prompt: how to make a bench on it, what was observed, and the relative distance that noise explains."""

    make: Callable[[], Bench]
    observed: Mapping[str, Tensor]
    limits: Mapping[str, float]


@torch.no_grad()
def counter_test(
    report: AlignReport,
    root: Path | str,
    prompts: Sequence[ParityPrompt],
    *,
    held: WeightChange | None = None,
) -> CounterTests | None:
    """Suspects for the guilty tensor of `report`, best first; None where nothing is guilty or cannot be replayed.

    `prompts` and `held` as they were for the alignment. Raises CheckpointError for weights that cannot be read.
    """
    blame = report.blame
    if blame is None:
        return None
    side = "theirs" if blame.side == "reference" else "ours"
    _, text, _ = read_reference_config(root)
    facts = Facts(text)
    with PublishedWeights(root, change=held) as weights:
        reader = _Reader(weights)
        cases = [
            _case(facts, reader, blame.layer, report.evidence[n], report.sides[n], side, prompts[n])
            for n in _failing(report, blame.name)[:MOST_PROMPTS]
        ]
        right = [_results(case.make(), case.make().names()) for case in cases]
        if not any(right):
            return None
        if any(not bool(x.isfinite().all()) for x in _guilty(cases, blame.name)):
            return CounterTests(name=blame.name, side=blame.side, unexplained=math.inf, results=(NOT_FINITE,))
        suspects = edge_suspects(facts) if blame.layer is None else layer_suspects(facts, blame.layer)
        results = [x for suspect in suspects if (x := _try(suspect, cases, right)) is not None]
        unexplained, _ = _judge(cases, right)
    results.sort(key=lambda x: (max(x.residual, 1.0), x.distance))
    return CounterTests(
        name=blame.name,
        side=blame.side,
        unexplained=unexplained,
        results=tuple(results),
        equal=tuple(_equal(results)),
    )


def _guilty(cases: Sequence[_Case], name: str) -> list[Tensor]:
    return [x for case in cases if (x := case.observed.get(short_name(name))) is not None]


def _failing(report: AlignReport, name: str) -> list[int]:
    """Numbers of the prompts in which the guilty tensor is wrong, the longest first."""
    wrong = [
        n
        for n, side in enumerate(report.sides)
        if any(not diff.passed and diff.name == name for diff in side.added.diffs)
    ]
    return sorted(wrong, key=lambda n: -report.sides[n].added.diffs[0].shape[0])


def _case(
    facts: Facts,
    reader: _Reader,
    layer: int | None,
    evidence: Mapping[str, Mapping[str, Tensor]],
    sides: Sides,
    side: str,
    prompt: ParityPrompt,
) -> _Case:
    made = evidence[side]
    given = dict(evidence["given"] if side == "ours" else made)
    comparison = sides.ours if side == "ours" or sides.theirs is None else sides.theirs
    limits = {diff.name: diff.limit.relative for diff in comparison.diffs}
    if layer is None:
        observed = {
            name: made[name] for name in ("inputs_embeds", "final_mix", "final_hidden", "logits") if name in made
        }
        if prompt.images:
            observed.pop("inputs_embeds", None)

        def edge() -> Bench:
            return EdgeBench(facts, reader.below("language_model."), given, prompt.token_ids)

        return _Case(edge, observed, limits)
    stem = f"L{layer}."
    if f"{stem}latent" in made:  # a replay reads its own latents
        given[f"{stem}latent"] = made[f"{stem}latent"]
    chosen = None
    if f"{stem}topk_idx" in made and f"{stem}topk_w" in made:
        chosen = made[f"{stem}topk_idx"].long(), made[f"{stem}topk_w"].double()
    near = comparison.tolerance.choice_limit(stem) if f"{stem}topk_idx" in limits else 0.0
    observed = {name.removeprefix(stem): x for name, x in made.items() if name.startswith(stem)}
    own = {name.removeprefix(stem): limit for name, limit in limits.items() if name.startswith(stem)}

    def make() -> Bench:
        assert layer is not None
        return LayerBench(layer, facts, reader.layer(layer), given, chosen, reader.layer, near)

    return _Case(make, observed, own)


def _results(bench: Bench, names: Iterable[str]) -> dict[str, Tensor]:
    return {name: value for name in names if (value := bench.compute(name)) is not None}


def _try(suspect: Suspect, cases: Sequence[_Case], right: Sequence[Mapping[str, Tensor]]) -> SuspectResult | None:
    """None for a suspect that cannot be made here or changes nothing."""
    wrong = []
    for case, results in zip(cases, right, strict=True):
        bench = case.make()
        suspect.change(bench)
        try:
            changed = _results(bench, [name for name in suspect.shows_in if name in results])
        except (RuntimeError, IndexError, TypeError):  # shapes that this mistake cannot have
            return None
        if all(torch.equal(changed[name], results[name]) for name in changed):
            return None
        wrong.append({**results, **changed})
    residual, distance = _judge(cases, wrong)
    return SuspectResult(name=suspect.name, text=suspect.text, residual=residual, distance=distance)


def _judge(cases: Sequence[_Case], made: Sequence[Mapping[str, Tensor]]) -> tuple[float, float]:
    """The worst distance to what was observed, in limits, and the sum of relative distances."""
    worst = total = 0.0
    for case, results in zip(cases, made, strict=True):
        for name, value in results.items():
            if name not in case.observed:
                continue
            gap, limit = _gap(name, value, case.observed[name]), case.limits.get(name, math.inf)
            worst, total = max(worst, gap / limit if limit else math.inf), total + gap
    return worst, total


def _gap(name: str, value: Tensor, observed: Tensor) -> float:
    """Relative distance; for choices of experts the share of tokens with another set."""
    if name == "topk_idx":
        if value.shape != observed.shape:
            return math.inf
        sets = value.sort(-1).values != observed.long().sort(-1).values
        return sets.any(-1).double().mean().item()
    value, seen = aligned(name, value, observed.double())
    if value.shape != seen.shape:
        return math.inf
    gap, size = (value - seen).norm().item(), seen.norm().item()
    if not math.isfinite(gap):
        return math.inf
    return gap / size if size else (0.0 if gap == 0.0 else math.inf)


def _equal(results: Sequence[SuspectResult]) -> list[str]:
    """Names of suspects that lie as close as the best one."""
    if not results:
        return []
    best = results[0]
    return sorted({x.name for x in results[1:] if x.distance <= best.distance * 1.001 and x.name != best.name})


class _Reader:
    """Weights of a checkpoint in float64, the last ones used kept."""

    def __init__(self, weights: PublishedWeights) -> None:
        self._weights = weights
        self._kept: OrderedDict[str, Tensor] = OrderedDict()
        self._bytes = 0

    def __call__(self, name: str) -> Tensor:
        if name in self._kept:
            self._kept.move_to_end(name)
            return self._kept[name]
        values = self._weights(name)
        self._kept[name] = values
        self._bytes += values.nbytes
        while self._bytes > KEPT_BYTES and len(self._kept) > 1:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return values

    def below(self, prefix: str) -> Weights:
        return lambda name: self(prefix + name)

    def layer(self, layer_idx: int) -> Weights:
        return self.below(f"language_model.model.layers.{layer_idx}.")
