"""The next token from one row of logits: a function of that row, the parameters and the position alone.

No generator is shared between requests: the one random number of a token comes from a counter-based generator keyed by
(seed, position), so batch composition, chunking and preemption cannot change an answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from workbench.base import DeploymentError
from workbench.serving.requests import SamplingParams
from workbench.serving.steps import SampledToken

__all__ = ["keep_mask", "sample_row", "sample_rows", "uniform"]

# V vocabulary, R rows


def sample_rows(logits_RV: Tensor, params: Sequence[SamplingParams], step_idxs: Sequence[int]) -> list[SampledToken]:
    """One token per row of logits (R, V); row r is the `step_idxs[r]`-th token of its request."""
    assert logits_RV.shape[0] == len(params) == len(step_idxs), (logits_RV.shape, len(params), len(step_idxs))
    rows = logits_RV.detach().to("cpu", torch.float32)
    return [sample_row(row, p, idx) for row, p, idx in zip(rows, params, step_idxs, strict=True)]


def sample_row(logits_V: Tensor, params: SamplingParams, step_idx: int) -> SampledToken:
    """Token for logits (V,) fp32. Raises DeploymentError where they are not finite: the model's arithmetic broke down.

    The log-probability is that of the unfiltered distribution at temperature 1, whatever the sampling parameters.
    """
    if not bool(torch.isfinite(logits_V).all()):
        bad = int((~torch.isfinite(logits_V)).sum())
        raise DeploymentError(
            f"{bad} of {logits_V.numel()} logits of a sequence are not finite",
            next_step="Compare the layers with the reference; a low precision may overflow",
        )
    if params.temperature == 0.0:
        token_id = int(torch.argmax(logits_V))  # the first of equals
    else:
        # Shifted so that the largest is 0: a small temperature then underflows the others, never overflows.
        scaled = (logits_V.double() - logits_V.max().double()) / params.temperature
        mass = torch.exp(scaled) * keep_mask(scaled, params.top_k, params.top_p)
        # Summed in id order: rounding noise in the logits moves the borders a little, but never reorders tokens.
        cumulative = torch.cumsum(mass, 0)
        target = uniform(params.seed, step_idx) * cumulative[-1]
        index = int(torch.searchsorted(cumulative, target, right=True))
        token_id = min(index, int(torch.nonzero(mass)[-1]))
    return SampledToken(token_id=token_id, logprob=float(torch.log_softmax(logits_V, 0)[token_id]))


def keep_mask(scaled_V: Tensor, top_k: int, top_p: float) -> Tensor:
    """Which entries of the scaled logits (V,) may be drawn: bool (V,), always including the largest.

    top_k keeps exactly k entries, of equal ones those with the smaller id. top_p keeps the shortest run of the most
    likely among those left whose share reaches top_p.
    """
    keep = torch.ones_like(scaled_V, dtype=torch.bool)
    if 0 < top_k < scaled_V.numel() or top_p < 1.0:
        ordered, order = torch.sort(scaled_V, descending=True, stable=True)
        count = min(top_k, scaled_V.numel()) if top_k else scaled_V.numel()
        if top_p < 1.0:
            share = torch.cumsum(torch.softmax(ordered[:count], 0), 0)
            count = min(count, int((share < top_p).sum()) + 1)
        keep[order[count:]] = False
    return keep


def uniform(seed: int, step_idx: int) -> float:
    """A number in [0, 1) that depends on (seed, step_idx) alone. Philox-4x64, Salmon et al. 2011."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, step_idx])).random())
