"""Is the deployed model the published one? Its traces against the reference, for several prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from workbench.align.capture import Capture
from workbench.align.compare import Comparison, compare_traces
from workbench.align.parity_report import GreedyCheck, ParityReport
from workbench.align.reference import ReferencePrompt, Trace, choices_of, reference_traces
from workbench.align.reference_vision import ReferenceImage
from workbench.align.replay import given_for_rank, replaying
from workbench.align.tolerance import FP32_TOLERANCE, MeasuredTolerance, RoundingTolerance, Tolerance
from workbench.align.trace import short_name
from workbench.align.yardstick import ExactAndNoise, noisy_references
from workbench.base import RequestError, UnsupportedModelError
from workbench.nn.batch import TokenBatch
from workbench.nn.cache import StateCache
from workbench.nn.model import Model
from workbench.placement import Layout
from workbench.spec import ModelSpec
from workbench.spec.families.kimi_k3 import FAMILY as REFERENCE_FAMILY

__all__ = [
    "ParityPrompt",
    "TraceForward",
    "TraceReplay",
    "check_parity",
    "model_forward",
    "model_replay",
    "require_reference",
]


@dataclass(frozen=True, kw_only=True)
class ParityPrompt:
    """One sequence to compare on. Placeholders stand expanded: one per picture row.

    The last `num_generated` tokens are those that the deployment itself generated greedily; the reference then says
    whether it would have chosen each of them.
    """

    label: str
    token_ids: tuple[int, ...]
    images: tuple[ReferenceImage, ...] = ()
    num_generated: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.num_generated < len(self.token_ids):
            raise RequestError(f"{self.label}: {self.num_generated} generated tokens of {len(self.token_ids)}")


# From prompts to one trace each: a model in this process (`model_forward`) or a deployment's merged ranks.
TraceForward = Callable[[Sequence[ParityPrompt]], Sequence[Trace]]
# The same, every step computed from the given tensors of each prompt (see `replay.py`).
TraceReplay = Callable[[Sequence[ParityPrompt], Sequence[Mapping[str, Tensor]]], Sequence[Trace]]


def _is_captured(name: str) -> bool:
    """What a forward capture must bring: not the router's scores, nor the inside of the vision tower."""
    is_inside = short_name(name) in ("router_scores", "route_margin", "route_regret")
    return not is_inside and not name.startswith("image")


def require_reference(spec: ModelSpec) -> None:
    """Raises UnsupportedModelError for a family that the reference does not compute."""
    if spec.family != REFERENCE_FAMILY:
        raise UnsupportedModelError(
            "there is no independent implementation of this family to compare with",
            found=spec.family,
            expected=REFERENCE_FAMILY,
            next_step="Compare with captured tensors of another implementation: docs/capture.md",
        )


def check_parity(
    forward: TraceForward,
    root: Path | str,
    prompts: Sequence[ParityPrompt],
    *,
    tolerance: Tolerance | RoundingTolerance = FP32_TOLERANCE,
    required: Callable[[str], bool] = _is_captured,
) -> ParityReport:
    """Run `prompts` through `forward` and through the reference of checkpoint `root`, and compare the traces.

    The reference follows the experts that `forward` chose and judges each choice for itself, so that one token tipped
    over by rounding does not blur the rest. With a `RoundingTolerance` the reference also runs with roundings, which
    gives each tensor its yardstick, and every prompt is compared twice: step by step and end to end. Every reference
    tensor for which `required(name)` must be in the trace of `forward`. Raises RequestError where `forward` returns
    another number of traces.
    """
    began = time.perf_counter()
    found = forward(prompts)
    if len(found) != len(prompts):
        raise RequestError(f"{len(found)} traces for {len(prompts)} prompts")
    inputs = [ReferencePrompt(token_ids=p.token_ids, images=p.images) for p in prompts]
    comparisons: list[Comparison] = []
    end_to_end: list[Comparison] = []
    greedy: list[GreedyCheck] = []
    if isinstance(tolerance, Tolerance):
        expected = reference_traces(root, inputs, follow=[choices_of(trace) for trace in found])
        for prompt, want, have in zip(prompts, expected, found, strict=True):
            comparisons.append(compare_traces(want, have, tolerance, required=required, label=prompt.label))
            greedy.append(_check_greedy(prompt, want["logits"], limit=tolerance.logit_gap))
    else:
        comparisons, end_to_end, greedy = _compare_by_yardstick(root, prompts, inputs, found, tolerance, required)
    return ParityReport(
        root=str(root),
        comparisons=tuple(comparisons),
        greedy=tuple(greedy),
        seconds=time.perf_counter() - began,
        end_to_end=tuple(end_to_end),
    )


def _compare_by_yardstick(
    root: Path | str,
    prompts: Sequence[ParityPrompt],
    inputs: Sequence[ReferencePrompt],
    found: Sequence[Trace],
    tolerance: RoundingTolerance,
    required: Callable[[str], bool],
) -> tuple[list[Comparison], list[Comparison], list[GreedyCheck]]:
    """Comparisons step by step, end to end, and of greedy tokens, all from one pass over the reference's weights."""
    numbers = range(len(prompts))
    long = [n for n in numbers if len(prompts[n].token_ids) >= tolerance.min_tokens]
    generated = [n for n in numbers if prompts[n].num_generated]
    # What each run of the reference follows: the whole served trace, its experts, or nothing but the tokens.
    runs: list[tuple[int, Mapping[str, Tensor]]] = [
        *((n, found[n]) for n in numbers),
        *((n, choices_of(found[n])) for n in long),
        *((n, {}) for n in generated),
    ]
    num_compared = len(numbers) + len(long)

    def keep(run_idx: int, name: str) -> bool:
        return not name.startswith("image") if run_idx < num_compared else name == "logits"

    references = iter(
        noisy_references(
            root,
            [inputs[n] for n, _ in runs],
            grids=tolerance.grids,
            follow=[followed for _, followed in runs],
            keep=keep,
        )
    )

    def compare(n: int, way: Literal["step by step", "end to end"]) -> Comparison:
        reference, label = next(references), f"{prompts[n].label}, {way}"
        limits = MeasuredTolerance(rounding=tolerance, noise=reference.noise, way=way)
        return compare_traces(reference.trace, found[n], limits, required=required, label=label)

    step_by_step = [compare(n, "step by step") for n in numbers]
    end_to_end = [compare(n, "end to end") for n in long]
    own = dict(zip(generated, references, strict=True))
    greedy = [_check_greedy_by_yardstick(prompts[n], own.get(n), tolerance) for n in numbers]
    return step_by_step, end_to_end, greedy


