"""Which experts tokens are assumed to visit where no real routing is known: evenly many tokens for every expert.

A token's K experts lie equally far apart (a token then meets min(K, ranks) ranks of an expert group, the most it can),
and neighbouring tokens are shifted against one another, so that T tokens give every expert T * K / E rows where that is
a whole number and close to it elsewhere. Real routers are less even: the busiest rank does more than this.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.parallel.experts import share_sizes
from workbench.placement import Layout, RankCoords
from workbench.spec import ModelSpec, MoESpec

__all__ = ["ExpertTraffic", "Routing", "draw_routing", "spread_evenly"]

# (layer, dp rank, tokens of that replica) -> expert ids (T, K) int64 on the CPU, each row ascending and without doubles
Routing = Callable[[int, int, int], Tensor]


def spread_evenly(moe: MoESpec, num_tokens: int, first_token: int = 0) -> Tensor:
    """Expert ids (T, K) int64 ascending, of tokens `first_token`, ... of one endless even stream."""
    num, top_k = moe.num_experts, moe.top_k
    period = num // top_k if num % top_k == 0 else num
    step = max(1, round(period * 0.618))
    while math.gcd(step, period) != 1:
        step += 1
    starts = torch.arange(first_token, first_token + num_tokens)[:, None] * step % period
    places = torch.arange(top_k) * num // top_k
    return ((starts + places) % num).sort(-1).values


def draw_routing(spec: ModelSpec, seed: int = 0) -> Routing:
    """Routing in which every token draws its K experts by itself, all alike likely.

    Even over many tokens; of few tokens several meet at one expert and others stay unused, as in a decode step of a
    router that is balanced: E (1 - (1 - K/E)^T) experts are visited, where an even spread visits min(E, T K).
    """

    def routing(layer_idx: int, dp: int, num_tokens: int) -> Tensor:
        moe = spec.layers[layer_idx].ffn
        assert isinstance(moe, MoESpec)
        generator = torch.Generator().manual_seed(hash((seed, layer_idx, dp)) & 0x7FFFFFFF)
        scores = torch.rand(num_tokens, moe.num_experts, generator=generator)
        return scores.topk(moe.top_k, dim=-1).indices.sort(-1).values

    return routing


@dataclass(frozen=True, kw_only=True)
class ExpertTraffic:
    """What the rank at `coords` sends and receives in one expert layer, all replicas having `num_tokens` tokens."""

    layout: Layout
    coords: RankCoords
    num_tokens: int
    moe: MoESpec
    routing: Routing | None = None

    @property
    def among(self) -> tuple[object, ...]:
        """What of the layout the traffic depends on."""
        layout, at = self.layout, self.coords
        return layout.tp, layout.ep, layout.dispatch, at.tp, at.ep, at.dp % layout.expert_dp

    def ids(self, layer_idx: int, dp: int | None = None) -> Tensor:
        """(T, K) of one replica, by default the own one."""
        dp = self.coords.dp if dp is None else dp
        if self.routing is not None:
            return self.routing(layer_idx, dp, self.num_tokens)
        return spread_evenly(self.moe, self.num_tokens, dp * self.num_tokens)

    def _spanned(self) -> range:
        first = self.coords.dp - self.coords.dp % self.layout.expert_dp
        return range(first, first + self.layout.expert_dp)

    @property
    def _num_local(self) -> int:
        return self.moe.num_experts // self.layout.ep

    def gathered_slots(self, layer_idx: int) -> Tensor:
        """(tokens of all spanned replicas, K) local rows of the experts held here, -1 elsewhere."""
        ids = torch.cat([self.ids(layer_idx, dp) for dp in self._spanned()])
        return self._local(ids, self.coords.ep)

    def received_slots(self, layer_idx: int) -> Tensor:
        """All-to-all: (rows that arrive here, K) local rows, -1 elsewhere, in the order of the senders."""
        slots = torch.cat([self._local(ids, self.coords.ep) for ids in self._shares(layer_idx)])
        return slots[(slots >= 0).any(-1)]

    def received_counts(self, layer_idx: int) -> Tensor:
        """All-to-all: (group,) rows that each member of the expert group sends here."""
        counts = [int((self._local(ids, self.coords.ep) >= 0).any(-1).sum()) for ids in self._shares(layer_idx)]
        return torch.tensor(counts, dtype=torch.int64)

    def _shares(self, layer_idx: int) -> list[Tensor]:
        """Ids of the tokens that each member of the expert group sends from, in the group's order."""
        shares = share_sizes(self.num_tokens, self.layout.tp)
        return [share for dp in self._spanned() for share in self.ids(layer_idx, dp).split(list(shares))]

    def _local(self, ids: Tensor, ep: int) -> Tensor:
        local = ids - ep * self._num_local
        return torch.where((local >= 0) & (local < self._num_local), local, -1)
