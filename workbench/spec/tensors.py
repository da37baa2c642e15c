"""One tensor of a published checkpoint, and the place in the model it belongs to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from workbench.base import num_bytes

__all__ = ["Part", "Role", "TensorSpec"]

Role = Literal[
    "embedding",
    "head",
    "norm",
    "residual_mix",
    "kda",
    "mla",
    "dense_ffn",
    "router",
    "latent_projection",
    "shared_expert",
    "routed_expert",
    "vision",
    "projector",
]

Part = Literal["weight", "weight_packed", "weight_scale"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """A published tensor: `name`, `shape`, `dtype` as they must stand in the files.

    `param` is the canonical parameter of the model that it fills (see `nn`): "layers.3.mixer.q_a_proj.weight".
    Routed experts are stacked in the model: expert `expert` fills row `expert` of dimension 0 of `param`.
    `part` says which piece of a quantised matrix this is; "weight" for plain tensors.
    `used_rows`: only the first so many entries of dim 0 carry meaning and the stored tensor may be longer with a tail
    of zeros (K3 stores `A_log` for 128 heads and has 96). Its `shape` is then a default that headers may override.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role
    param: str
    layer: int | None = None
    expert: int | None = None
    part: Part = "weight"
    used_rows: int | None = None

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.dtype, self.shape)

    @property
    def num_params(self) -> int:
        """Weights this tensor stands for: two per packed byte, none for a scale."""
        if self.part == "weight_scale":
            return 0
        return math.prod(self.shape) * (2 if self.part == "weight_packed" else 1)
