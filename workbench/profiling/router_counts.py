"""Tokens by expert and layer on one rank, counted where its routers choose."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workbench.nn.router import Router

__all__ = ["RouterCounts"]


class RouterCounts:
    """Counts the choices of all routers of a model from now on, until `close`.

    The counts stay on the routers' device, and nothing waits for them before they are read.
    """

    def __init__(self, model: nn.Module) -> None:
        self._counts: dict[int, Tensor] = {}
        self._handles = []
        for name, module in model.named_modules():
            if isinstance(module, Router):
                layer = int(name.split(".")[1])
                self._counts[layer] = torch.zeros(
                    module.spec.num_experts, dtype=torch.int64, device=module.weight.device
                )
                hook = module.register_forward_hook(lambda _m, _a, out, layer=layer: self._chosen(layer, out[0]))
                self._handles.append(hook)

    def read(self) -> dict[int, tuple[int, ...]]:
        """Layer -> choices of each of its experts."""
        return {layer: tuple(counts.tolist()) for layer, counts in self._counts.items()}

    def close(self) -> None:
        """Stop counting; what was counted can still be read."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _chosen(self, layer: int, ids: Tensor) -> None:
        chosen = ids.flatten()
        # Not bincount, which waits for the device to learn how large its result is.
        self._counts[layer].scatter_add_(0, chosen, torch.ones_like(chosen))
