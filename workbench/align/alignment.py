"""Where two implementations of a model part, and by whose work: every tensor with the error added there and inherited.

    end to end     tokens -> served trace                   against the reference's: the total error
    replayed       reference's own inputs -> each block     against what the reference made of them: the error ADDED
    the rest       total - added                            INHERITED from what came before

The reference is the float64 model of this package, or a trace captured elsewhere. Its inputs are rounded to the served
dtype before both sides read them, and what roundings of that dtype do to each step on these same inputs is its noise
floor: limits are multiples of it. With a trace from elsewhere the float64 model replays both sides' steps as well, so
that a step which differs is laid at the door of the side that departs from the equations.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from workbench.align.align_report import AlignReport, Blame, OperatorError, Sides
from workbench.align.compare import Comparison, aligned, compare_traces
from workbench.align.held import WeightChange
from workbench.align.metrics import logit_agreement, measure, router_agreement
from workbench.align.parity import ParityPrompt, TraceForward, TraceReplay
from workbench.align.reference import ReferencePrompt, Trace, choices_of
from workbench.align.tolerance import BF16_TOLERANCE, FP32_NOISE, MeasuredTolerance, RoundingTolerance
from workbench.align.trace import forward_order, layer_of, short_name
from workbench.align.yardstick import ExactAndNoise, noisy_references
from workbench.base import RequestError

__all__ = ["ForeignTrace", "Served", "align_model"]

# What a replay does not replace: the router's own decision, and what only a cache or the end of the model shows.
_DECIDED = ("topk_idx", "topk_w")
_INSIDE = ("router_scores", "route_margin", "route_regret")
_UNROUNDED = ("kda_state", *_INSIDE, *_DECIDED)
# Two sides each with noise of their own are sqrt(2) as far apart as one from the exact values.
_TWO_SIDES = 1.5


@dataclass(frozen=True, kw_only=True)
class Served:
    """The implementation that is judged. `dtype` is that of its activations; `held` the weights that it computes with,
    where they are not the published ones."""

    forward: TraceForward
    replay: TraceReplay
    dtype: torch.dtype
    label: str
    held: WeightChange | None = None

    @property
    def tolerance(self) -> RoundingTolerance:
        """Raises RequestError for a dtype whose noise floor is not measured here."""
        return noise_of(self.dtype)


@dataclass(frozen=True, kw_only=True)
class ForeignTrace:
    """What another implementation computed on each prompt, in trace names; it may hold only some of them.

    float64 is allowed the noise of float32, and float16 that of bf16.
    """

    traces: Sequence[Trace]
    dtype: torch.dtype
    label: str

    @property
    def judged_as(self) -> torch.dtype:
        return {torch.float64: torch.float32, torch.float16: torch.bfloat16}.get(self.dtype, self.dtype)


def noise_of(dtype: torch.dtype) -> RoundingTolerance:
    """How many noise floors a model with activations in `dtype` may lie away."""
    found = {torch.bfloat16: BF16_TOLERANCE, torch.float32: FP32_NOISE}.get(dtype)
    if found is None:
        raise RequestError("no noise floor for this dtype", found=dtype, expected="torch.bfloat16 or torch.float32")
    return found


def align_model(
    served: Served,
    root: Path | str,
    prompts: Sequence[ParityPrompt],
    *,
    reference: ForeignTrace | None = None,
) -> AlignReport:
    """Hold `served` against `reference`, or where that is None against the float64 model of checkpoint `root`.

    Raises RequestError for traces that do not belong to the prompts, CheckpointError for a checkpoint that cannot be
    read.
    """
    began = time.perf_counter()
    if not prompts:
        raise RequestError("nothing to align on", expected="at least one prompt")
    found = list(served.forward(prompts))
    if len(found) != len(prompts) or (reference is not None and len(reference.traces) != len(prompts)):
        raise RequestError(f"traces for {len(prompts)} prompts", found=len(found))
    inputs = [ReferencePrompt(token_ids=p.token_ids, images=p.images) for p in prompts]
    whole = _references(root, inputs, [choices_of(trace) for trace in found], served.dtype, served.held)
    expected = [whole[n].trace if reference is None else reference.traces[n] for n in range(len(prompts))]
    given = [_rounded(trace, served.dtype) for trace in expected]
    replayed = list(served.replay(prompts, given))
    follow = [_followed(g, r) for g, r in zip(given, replayed, strict=True)]
    exact = _references(root, inputs, follow, served.dtype, served.held)
    sides: list[Sides] = []
    if reference is None:
        made = [x.trace for x in exact]
        for n, prompt in enumerate(prompts):
            ours = _steps(made[n], replayed[n], exact[n], served.tolerance, prompt.label)
            total = _total(expected[n], found[n], whole[n], served.tolerance, prompt)
            sides.append(Sides(label=prompt.label, added=ours, total=total, ours=ours, theirs=None))
    else:
        made = [_comparable(theirs, ours) for theirs, ours in zip(reference.traces, replayed, strict=True)]
        follow = [_followed(trace, trace) for trace in reference.traces]
        other = _references(root, inputs, follow, reference.judged_as, None)
        for n, prompt in enumerate(prompts):
            sides.append(
                _two_sides(served, reference, n, prompt, made[n], found[n], replayed[n], whole[n], exact[n], other[n])
            )
    rows = [
        row
        for n in range(len(prompts))
        for row in _rows(sides[n], expected[n], found[n], made[n], replayed[n], served.dtype)
    ]
    return AlignReport(
        root=str(root),
        served=served.label,
        reference="float64 model of this package" if reference is None else reference.label,
        dtype=str(served.dtype).removeprefix("torch."),
        sides=tuple(sides),
        rows=tuple(rows),
        logits=logit_agreement(*(torch.cat(x) for x in _pairs("logits", expected, found)))
        if any("logits" in trace for trace in expected)
        else None,
        routers=router_agreement(*(_choices(traces) for traces in (expected, found))),
        blame=_blame(sides, is_foreign=reference is not None),
        seconds=time.perf_counter() - began,
        evidence=tuple(
            # What each side's blocks read and made, for whoever asks which mistake would explain it.
            {"given": given[n], "ours": replayed[n], "theirs": {} if reference is None else reference.traces[n]}
            for n in range(len(prompts))
        ),
    )


def _references(
    root: Path | str,
    inputs: Sequence[ReferencePrompt],
    follow: Sequence[Mapping[str, Tensor]],
    dtype: torch.dtype,
    held: WeightChange | None,
) -> list[ExactAndNoise]:
    """The float64 model on each prompt, following what it is given, and the noise of `dtype` on the same way."""

    def keep(prompt_idx: int, name: str) -> bool:
        return not name.startswith("image")

    return noisy_references(root, inputs, grids=noise_of(dtype).grids, follow=follow, keep=keep, held=held)


def _two_sides(
    served: Served,
    reference: ForeignTrace,
    number: int,
    prompt: ParityPrompt,
    comparable: Trace,
    found: Trace,
    replayed: Trace,
    whole: ExactAndNoise,
    exact: ExactAndNoise,
    other: ExactAndNoise,
) -> Sides:
    """One prompt against a trace: the two against each other, and each against the float64 model on its inputs."""
    tolerance, label, theirs = served.tolerance, prompt.label, reference.traces[number]
    wanted = {**comparable, **_excuses(exact.trace, other.trace, theirs)}
    return Sides(
        label=label,
        added=_steps(wanted, replayed, exact, tolerance.scaled(_TWO_SIDES), label),
        total=_total(theirs, found, whole, tolerance.scaled(_TWO_SIDES), prompt)
        if _same_choices(theirs, found)
        else _total(whole.trace, found, whole, tolerance, prompt),
        ours=_steps(exact.trace, replayed, exact, tolerance, label),
        theirs=_steps(other.trace, theirs, other, noise_of(reference.judged_as), label),
    )


def _rounded(trace: Mapping[str, Tensor], dtype: torch.dtype) -> Trace:
    """Values as the served dtype can hold them; what the model keeps wider or decides itself stays as it is."""
    return {
        name: x if short_name(name) in _UNROUNDED or not x.is_floating_point() else x.to(dtype).to(torch.float32)
        for name, x in trace.items()
    }


def _followed(given: Mapping[str, Tensor], made: Mapping[str, Tensor]) -> Trace:
    """What the exact reference follows to repeat each step on the inputs that the other side had: given tensors, with
    that side's own choice of experts and of their weights."""
    own = {name: x for name, x in made.items() if short_name(name) in _DECIDED}
    latents = {name: x for name, x in made.items() if short_name(name) == "latent"}  # a replay does not replace them
    kept = {name: x for name, x in given.items() if short_name(name) not in (*_DECIDED, *_INSIDE, "latent")}
    return {**kept, **latents, **own}


