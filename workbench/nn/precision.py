"""What a precision name means: the activation dtype, and which weights are kept in a quantised scheme."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.base import LoadError
from workbench.nn.precision_map import PrecisionMap, read_precision_map
from workbench.nn.quant import SCHEMES, Scheme

__all__ = ["PRECISIONS", "Precision", "as_float"]

PRECISIONS = ("fp32", "bf16", "fp8", "int8", "int4", "mxfp4")
MAP_SUFFIX = ".json"


@dataclass(frozen=True, slots=True)
class Precision:
    """`name` as a user gives it, `dtype` of activations and plain weights.

        name              routed experts   mixer and feed-forward projections   everything else
        fp32, bf16        dense            dense                                dense
        mxfp4             mxfp4            dense                                dense
        fp8, int8, int4   that scheme      that scheme                          dense
        a file, *.json    as its precision map says, module by module           dense

    Never quantised: embedding, head, router, norms, convolutions, the low-rank decay and beta of KDA, kv_b of MLA (it
    is absorbed into queries and outputs), latent projections, vision, projector.
    """

    name: str = "bf16"
    dtype: torch.dtype = torch.bfloat16
    map: PrecisionMap | None = None

    @classmethod
    def parse(cls, name: str, dtype: torch.dtype | None = None) -> Precision:
        """Precision of a name, in float32 for "fp32" and else bfloat16 unless `dtype` says otherwise.

        Raises LoadError for an unknown name, ConfigError for a file that is no precision map.
        """
        if name.endswith(MAP_SUFFIX):
            return cls(name, dtype or torch.bfloat16, read_precision_map(name))
        if name not in PRECISIONS:
            raise LoadError(f"unknown precision {name!r}", expected=f"one of {', '.join(PRECISIONS)}, or a *.json map")
        return cls(name, dtype or (torch.float32 if name == "fp32" else torch.bfloat16))

    @property
    def expert_scheme(self) -> Scheme | None:
        return SCHEMES.get(self.name)

    @property
    def projection_scheme(self) -> Scheme | None:
        return None if self.name == "mxfp4" else SCHEMES.get(self.name)


def as_float(x: Tensor) -> Tensor:
    """`x` in float32 for arithmetic that must not round to 16 bits; float64 stays float64 (reference runs)."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
