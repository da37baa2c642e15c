"""What a topology is made of: devices, links between two of them, fabrics that stand for many, what was tried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from workbench.base import Quantity
from workbench.cluster.cost import LinkCost, Operation

__all__ = ["SHORT_NAMES", "AlgorithmChoice", "CollectiveSupport", "Fabric", "PairLink", "TopologyDevice"]

# What torch and the files call a number format, by the short name that figures are kept under.
SHORT_NAMES = {
    "float64": "fp64",
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "float4_e2m1fn_x2": "mxfp4",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TopologyDevice:
    """One rank's device. `matmul` holds dense FLOP/s by short name ("bf16", "fp8", "mxfp4", ...); `formats` are the
    number formats the device multiplies in; `reserved_share` of its memory is kept by runtime and allocator. Figures
    that are not known are None or absent."""

    rank: int
    host: str
    name: str
    device_type: str
    memory_total: Quantity | None = None
    memory_bandwidth: Quantity | None = None
    matmul: Mapping[str, Quantity] = field(default_factory=dict)
    formats: tuple[str, ...] = ()
    reserved_share: Quantity | None = None

    def matmul_rate(self, dtype: str) -> Quantity | None:
        """Dense FLOP/s in a format, by short ("bf16") or torch ("bfloat16") name; None where it is not known."""
        return self.matmul.get(SHORT_NAMES.get(dtype, dtype))


@dataclass(frozen=True, kw_only=True, slots=True)
class PairLink:
    """What one message from rank `a` to rank `b` costs, and the way back."""

    a: int
    b: int
    cost: LinkCost


@dataclass(frozen=True, kw_only=True, slots=True)
class Fabric:
    """What links devices for which no pair is listed: `cost` is what one device sends in all, `kind` how it is shared.

    A "switch" gives any one peer the whole of it; in a "mesh" of `size` devices each peer has its own 1 / (size - 1).
    """

    cost: LinkCost
    kind: Literal["switch", "mesh"] = "switch"
    size: int = 1

    def pair(self) -> LinkCost:
        return self._with_share(1)

    def of_group(self, size: int) -> LinkCost:
        """What one device of a group of that many can send to the others of it together."""
        return self._with_share(size - 1)

    def _with_share(self, num_peers: int) -> LinkCost:
        if self.kind == "switch" or self.size <= 2:
            return self.cost
        share = min(1.0, num_peers / (self.size - 1))
        return LinkCost(alpha=self.cost.alpha, bandwidth=self.cost.bandwidth * share)


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveSupport:
    """Whether an operation gave right numbers in a dtype (torch's name); `detail` is the backend's words where not."""

    operation: Operation
    dtype: str
    is_supported: bool
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgorithmChoice:
    """Several ways to the same result over the same ranks, each measured: none is better because it is special.

    `candidates` are (name, cost); the first is the one this package runs.
    """

    operation: Operation
    ranks: tuple[int, ...]
    dtype: str
    candidates: tuple[tuple[str, LinkCost], ...]

    def best(self, num_bytes: float) -> str:
        """The candidate that takes the least time for `num_bytes` of one rank."""
        return min(self.candidates, key=lambda item: item[1].time(num_bytes).value)[0]
