"""Which guesses hold: every token comes from the model's own distribution, whatever was guessed.

A guess x that was drawn from q is taken with probability min(1, p(x) / q(x)); where it is not, the token is drawn from
max(0, p - q), scaled to sum 1, and the guesses behind it are dropped. So the token is distributed as p (Leviathan,
Kalman, Matias 2023, appendix A.1). At temperature 0, and for a guess that was not drawn but looked up, the token is
chosen as without any guess and compared with it: the same rule for a q of one token, and the very same tokens.
"""

from __future__ import annotations

from array import array
from dataclasses import replace

import torch
from torch import Tensor

from workbench.serving.requests import SamplingParams
from workbench.serving.sampler import candidate_mass, draw, sample_row, told
from workbench.serving.steps import Draft, SampledToken, SequenceStep
from workbench.serving.uniform import ACCEPT, uniform

__all__ = ["verify"]


def verify(rows_RV: Tensor, step: SequenceStep, params: SamplingParams) -> SampledToken:
    """The next token behind those guesses of `step` that hold, which it names as `accepted`.

    Row i of the logits (1 + guesses, V) follows i guesses. Raises as `sample_row`.
    """
    assert len(rows_RV) == 1 + len(step.drafts), (rows_RV.shape, len(step.drafts))
    accepted: list[SampledToken] = []
    history = array("i")
    history.frombytes(step.history)
    for i, (row_V, draft) in enumerate(zip(rows_RV[:-1], step.drafts, strict=True)):
        token = _choose(row_V, params, step.step_idx + i, history.tobytes(), draft)
        if token.token_id != draft.token_id:
            return replace(token, accepted=tuple(accepted))
        accepted.append(token)
        if params.needs_history:
            history.append(draft.token_id)
    last_idx = step.step_idx + len(step.drafts)
    last = sample_row(rows_RV[-1], params, last_idx, history=history.tobytes())
    return replace(last, accepted=tuple(accepted))


def _choose(row_V: Tensor, params: SamplingParams, step_idx: int, history: bytes, draft: Draft) -> SampledToken:
    """The token after which `draft` was guessed. A rejected guess never comes out: the rest has no mass there."""
    if params.temperature == 0.0 or not draft.support:
        return sample_row(row_V, params, step_idx, history=history)
    mass = candidate_mass(row_V, params, step_idx, history=history)
    mass = mass / mass.sum()
    ids = torch.tensor([token_id for token_id, _ in draft.support])
    q = torch.tensor([probability for _, probability in draft.support], dtype=mass.dtype)
    q_of_draft = dict(draft.support)[draft.token_id]
    if uniform(params.seed, step_idx, ACCEPT) * q_of_draft < float(mass[draft.token_id]):
        return told(row_V, draft.token_id, params)
    rest = mass.clone()
    rest[ids] = (rest[ids] - q).clamp_min(0)
    if not float(rest.sum()) > 0:  # p = q but for rounding: a rejection has no probability then
        rest = mass
    return told(row_V, draw(rest, params.seed, step_idx), params)
