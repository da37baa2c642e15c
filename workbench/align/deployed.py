"""Traces of a deployment: what its ranks captured, cut by sequence and put together, ready to be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from workbench.align.alignment import Served
from workbench.align.held import held_weights, schemes_of
from workbench.align.merge import merge_ranks
from workbench.align.parity import ParityPrompt, TraceForward, TraceReplay
from workbench.align.reference import Trace
from workbench.align.replay import given_for_rank
from workbench.align.sources import CACHE_SOURCE, in_trace_form, trace_sources
from workbench.base import DeploymentError, RequestError
from workbench.placement import Layout
from workbench.spec import ModelSpec

__all__ = ["TraceSource", "deployment_forward", "deployment_replay", "served_by"]


class TraceSource(Protocol):
    """What is asked of a deployment: one pass over whole sequences that brings back what every rank captured.

    `forward` deals sequences over the replicas in turn; its result has `captured`, per rank a mapping from source name
    to array, whose rows are those of the replica's sequences one behind another (cache values: one row per sequence).
    """

    @property
    def spec(self) -> ModelSpec: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def forward(self) -> Any: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _PlacedImage:
    """A picture and the prompt rows [row, row + count) that its features fill; `key` names its content."""

    key: str
    patches: np.ndarray
    grid: tuple[int, int, int]
    row: int
    count: int


def deployment_forward(deployment: TraceSource) -> TraceForward:
    """A forward for `check_parity` that runs every prompt on the ranks of `deployment`."""
    replay = deployment_replay(deployment)

    def forward(prompts: Sequence[ParityPrompt]) -> list[Trace]:
        return list(replay(prompts, []))

    return forward


def deployment_replay(deployment: TraceSource) -> TraceReplay:
    """A replay for `align_model` on the ranks of `deployment`: each rank gets its pieces of the given tensors."""
    spec, layout = deployment.spec, deployment.layout
    sources = trace_sources(spec)

    def replay(prompts: Sequence[ParityPrompt], given: Sequence[Mapping[str, Tensor]]) -> list[Trace]:
        options = {}
        if given:
            coords = [layout.coords(rank) for rank in range(layout.world_size)]
            options["given"] = [
                given_for_rank(given[at.dp :: layout.dp], spec, layout, rank) for rank, at in enumerate(coords)
            ]
        result = deployment.forward(
            [prompt.token_ids for prompt in prompts],
            [_placed(prompt, spec) for prompt in prompts],
            capture=list(dict.fromkeys(sources.values())),
            **options,
        )
        lengths = [len(prompt.token_ids) for prompt in prompts]
        per_rank = [
            _cut(captured, sources, lengths[layout.coords(rank).dp :: layout.dp], spec)
            for rank, captured in enumerate(result.captured)
        ]
        merged = []
        for n in range(len(prompts)):
            replica, position = n % layout.dp, n // layout.dp
            ranks = [rank for rank in range(layout.world_size) if layout.coords(rank).dp == replica]
            merged.append(merge_ranks({rank: per_rank[rank][position] for rank in ranks}, spec, layout, dp=replica))
        return merged

    return replay


def served_by(deployment: TraceSource, *, precision: str, dtype: torch.dtype | None = None) -> Served:
    """The ranks of `deployment`, which were started with `precision` (a name or a map) and `dtype`, to be judged by
    what they hold. `dtype` is that of activations; as for a start, float32 for "fp32" and else bfloat16."""
    spec, layout = deployment.spec, deployment.layout
    dtype = dtype or (torch.float32 if precision == "fp32" else torch.bfloat16)
    return Served(
        forward=deployment_forward(deployment),
        replay=deployment_replay(deployment),
        dtype=dtype,
        label=f"{layout} in {precision}",
        held=held_weights(spec, schemes_of(spec, precision), layout, dtype),
    )


def _cut(
    captured: Mapping[str, np.ndarray], sources: Mapping[str, str], lengths: Sequence[int], spec: ModelSpec
) -> list[Trace]:
    """One rank's captured values as a trace per sequence of its replica. Raises DeploymentError for rows that do not
    add up to the sequences."""
    traces: list[Trace] = [{} for _ in lengths]
    if not traces:  # fewer prompts than replicas
        return traces
    for name, source in sources.items():
        if source not in captured:  # belongs to another stage
            continue
        value = torch.from_numpy(captured[source])
        pieces: Sequence[Tensor]
        if source.startswith(CACHE_SOURCE):
            pieces = [value[n, :length] if ".latent." in source else value[n] for n, length in enumerate(lengths)]
        else:
            packed = in_trace_form(name, value, spec)
            if packed.shape[0] != sum(lengths):
                raise DeploymentError(f"{source} has {packed.shape[0]} rows", expected=f"{sum(lengths)} tokens")
            pieces = packed.split(list(lengths))
        for trace, piece in zip(traces, pieces, strict=True):
            trace[name] = piece
    return traces


def _placed(prompt: ParityPrompt, spec: ModelSpec) -> list[_PlacedImage]:
    """The prompt's pictures and the runs of placeholder tokens that they fill, in order."""
    if not prompt.images:
        return []
    assert spec.vision is not None
    rows = [row for row, token in enumerate(prompt.token_ids) if token == spec.tokens.media]
    placed: list[_PlacedImage] = []
    used = 0
    for image in prompt.images:
        height, width = image.grid
        count = height * width // spec.vision.merge_size**2
        run = rows[used : used + count]
        if len(run) != count or run[-1] - run[0] != count - 1:
            raise RequestError(
                f"{prompt.label}: placeholders and picture rows do not match",
                found=f"{len(rows)} placeholders",
                expected=f"a run of {count} for picture {len(placed)}",
            )
        if image.patches.dtype != np.uint8:
            raise RequestError(f"{prompt.label}: a deployment takes patches as bytes", found=image.patches.dtype)
        key = sha256(repr(image.grid).encode() + image.patches.tobytes()).hexdigest()
        placed.append(_PlacedImage(key=key, patches=image.patches, grid=(1, height, width), row=run[0], count=count))
        used += count
    return placed
