"""One tensor of a published checkpoint, and the place in the model it belongs to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from workbench.base import num_bytes
from workbench.spec.storage import SchemeName

__all__ = ["Part", "Role", "TensorSpec"]

Role = Literal[
    "embedding",
    "head",
    "norm",
    "residual_mix",
    "kda",
    "mla",
    "gqa",
    "delta_net",
    "compressed_attention",
    "indexer",
    "streams",
    "draft",
    "dense_ffn",
    "router",
    "latent_projection",
    "shared_expert",
    "routed_expert",
    "vision",
    "projector",
]

Part = Literal[
    "weight",
    "bias",
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "weight_global_scale",
    "weight_shape",
    "input_scale",
    "input_global_scale",
    "scale",
    "blocks",
    "scales",
    "qweight",
    "qzeros",
    "g_idx",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """A published tensor: `name`, `shape`, `dtype` as they must stand in the files.

    `param` is the canonical parameter of the model that it fills (see `nn`): "layers.3.mixer.q_a_proj.weight".
    Routed experts are stacked in the model: expert `expert` fills row `expert` of dimension 0 of `param`.
    `part` says which piece of a quantised matrix this is; "weight" for plain tensors.
    `used_rows`: only the first so many entries of dim 0 carry meaning and the stored tensor may be longer with a tail
    of zeros (K3 stores `A_log` for 128 heads and has 96). Its `shape` is then a default that headers may override.

    A fused tensor holds the matrices of `num_stacked` experts along dim 0, and where `also_fills` is given those of
    several parameters, one behind another along its rows, or row by row in turns (`is_interleaved`). `is_transposed`:
    stored (columns, rows). These are declared by the family: two equal dimensions would hide a wrong guess.

    `scheme` and `group_size`: of a piece of a quantised matrix, as the rules of the config declare them.
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
    weights: int | None = None  # parameters that a quantised piece stands for; None: by shape
    num_stacked: int | None = None
    also_fills: tuple[str, ...] = ()
    is_transposed: bool = False
    is_interleaved: bool = False
    scheme: SchemeName | None = None
    group_size: int = 1

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.dtype, self.shape)

    @property
    def is_quantised(self) -> bool:
        """Whether this is a piece of a quantised matrix rather than a plain tensor."""
        return self.weights is not None or self.part not in ("weight", "bias")

    @property
    def num_params(self) -> int:
        """Weights this tensor stands for: two per packed byte, none for a scale."""
        if self.weights is not None:
            return self.weights
        if self.part == "weight_scale":
            return 0
        return math.prod(self.shape) * (2 if self.part == "weight_packed" else 1)