def _check_greedy(prompt: ParityPrompt, logits: Tensor, *, limit: float, is_mean: bool = False) -> GreedyCheck:
    """Each generated token against the reference's highest logit at the position before it."""
    count = prompt.num_generated
    if not count:
        return GreedyCheck(num_tokens=0, num_equal=0, first_wrong=None, gap=0.0, limit=limit)
    gaps = _gaps(logits[-count - 1 : -1], torch.tensor(prompt.token_ids[-count:]))
    wrong = (gaps > 0).nonzero()
    return GreedyCheck(
        num_tokens=count,
        num_equal=count - len(wrong),
        first_wrong=int(wrong[0]) if len(wrong) else None,
        gap=(gaps.mean() if is_mean else gaps.max()).item(),
        limit=limit,
        is_mean=is_mean,
    )


def _gaps(rated: Tensor, tokens: Tensor) -> Tensor:
    """By how much the highest logit exceeds that of the token: (T, V), (T,) -> (T,)."""
    return rated.amax(-1) - rated.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def _check_greedy_by_yardstick(
    prompt: ParityPrompt, reference: ExactAndNoise | None, tolerance: RoundingTolerance
) -> GreedyCheck:
    """The yardstick is the mean gap of the tokens that the rounded references choose, each with experts of its own, or
    the noise of a logit where that is more."""
    if reference is None:
        return _check_greedy(prompt, torch.empty(0), limit=0.0)
    logits, noise = reference.trace["logits"], reference.noise
    positions = slice(-prompt.num_generated - 1, -1)
    of_draws = torch.stack([_gaps(logits[positions], draw[positions]) for draw in noise.tokens]).mean().item()
    of_logits = noise.relative["logits"] * logits.square().mean().sqrt().item()
    return _check_greedy(prompt, logits, limit=tolerance.token_factor * max(of_draws, of_logits), is_mean=True)


def model_forward(model: Model, *, keep: Callable[[str], bool] | None = None) -> TraceForward:
    """Traces of a whole model in this process: all prompts as one ragged batch, with the state it leaves in a cache."""
    replay = model_replay(model, keep=keep)

    def forward(prompts: Sequence[ParityPrompt]) -> list[Trace]:
        return list(replay(prompts, []))

    return forward


def model_replay(model: Model, *, keep: Callable[[str], bool] | None = None) -> TraceReplay:
    """`model_forward` with every step computed from given tensors."""

    @torch.no_grad()
    def replay(prompts: Sequence[ParityPrompt], given: Sequence[Mapping[str, Tensor]]) -> list[Trace]:
        batch = _batch_of(model, prompts)
        device = batch.token_ids.device
        cache = StateCache(
            model.spec,
            model.layer_range,
            num_slots=len(prompts),
            max_tokens=max(batch.lengths),
            dtype=model.dtype,
            device=device,
        )
        own = given_for_rank(given, model.spec, Layout(), 0)
        with Capture(model) if keep is None else Capture(model, keep=keep) as capture, replaying(model, own):
            model(batch, cache=cache)
        return capture.traces(batch, cache)

    return replay


def _batch_of(model: Model, prompts: Sequence[ParityPrompt]) -> TokenBatch:
    """All prompts packed, with the rows that pictures overwrite and the pad tokens beside them zeroed."""
    device = next(model.parameters()).device
    batch = TokenBatch.whole([prompt.token_ids for prompt in prompts], all_logits=True, device=device)
    images = [image for prompt in prompts for image in prompt.images]
    if not images:
        return batch
    tokens = model.spec.tokens
    pad_rows, media_rows, offset = [], [], 0
    for prompt in prompts:
        if prompt.images:
            rows = [(offset + n, token) for n, token in enumerate(prompt.token_ids)]
            pad_rows += [row for row, token in rows if token == tokens.pad]
            media_rows += [row for row, token in rows if token == tokens.media]
        offset += len(prompt.token_ids)
    patches = torch.from_numpy(np.concatenate([_normalised(image) for image in images])).to(device)
    features = model.encode_images(patches, [(1, *image.grid) for image in images])
    if len(features) != len(media_rows):
        raise RequestError(f"{len(media_rows)} placeholders for {len(features)} picture rows")
    return TokenBatch(
        token_ids=batch.token_ids,
        lengths=batch.lengths,
        starts=batch.starts,
        slots=batch.slots,
        logit_rows=batch.logit_rows,
        image_rows=torch.tensor(media_rows, device=device),
        image_features=features,
        zero_rows=torch.tensor(pad_rows, dtype=torch.int64, device=device),
    )


def _normalised(image: ReferenceImage) -> np.ndarray:
    """Patches in [-1, 1] float32."""
    if image.patches.dtype != np.uint8:
        return image.patches.astype(np.float32)
    return (image.patches.astype(np.float32) / np.float32(255.0) - np.float32(0.5)) / np.float32(0.5)
