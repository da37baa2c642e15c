"""The next token from one row of logits: a function of that row, the parameters and the position alone.

No generator is shared between requests: the one random number of a token comes from a counter-based generator keyed by
(seed, position), so batch composition, chunking and preemption cannot change an answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from workbench.base import DeploymentError, WorkbenchError
from workbench.serving.requests import SamplingParams
from workbench.serving.steps import SampledToken, SequenceStep
from workbench.serving.uniform import uniform

__all__ = [
    "candidate_mass",
    "draw",
    "keep_mask",
    "penalised",
    "sample_row",
    "sample_rows",
    "sample_steps",
    "told",
    "uniform",
    "unpacked",
]

# V vocabulary, R rows


def sample_steps(logits_RV: Tensor, steps: Sequence[SequenceStep]) -> list[SampledToken | WorkbenchError]:
    """One token for each of the steps that sample, or the error of one without: logits (R, V), row by row.

    A step with guesses has a row for each of them and one more; see `verify`.
    """
    if not steps:
        return []
    rows = logits_RV.detach().to("cpu", torch.float32).split([1 + len(step.drafts) for step in steps])
    return [
        _sampled(each, step, step.sample) for each, step in zip(rows, steps, strict=True) if step.sample is not None
    ]


def _sampled(rows_RV: Tensor, step: SequenceStep, params: SamplingParams) -> SampledToken | WorkbenchError:
    from workbench.serving.verify import verify

    try:
        if step.drafts:
            return verify(rows_RV, step, params)
        return sample_row(rows_RV[0], params, step.step_idx, history=step.history, allowed=step.allowed)
    except WorkbenchError as error:
        return error
    except Exception as error:  # one row's arithmetic: the model's work for the others is done and good
        return DeploymentError(f"sampling failed: {type(error).__name__}: {error}")


def sample_rows(logits_RV: Tensor, params: Sequence[SamplingParams], step_idxs: Sequence[int]) -> list[SampledToken]:
    """One token per row of logits (R, V); row r is the `step_idxs[r]`-th token of its request."""
    assert logits_RV.shape[0] == len(params) == len(step_idxs), (logits_RV.shape, len(params), len(step_idxs))
    rows = logits_RV.detach().to("cpu", torch.float32)
    return [sample_row(row, p, idx) for row, p, idx in zip(rows, params, step_idxs, strict=True)]


def sample_row(
    logits_V: Tensor, params: SamplingParams, step_idx: int, *, history: bytes = b"", allowed: bytes = b""
) -> SampledToken:
    """Token for logits (V,) fp32; `history` and `allowed` as in `SequenceStep`.

    The log-probability is that of the unfiltered distribution at temperature 1, whatever the sampling parameters.
    Raises DeploymentError where the logits are not finite, for then the model's arithmetic broke down, and where
    `allowed` leaves no id.
    """
    if params.temperature == 0.0:
        chosen_V = _choosable(logits_V, params, step_idx, history, allowed)
        return told(logits_V, int(torch.argmax(chosen_V)), params)  # the first of equals
    mass_V = candidate_mass(logits_V, params, step_idx, history=history, allowed=allowed)
    return told(logits_V, draw(mass_V, params.seed, step_idx), params)


def candidate_mass(
    logits_V: Tensor, params: SamplingParams, step_idx: int, *, history: bytes = b"", allowed: bytes = b""
) -> Tensor:
    """What each id weighs in a draw above temperature 0: float64 (V,), not scaled to 1. Raises as `sample_row`."""
    chosen_V = _choosable(logits_V, params, step_idx, history, allowed)
    # Shifted so that the largest is 0: a small temperature then underflows the others, never overflows.
    scaled = (chosen_V.double() - chosen_V.max().double()) / params.temperature
    return torch.exp(scaled) * keep_mask(scaled, params.top_k, params.top_p, params.min_p)


def draw(mass_V: Tensor, seed: int, step_idx: int) -> int:
    """The id that the one random number of this place falls on."""
    # Summed in id order: rounding noise in the logits moves the borders a little, but never reorders tokens.
    cumulative = torch.cumsum(mass_V, 0)
    target = uniform(seed, step_idx) * cumulative[-1]
    index = int(torch.searchsorted(cumulative, target, right=True))
    return min(index, int(torch.nonzero(mass_V)[-1]))


def _choosable(logits_V: Tensor, params: SamplingParams, step_idx: int, history: bytes, allowed: bytes) -> Tensor:
    """Logits with penalties, -inf where a constraint forbids, and at the ids that would end the answer too early."""
    if not bool(torch.isfinite(logits_V).all()):
        bad = int((~torch.isfinite(logits_V)).sum())
        raise DeploymentError(
            f"{bad} of {logits_V.numel()} logits of a sequence are not finite",
            next_step="Compare the layers with the reference; a low precision may overflow",
        )
    chosen_V = logits_V
    if params.needs_history:
        chosen_V = penalised(chosen_V, params, history, step_idx)
    if allowed:
        chosen_V = torch.where(unpacked(allowed, len(logits_V)), chosen_V, -torch.inf)
        if not bool((chosen_V > -torch.inf).any()):
            raise DeploymentError("no token may be chosen", next_step="A bug: a constraint must always leave a way on")
    if step_idx < params.min_tokens and params.stop_ids:
        longer_V = chosen_V.index_fill(0, torch.tensor(params.stop_ids), -torch.inf)
        # A grammar that is complete leaves only the end: a longer answer would have to break it.
        return longer_V if bool((longer_V > -torch.inf).any()) else chosen_V
    return chosen_V


def told(logits_V: Tensor, token_id: int, params: SamplingParams) -> SampledToken:
    """A chosen token with its log probability, and those of the likeliest ids where they are asked for."""
    logprobs_V = torch.log_softmax(logits_V, 0)
    top: tuple[tuple[int, float], ...] = ()
    if params.num_logprobs:
        values, ids = torch.sort(logprobs_V, descending=True, stable=True)
        count = params.num_logprobs
        top = tuple(zip(ids[:count].tolist(), values[:count].tolist(), strict=True))
    return SampledToken(token_id=token_id, logprob=float(logprobs_V[token_id]), top=top)


def penalised(logits_V: Tensor, params: SamplingParams, history: bytes, num_generated: int) -> Tensor:
    """Logits (V,) with the penalties of `params` for int32 ids `history`, the last `num_generated` of them generated.

    Repetition: Keskar et al. 2019, section 4.1. Presence and frequency: the OpenAI API reference.
    """
    ids = torch.from_numpy(np.frombuffer(history, np.dtype("<i4")).astype(np.int64))
    assert len(ids) >= num_generated, (len(ids), num_generated)
    out = logits_V.clone()
    if params.repetition_penalty != 1.0:
        seen = torch.unique(ids)
        values = out[seen]
        out[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    counts = torch.bincount(ids[len(ids) - num_generated :], minlength=len(out)).to(out.dtype)
    return out - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


def unpacked(bits: bytes, vocab_size: int) -> Tensor:
    """Bool (V,) of `vocab_size` bits, the lowest bit of each byte first."""
    flags = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
    assert len(flags) >= vocab_size, (len(flags), vocab_size)
    return torch.from_numpy(flags[:vocab_size].astype(bool))


def keep_mask(scaled_V: Tensor, top_k: int, top_p: float, min_p: float = 0.0) -> Tensor:
    """Which entries of the scaled logits (V,) may be drawn: bool (V,), always including the largest, which is 0.

    top_k keeps exactly k entries, of equal ones those with the smaller id. top_p keeps the shortest run of the most
    likely among those left whose share reaches top_p. min_p drops those below that share of the most likely.
    """
    keep = torch.ones_like(scaled_V, dtype=torch.bool)
    if 0 < top_k < scaled_V.numel() or top_p < 1.0:
        ordered, order = torch.sort(scaled_V, descending=True, stable=True)
        count = min(top_k, scaled_V.numel()) if top_k else scaled_V.numel()
        if top_p < 1.0:
            share = torch.cumsum(torch.softmax(ordered[:count], 0), 0)
            count = min(count, int((share < top_p).sum()) + 1)
        keep[order[count:]] = False
    return keep & (scaled_V >= math.log(min_p)) if min_p else keep
