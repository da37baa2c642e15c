"""What one pipeline stage hands to the next: the saved block sums and the running sum of every token.

Both neighbours know the shape beforehand: a boundary carries (1 + saved, T, D), where `saved` counts the vectors that
the layers before it have put aside, so it grows from boundary to boundary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.base import LayoutError
from workbench.parallel.mesh import RankContext
from workbench.placement import Layout
from workbench.spec import ModelSpec

__all__ = ["Pipeline", "payload_vectors"]


def payload_vectors(spec: ModelSpec, layout: Layout, stage: int) -> int:
    """Vectors per token that stage `stage` receives; 0 for the first stage, which receives nothing."""
    if stage == 0:
        return 0
    first_layer = layout.stage_layers(spec.num_layers)[stage].start
    return 1 + (spec.residual.num_saved(first_layer) if spec.residual is not None else 0)


class Pipeline:
    """Payload exchange of one rank with the neighbour stages of the same dp and tp coordinates.

    A batch without tokens sends nothing: both sides know it from their batch.
    """

    def __init__(self, spec: ModelSpec, ctx: RankContext, dtype: torch.dtype) -> None:
        self.ctx, self.dtype, self.width = ctx, dtype, spec.hidden_size
        self.vectors_in = payload_vectors(spec, ctx.layout, ctx.coords.pp)
        self.vectors_out = 0 if ctx.is_last_stage else payload_vectors(spec, ctx.layout, ctx.coords.pp + 1)

    def receive(self, num_tokens: int) -> Tensor | None:
        """Payload (1 + saved, T, D) from the stage before; None on the first stage."""
        return None if self.ctx.is_first_stage else self._receive(self.vectors_in, num_tokens, -1)

    def send(self, payload: Tensor) -> None:
        """Payload to the stage after. Raises LayoutError for a payload of another shape or dtype than it expects."""
        expected = (self.vectors_out, payload.shape[1], self.width)
        if tuple(payload.shape) != expected or payload.dtype != self.dtype:
            raise LayoutError(
                f"payload of stage {self.ctx.coords.pp}",
                found=f"{payload.dtype} {tuple(payload.shape)}",
                expected=f"{self.dtype} {expected}",
            )
        self._send(payload.detach(), +1)

    def send_gradient(self, grad: Tensor) -> None:
        """Gradient of the received payload, back to the stage before."""
        self._send(grad, -1)

    def receive_gradient(self, num_tokens: int) -> Tensor:
        """Gradient of the payload that was sent, from the stage after."""
        return self._receive(self.vectors_out, num_tokens, +1)

    def _send(self, x: Tensor, step: int) -> None:
        if x.numel():
            self.ctx.pp.send(x, self.ctx.coords.pp + step)

    def _receive(self, vectors: int, num_tokens: int, step: int) -> Tensor:
        shape = (vectors, num_tokens, self.width)
        if not num_tokens:
            return torch.empty(shape, dtype=self.dtype, device=self.ctx.device)
        return self.ctx.pp.receive(shape, self.dtype, self.ctx.device, self.ctx.coords.pp + step)
