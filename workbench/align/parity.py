"""Is the deployed model the published one? Its traces against the reference, for several prompts, with one verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from workbench.align.capture import Capture
from workbench.align.compare import FP32_TOLERANCE, Comparison, TensorDiff, Tolerance, compare_traces
from workbench.align.reference import ReferencePrompt, Trace, reference_traces
from workbench.align.reference_vision import ReferenceImage
from workbench.align.trace import forward_order, layer_of, short_name
from workbench.base import Cell, RequestError, Table
from workbench.nn.batch import TokenBatch
from workbench.nn.cache import StateCache
from workbench.nn.model import Model

__all__ = ["GreedyCheck", "ParityPrompt", "ParityReport", "TraceForward", "check_parity", "model_forward"]


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


@dataclass(frozen=True, kw_only=True, slots=True)
class GreedyCheck:
    """Generated tokens against the reference's own choice. `first_wrong` counts from 0, None where all agree.

    `gap` is the largest amount by which the reference rates its own choice above the generated token; up to `limit`
    two implementations may part.
    """

    num_tokens: int
    num_equal: int
    first_wrong: int | None
    gap: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.gap <= self.limit


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityReport:
    """Parity over all prompts. `suspect` is the failing tensor that a forward pass computes first, over all prompts."""

    root: str
    comparisons: tuple[Comparison, ...]
    greedy: tuple[GreedyCheck, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        return bool(self.comparisons) and all(x.passed for x in self.comparisons) and all(x.passed for x in self.greedy)

    @property
    def num_tensors(self) -> int:
        return sum(len(comparison.diffs) for comparison in self.comparisons)

    @property
    def worst(self) -> TensorDiff | None:
        """Largest relative difference over all prompts."""
        found = [comparison.worst for comparison in self.comparisons if comparison.worst is not None]
        return max(found, key=lambda diff: diff.relative, default=None)

    @property
    def suspect(self) -> TensorDiff | None:
        suspects = {x.suspect.name: x.suspect for x in reversed(self.comparisons) if x.suspect is not None}
        return suspects[forward_order(suspects)[0]] if suspects else None

    def verdict(self) -> str:
        """One sentence for a report."""
        if not self.comparisons:
            return "nothing was compared"
        if self.suspect is not None:
            first = next(x for x in self.comparisons if x.suspect == self.suspect)
            return first.verdict()
        if incomplete := next((x for x in self.comparisons if x.missing), None):
            return incomplete.verdict()
        for comparison, greedy in zip(self.comparisons, self.greedy, strict=True):
            if not greedy.passed:
                return (
                    f"{comparison.label}: tensors agree, but generated token {greedy.first_wrong} is not the "
                    f"reference's choice (logit gap {greedy.gap:.3g}, at most {greedy.limit:.0e})"
                )
        worst = (
            "" if self.worst is None else f"; largest relative difference {self.worst.relative:.1e} ({self.worst.name})"
        )
        generated = sum(greedy.num_tokens for greedy in self.greedy)
        return (
            f"{self.num_tensors} tensors of {len(self.comparisons)} prompts and {generated} greedy tokens agree{worst}"
        )

    def table(self) -> Table:
        """One row per prompt."""
        rows: list[tuple[Cell, ...]] = []
        for comparison, greedy in zip(self.comparisons, self.greedy, strict=True):
            choices = [diff for diff in comparison.diffs if short_name(diff.name) == "topk_idx"]
            worst = comparison.worst
            rows.append(
                (
                    comparison.label,
                    len(comparison.diffs),
                    "–" if worst is None else f"{worst.relative:.1e}",
                    "–" if worst is None else worst.name,
                    f"{sum(int(d.max_abs) for d in choices)} of {sum(int(d.expected) for d in choices)}",
                    f"{greedy.num_equal} of {greedy.num_tokens}",
                    "ok" if comparison.passed and greedy.passed else "WRONG",
                )
            )
        columns = ("prompt", "tensors", "worst relative", "at", "other experts", "greedy tokens", "verdict")
        limit = self.comparisons[0].tolerance if self.comparisons else FP32_TOLERANCE
        note = f"limit: relative {limit.relative:.0e} ({limit.reason}); {self.seconds:.1f} s"
        return Table(columns=columns, rows=tuple(rows), title=self.verdict(), note=note)

    def worst_by_layer(self) -> dict[int, TensorDiff]:
        """The largest relative difference in each layer over all prompts: where error enters and how it grows."""
        worst: dict[int, TensorDiff] = {}
        for diff in (diff for comparison in self.comparisons for diff in comparison.diffs):
            layer = layer_of(diff.name)
            if layer is None or short_name(diff.name) in ("topk_idx", "route_margin", "route_regret"):
                continue
            if layer not in worst or diff.relative > worst[layer].relative:
                worst[layer] = diff
        return dict(sorted(worst.items()))

    def by_layer(self) -> Table:
        """`worst_by_layer` as a table."""
        rows = tuple(
            (layer, f"{diff.relative:.1e}", short_name(diff.name), f"{diff.max_abs:.1e}")
            for layer, diff in self.worst_by_layer().items()
        )
        return Table(columns=("layer", "worst relative", "tensor", "max|d|"), rows=rows)

    def render(self) -> str:
        failing = [x.table(only_failures=True).render() for x in self.comparisons if not x.passed]
        return "\n\n".join([self.table().render(), *failing])

    def _repr_html_(self) -> str:
        failing = [x.table(only_failures=True).to_html() for x in self.comparisons if not x.passed]
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
                    },
                }
                for comparison, greedy in zip(self.comparisons, self.greedy, strict=True)
            ],
        }


def _is_captured(name: str) -> bool:
    """What a forward capture must bring: not the router's scores, nor the inside of the vision tower."""
    is_inside = short_name(name) in ("router_scores", "route_margin", "route_regret")
    return not is_inside and not name.startswith("image")


