"""Traces of several ranks put together: undoing the split before anything is compared.

A rank captures what it holds. Which dimension of a tensor was split is read from the placement table, through the
weight that made the tensor (its rows) or that consumes it (its columns).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from workbench.align.reference import Trace
from workbench.align.trace import layer_of, short_name
from workbench.base import DeploymentError
from workbench.placement import Layout, rule_for
from workbench.spec import ModelSpec

__all__ = ["merge_ranks", "redo_split", "undo_split"]

REPLICA_TOLERANCE = 1e-2  # relative; beyond it two copies of one value have parted, whatever the device's rounding


@dataclass(frozen=True, slots=True)
class _Split:
    """The weight that decides how a tensor is split: it is made by the weight's rows, made by columns (each rank then
    holds a partial sum), or consumed by its columns. `dim` is the dimension of the tensor that follows the weight."""

    param: str
    relation: Literal["made by rows", "summed over columns", "consumed by columns"]
    dim: int


_SPLITS: dict[str, _Split] = {
    "kda_conv": _Split("mixer.q_conv.weight", "made by rows", 1),
    "kda_q": _Split("mixer.q_conv.weight", "made by rows", 1),
    "kda_k": _Split("mixer.k_conv.weight", "made by rows", 1),
    "kda_v": _Split("mixer.v_conv.weight", "made by rows", 1),
    "kda_g": _Split("mixer.f_b_proj.weight", "made by rows", 1),
    "kda_beta_logit": _Split("mixer.b_proj.weight", "made by rows", 1),
    "kda_o": _Split("mixer.v_conv.weight", "made by rows", 1),
    "kda_state": _Split("mixer.A_log", "made by rows", 0),
    "kda_gated": _Split("mixer.o_proj.weight", "consumed by columns", 1),
    "mla_q": _Split("mixer.q_b_proj.weight", "made by rows", 1),
    "mla_gated": _Split("mixer.o_proj.weight", "consumed by columns", 1),
    "moe_routed_out": _Split("ffn.latent_out.weight", "summed over columns", 1),
    "moe_shared_out": _Split("ffn.shared.down_proj.weight", "summed over columns", 1),
}


def undo_split(name: str, pieces: Sequence[Tensor], spec: ModelSpec, layout: Layout) -> Tensor:
    """One tensor from the pieces that the tp ranks of one stage and replica captured, in tp order.

    Split pieces are joined, partial sums are added, and copies must agree: raises DeploymentError where ranks hold
    different values of what they replicate, which points at a missing or doubled reduction.
    """
    if len(pieces) == 1:
        return pieces[0]
    split = _split_of(name, spec, layout)
    if split is not None:
        if split.relation != "summed over columns":
            return torch.cat(list(pieces), split.dim)
        return torch.stack([piece.to(torch.float64) for piece in pieces]).sum(0).to(pieces[0].dtype)
    for tp_rank, piece in enumerate(pieces[1:], 1):
        _check_copy(name, pieces[0], piece, tp_rank)
    return pieces[0]


def redo_split(name: str, whole: Tensor, spec: ModelSpec, layout: Layout, tp_rank: int) -> Tensor:
    """The piece of `whole` that a tp rank holds: `undo_split` gives `whole` back. The first rank holds all of a sum."""
    split = _split_of(name, spec, layout) if layout.tp > 1 else None
    if split is None:
        return whole
    if split.relation == "summed over columns":
        return whole if tp_rank == 0 else torch.zeros_like(whole)
    return whole.chunk(layout.tp, split.dim)[tp_rank]


def _split_of(name: str, spec: ModelSpec, layout: Layout) -> _Split | None:
    """How a tensor is split under `layout`, None where every tp rank holds it whole."""
    split, layer = _SPLITS.get(short_name(name)), layer_of(name)
    if split is None or layer is None:
        return None
    rule = rule_for(spec, layout, f"layers.{layer}.{split.param}")
    return split if rule.dim == (0 if split.relation == "made by rows" else 1) else None


def _check_copy(name: str, first: Tensor, other: Tensor, tp_rank: int) -> None:
    if first.shape == other.shape:
        gap = (first.double() - other.double()).norm().item()
        limit = REPLICA_TOLERANCE * first.double().norm().item() if first.is_floating_point() else 0.0
        if gap <= limit:
            return
    raise DeploymentError(
        f"tp ranks 0 and {tp_rank} hold different values of {name}, which each should hold whole",
        found=f"{tuple(other.shape)}, |difference| {gap:.3e}" if first.shape == other.shape else tuple(other.shape),
        expected=f"{tuple(first.shape)}, equal",
        next_step="Look for a missing or doubled reduction in what computes it",
    )


def merge_ranks(traces: Mapping[int, Trace], spec: ModelSpec, layout: Layout, *, dp: int = 0) -> Trace:
    """One trace of a sequence that replica `dp` ran, from what each global rank captured of it.

    Ranks of other replicas may be absent from `traces`. Raises DeploymentError where a rank of this replica is missing,
    or captured other names than its tp neighbours.
    """
    merged: Trace = {}
    for stage in range(layout.pp):
        ranks = [layout.rank_at(pp=stage, dp=dp, tp=tp) for tp in range(layout.tp)]
        if absent := [rank for rank in ranks if rank not in traces]:
            raise DeploymentError(f"no trace of ranks {absent}", expected=f"ranks {ranks} for stage {stage}")
        names = traces[ranks[0]].keys()
        for rank in ranks[1:]:
            if traces[rank].keys() != names:
                odd = sorted(traces[rank].keys() ^ names)
                raise DeploymentError(f"ranks {ranks[0]} and {rank} captured different tensors", found=odd[:3])
        merged.update({n: undo_split(n, [traces[rank][n] for rank in ranks], spec, layout) for n in names})
    return merged
