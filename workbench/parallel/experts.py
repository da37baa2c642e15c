"""How tokens reach their experts: every rank sees all tokens, or tokens travel to the experts and back.

Shapes: T tokens of this replica, L expert latent width, K experts per token. Inputs and result are whole on every rank
of the tensor-parallel group, and so are their gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.nn.moe import Experts
from workbench.parallel.functions import (
    copy_all_to,
    exchange_rows,
    gather_rows,
    gather_tokens,
    keep_connected,
    reduce_from,
    return_tokens,
    split_rows,
)
from workbench.parallel.mesh import RankContext

__all__ = ["AllToAllDispatch", "ReplicatedDispatch", "share_sizes"]


class ReplicatedDispatch:
    """Every rank of the expert group computes its own experts for all tokens; the results are summed.

    Where the group spans several replicas (ep > tp), their tokens are gathered first and each keeps its own rows of the
    sum. Token counts may differ between replicas and may be zero.
    """

    def __init__(self, ctx: RankContext, num_local_experts: int) -> None:
        self.ctx, self.num_local = ctx, num_local_experts

    def __call__(self, latent: Tensor, expert_ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
        ctx = self.ctx
        if ctx.experts.size == 1:  # all of them are here
            return experts(latent, expert_ids, weights)
        if ctx.expert_gather.size == 1:
            slots = _slots(expert_ids, ctx.coords.ep, self.num_local)
            latent, weights = copy_all_to((latent, weights), ctx.experts)
            partial = experts(latent, slots, weights)
            return reduce_from(keep_connected(partial, latent, weights), ctx.experts)
        counts = ctx.token_counts
        if counts is None:
            counts = ctx.expert_gather.row_counts(latent.shape[0], latent.device)
        across, group = ctx.expert_gather, ctx.experts
        latent_all, weights_all, ids_all = gather_tokens(
            latent, weights, expert_ids, counts=counts, across=across, experts=group
        )
        partial = experts(latent_all, _slots(ids_all, ctx.coords.ep, self.num_local), weights_all)
        partial = keep_connected(partial, latent_all, weights_all)
        return return_tokens(partial, counts=counts, across=across, experts=group)


class AllToAllDispatch:
    """Tokens are shared out over the tp ranks, travel to the ranks that hold their experts, and return as sums.

    A token goes once to each rank that holds at least one of its experts. One small exchange tells the row counts, one
    carries latent, weights and slots together, one carries the fp32 results back.
    """

    def __init__(self, ctx: RankContext, num_local_experts: int) -> None:
        self.ctx, self.num_local = ctx, num_local_experts

    def __call__(self, latent: Tensor, expert_ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
        group, tp, num_local = self.ctx.experts, self.ctx.tp, self.num_local
        shares = share_sizes(latent.shape[0], tp.size)
        start = sum(shares[: tp.rank])
        ids = expert_ids[start : start + shares[tp.rank]]
        own_latent, own_weights = split_rows(latent, shares, tp), split_rows(weights, shares, tp)

        owner = ids // num_local  # (t, K) place in the expert group
        goes = torch.zeros(len(ids), group.size, dtype=torch.bool, device=ids.device).scatter_(1, owner, True)
        target, row = goes.t().nonzero(as_tuple=True)  # by target, then by token
        slots = torch.where(owner[row] == target[:, None], ids[row] - target[:, None] * num_local, -1)
        send_counts = goes.sum(0)
        one_each = [1] * group.size
        receive_counts = group.exchange(send_counts, one_each, one_each)
        sends, receives = send_counts.tolist(), receive_counts.tolist()

        there, there_weights, there_slots = exchange_rows(
            group, sends, receives, own_latent[row], own_weights[row], slots.to(torch.int32)
        )
        partial = experts(there, there_slots.to(torch.int64), there_weights)
        partial = keep_connected(partial, there, there_weights)
        (back,) = exchange_rows(group, receives, sends, partial)
        combined = torch.zeros(len(ids), back.shape[1], dtype=back.dtype, device=back.device).index_add(0, row, back)
        return gather_rows(combined, shares, tp)


def share_sizes(num_rows: int, num_ranks: int) -> tuple[int, ...]:
    """Rows of each rank when rows are shared out in order, the remainder to the first ranks."""
    base, extra = divmod(num_rows, num_ranks)
    return tuple(base + (rank < extra) for rank in range(num_ranks))


def _slots(expert_ids: Tensor, ep: int, num_local: int) -> Tensor:
    """Global expert ids -> rows of the local stack, -1 where another rank holds the expert."""
    local = expert_ids - ep * num_local
    return torch.where((local >= 0) & (local < num_local), local, -1)