def check_parity(
    forward: TraceForward,
    root: Path | str,
    prompts: Sequence[ParityPrompt],
    *,
    tolerance: Tolerance = FP32_TOLERANCE,
    required: Callable[[str], bool] = _is_captured,
) -> ParityReport:
    """Run `prompts` through `forward` and through the reference of checkpoint `root`, and compare the traces.

    The reference follows the experts that `forward` chose and judges each choice for itself, so that one token tipped
    over by rounding does not blur the rest. Every reference tensor for which `required(name)` must be in the trace of
    `forward`. Raises RequestError where `forward` returns another number of traces.
    """
    began = time.perf_counter()
    found = forward(prompts)
    if len(found) != len(prompts):
        raise RequestError(f"{len(found)} traces for {len(prompts)} prompts")
    inputs = [ReferencePrompt(token_ids=p.token_ids, images=p.images) for p in prompts]
    expected = reference_traces(root, inputs, choices=found)
    comparisons, greedy = [], []
    for prompt, want, have in zip(prompts, expected, found, strict=True):
        comparisons.append(compare_traces(want, have, tolerance, required=required, label=prompt.label))
        greedy.append(_check_greedy(prompt, want["logits"], tolerance.logit_gap))
    return ParityReport(
        root=str(root),
        comparisons=tuple(comparisons),
        greedy=tuple(greedy),
        seconds=time.perf_counter() - began,
    )


def _check_greedy(prompt: ParityPrompt, logits: Tensor, limit: float) -> GreedyCheck:
    """Each generated token against the reference's highest logit at the position before it."""
    count = prompt.num_generated
    if not count:
        return GreedyCheck(num_tokens=0, num_equal=0, first_wrong=None, gap=0.0, limit=limit)
    tokens = torch.tensor(prompt.token_ids[-count:])
    rated = logits[-count - 1 : -1]
    gaps = rated.amax(-1) - rated.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    wrong = (gaps > 0).nonzero()
    return GreedyCheck(
        num_tokens=count,
        num_equal=count - len(wrong),
        first_wrong=int(wrong[0]) if len(wrong) else None,
        gap=gaps.max().item(),
        limit=limit,
    )


def model_forward(model: Model, *, keep: Callable[[str], bool] | None = None) -> TraceForward:
    """Traces of a whole model in this process: all prompts as one ragged batch, with the state it leaves in a cache."""

    @torch.no_grad()
    def forward(prompts: Sequence[ParityPrompt]) -> list[Trace]:
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
        with Capture(model) if keep is None else Capture(model, keep=keep) as capture:
            model(batch, cache=cache)
        return capture.traces(batch, cache)

    return forward


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
