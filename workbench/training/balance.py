"""Keeping experts equally busy without an auxiliary loss: the router's correction bias follows the measured load.

The bias joins the scores for choosing experts only, so it moves tokens between experts and adds no gradient. After each
step, with load_e the tokens that chose expert e and m their mean,

    bias_e <- bias_e + rate * clamp((m - load_e) / m, -1, 1),      then the mean bias is taken off

which is the sign rule far from balance, and settles near it. Source: Wang et al., "Auxiliary-loss-free load balancing
strategy for mixture-of-experts", arXiv 2408.15664.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workbench.nn.moe import MoE, Router
from workbench.parallel import RankContext

__all__ = ["ExpertLoad", "LoadMeter", "balanced_bias"]


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """How tokens of one layer spread over its experts; `counts[e]` tokens chose expert e."""

    layer: int
    counts: tuple[int, ...]

    @property
    def max_over_mean(self) -> float:
        """1 where all experts are equally busy; the number of experts over top-k where all tokens choose the same."""
        total = sum(self.counts)
        return max(self.counts) * len(self.counts) / total if total else 1.0

    @property
    def dead(self) -> tuple[int, ...]:
        """Experts that no token chose."""
        return tuple(expert for expert, count in enumerate(self.counts) if count == 0)


class LoadMeter:
    """Counts which experts the routers of a model choose, over all passes since the last `reset`."""

    def __init__(self, model: nn.Module) -> None:
        self.routers: dict[int, Router] = {}
        self._counts: dict[int, Tensor] = {}
        self._handles = []
        for name, module in model.named_modules():
            if isinstance(module, MoE):
                layer = int(name.split(".")[1])
                self.routers[layer] = module.router
                self._handles.append(module.router.register_forward_hook(self._counter(layer)))
        self.reset()

    def reset(self) -> None:
        self._counts = {
            layer: torch.zeros(len(router.weight), dtype=torch.int64, device=router.weight.device)
            for layer, router in self.routers.items()
        }

    def close(self) -> None:
        """Stop counting."""
        for handle in self._handles:
            handle.remove()

    def loads(self, ctx: RankContext | None = None) -> tuple[ExpertLoad, ...]:
        """Of the layers of this rank's stage, summed over the replicas where a context is given.

        All ranks of a tensor-parallel group see the same tokens and count the same.
        """
        if not self._counts:
            return ()
        counts = torch.cat(list(self._counts.values()))
        if ctx is not None:
            counts = ctx.dp.all_reduce(counts)
        sizes = [len(x) for x in self._counts.values()]
        pieces = counts.split(sizes)
        return tuple(ExpertLoad(layer, tuple(x.tolist())) for layer, x in zip(self._counts, pieces, strict=True))

    @torch.no_grad()
    def update_biases(self, loads: tuple[ExpertLoad, ...], rate: float) -> None:
        """Move every router's bias by what its experts' loads ask for; one without a bias is left to the loss."""
        for load in loads:
            bias = self.routers[load.layer].bias
            if bias is not None:
                bias.copy_(balanced_bias(bias, torch.tensor(load.counts, device=bias.device), rate))

    def _counter(self, layer: int) -> Callable[[nn.Module, object, tuple[Tensor, Tensor]], None]:
        def count(_router: nn.Module, _args: object, output: tuple[Tensor, Tensor]) -> None:
            expert_ids = output[0]
            self._counts[layer] += torch.bincount(expert_ids.flatten(), minlength=len(self._counts[layer]))

        return count


def balanced_bias(bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """(E,) float32 and (E,) -> the next bias. Unchanged where nothing was counted."""
    mean = counts.double().mean()
    if mean == 0:
        return bias
    wanted = ((mean - counts) / mean).clamp(-1, 1).to(bias.dtype)
    moved = bias + rate * wanted
    return moved - moved.mean()