def _steps(
    expected: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    measured: ExactAndNoise,
    tolerance: RoundingTolerance,
    label: str,
) -> Comparison:
    limits = MeasuredTolerance(rounding=tolerance, noise=measured.noise, way="step by step")
    return compare_traces(expected, found, limits, required=lambda name: False, label=label)


def _total(
    expected: Trace, found: Trace, whole: ExactAndNoise, tolerance: RoundingTolerance, prompt: ParityPrompt
) -> Comparison | None:
    """End to end, for prompts long enough to average over."""
    if len(prompt.token_ids) < tolerance.min_tokens:
        return None
    limits = MeasuredTolerance(rounding=tolerance, noise=whole.noise, way="end to end")
    return compare_traces(expected, found, limits, required=_is_captured, label=prompt.label)


def _comparable(theirs: Trace, replayed: Trace) -> Trace:
    """A trace in which tokens that went to other experts than the replayed ones are left out: whether both choices may
    be right is judged by their scores, and what follows from another choice is not to be compared."""
    result = dict(theirs)
    for name, ids in theirs.items():
        other = replayed.get(name)
        if short_name(name) != "topk_idx" or other is None or other.shape != ids.shape:
            continue
        differ = (ids.long().cpu().sort(-1).values != other.long().cpu().sort(-1).values).any(-1)
        for follows in ("topk_w", "moe_combined"):
            key = name.replace("topk_idx", follows)
            if bool(differ.any()) and key in theirs and key in replayed and theirs[key].shape == replayed[key].shape:
                result[key] = theirs[key].clone()
                result[key][differ] = replayed[key][differ].to(theirs[key])
    return result


