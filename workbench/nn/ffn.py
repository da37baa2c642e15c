"""Dense gated feed-forward block, also used for the shared experts."""

from __future__ import annotations

from torch import Tensor, nn

from workbench.nn.activation import gated_activation
from workbench.nn.linear import Linear, products
from workbench.nn.precision import Precision
from workbench.nn.tensor_parallel import LOCAL, TensorParallel
from workbench.spec import Activation

__all__ = ["GatedFFN"]


class GatedFFN(nn.Module):
    """down(activation(gate x, up x)): (T, D) -> (T, D), the inner width split over tensor-parallel ranks.

    With `is_partial` the output is this rank's share of the sum, for a caller that reduces it together with others.
    """

    def __init__(self, dim: int, width: int, activation: Activation, precision: Precision, *, is_partial: bool = False):
        super().__init__()
        scheme, dtype = precision.projection_scheme, precision.dtype
        self.activation = activation
        self.is_partial = is_partial
        self.gate_proj = Linear(width, dim, scheme=scheme, dtype=dtype)
        self.up_proj = Linear(width, dim, scheme=scheme, dtype=dtype)
        self.down_proj = Linear(dim, width, scheme=scheme, dtype=dtype)
        self.tp: TensorParallel = LOCAL

    def forward(self, x: Tensor) -> Tensor:
        x = self.tp.enter(x)
        y = self.down_proj(gated_activation(self.activation, *products(x, (self.gate_proj, self.up_proj))))
        return y if self.is_partial else self.tp.reduce(y)