def _same_choices(theirs: Trace, found: Trace) -> bool:
    """Whether every token went to the same experts. One that early noise tipped over makes the rest of two traces
    incomparable; the served one is then held against the float64 model that follows its choices."""
    names = [name for name in theirs.keys() & found.keys() if short_name(name) == "topk_idx"]
    return all(
        torch.equal(theirs[name].long().cpu().sort(-1).values, found[name].long().cpu().sort(-1).values)
        for name in names
    )


def _is_captured(name: str) -> bool:
    return short_name(name) not in _INSIDE and not name.startswith("image")


def _excuses(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> Trace:
    """By how much the worse of two choices of experts scores, for layers whose choice the trace holds."""
    return {
        name: torch.maximum(x, theirs[name]) if name in theirs else x
        for name, x in ours.items()
        if short_name(name) == "route_regret" and name.replace("route_regret", "topk_idx") in reference
    }


def _rows(
    sides: Sides, expected: Trace, found: Trace, made: Mapping[str, Tensor], replayed: Trace, dtype: torch.dtype
) -> Iterator[OperatorError]:
    """One row for each tensor that was compared step by step. `made`: what the reference made of its own inputs."""
    steps = {diff.name: diff for diff in sides.added.diffs}
    totals = {} if sides.total is None else {diff.name: diff for diff in sides.total.diffs}
    for name in forward_order(steps):
        step = steps[name]
        added = total = inherited = None
        is_value = short_name(name) not in ("topk_idx", *_INSIDE)
        step_made, step_found = aligned(name, made[name], replayed[name])
        if is_value and step_made.shape == step_found.shape:
            added = measure(step_made, step_found, dtype)
        if is_value and name in expected and name in found:
            want, have = aligned(name, expected[name], found[name])
            if want.shape == have.shape:
                total = measure(want, have, dtype)
            if total is not None and added is not None:
                rest = (have.double() - want.double()) - (step_found.double() - step_made.double())
                size = want.double().norm().item()
                inherited = rest.norm().item() / size if size else 0.0
        yield OperatorError(
            prompt=sides.label,
            name=name,
            layer=layer_of(name),
            added=added,
            total=total,
            inherited=inherited,
            floor=step.yardstick,
            limit=step.limit.relative,
            passed=step.passed,
            total_passed=totals[name].passed if name in totals else True,
            note=step.note,
        )


def _blame(sides: Sequence[Sides], *, is_foreign: bool) -> Blame | None:
    """The first step in forward order that differs beyond its noise on equal inputs, and who made it."""
    failing = {side.added.suspect.name for side in sides if side.added.suspect is not None}
    if not failing:
        return None
    name = forward_order(failing)[0]
    who: Literal["served", "reference", "both", "either"] = "served"
    if is_foreign:
        ours = any(not diff.passed for side in sides for diff in side.ours.diffs if diff.name == name)
        theirs = any(
            not diff.passed
            for side in sides
            if side.theirs is not None
            for diff in side.theirs.diffs
            if diff.name == name
        )
        who = "both" if ours and theirs else "served" if ours else "reference" if theirs else "either"
    return Blame(name=name, side=who)


def _pairs(name: str, expected: Sequence[Trace], found: Sequence[Trace]) -> tuple[list[Tensor], list[Tensor]]:
    both = [
        (a[name], b[name][-len(a[name]) :]) for a, b in zip(expected, found, strict=True) if name in a and name in b
    ]
    return [a.double() for a, _ in both], [b.double() for _, b in both]


def _choices(traces: Sequence[Trace]) -> dict[int, Tensor]:
    names = {name for trace in traces for name in trace if short_name(name) == "topk_idx"}
    layers = {layer for name in names if (layer := layer_of(name)) is not None}
    return {
        layer: torch.cat([x for trace in traces if (x := trace.get(f"L{layer}.topk_idx")) is not None])
        for layer in layers
    }
