"""How serving engines differ in what they place where: the same layout does not cost the same memory everywhere.

The placement table is this project's own. Another engine's rules are stated here as differences from it, each with its
origin, so that its memory can be predicted and compared with what its users report.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from workbench.placement import Layout
from workbench.spec import KV_DTYPES, KV_SCALE_BYTES

if TYPE_CHECKING:
    from workbench.planner.weights import StoredParam

__all__ = ["ENGINES", "SGLANG", "VLLM", "WORKBENCH", "Engine"]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """`expert_width_unit`: one rank's slice of an expert is padded to a multiple of this many inner rows.

    `replicated`: parameters (by the end of their name) that every rank of a tp group holds whole.
    `slices_experts_over_dp`: without expert parallelism an expert is cut over all tp * dp ranks of a stage, where the
    table of this project keeps a whole set of experts per replica.
    `fills_pipeline`: sequences are divided into as many groups as there are stages, so that all stages work; without
    it one step passes through the stages one after another.
    `kv_dtypes`: storage of cached rows that it offers beyond the activation dtype; `kv_scale_bytes` of each row of one
    byte a value.
    """

    name: str
    version: str = ""
    expert_width_unit: int = 1
    replicated: tuple[str, ...] = ()
    slices_experts_over_dp: bool = False
    fills_pipeline: bool = False
    kv_dtypes: tuple[str, ...] = ("auto",)
    kv_scale_bytes: int = 0
    origin: dict[str, str] = field(default_factory=dict)

    def local_shape(self, param: StoredParam, shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
        """Shape on one rank, from that of the placement table."""
        if param.name.endswith(self.replicated) and self.replicated:
            return param.shape
        if not param.is_expert or self is WORKBENCH:
            return shape
        # (experts, rows, columns); the inner width is dim 1 of w1 and w3, dim 2 of w2
        dim = 2 if param.name.endswith("w2.weight") else 1
        local = list(shape)
        if self.slices_experts_over_dp and layout.ep == 1:
            local[dim] = -(-local[dim] // layout.dp)
        local[dim] = -(-local[dim] // self.expert_width_unit) * self.expert_width_unit
        return tuple(local)


WORKBENCH = Engine(name="workbench", kv_dtypes=KV_DTYPES, kv_scale_bytes=KV_SCALE_BYTES)

VLLM = Engine(
    name="vllm",
    version="0.28",
    expert_width_unit=128,
    replicated=("ffn.latent_out.weight",),
    slices_experts_over_dp=True,
    fills_pipeline=True,
    kv_dtypes=("auto", "fp8"),
    origin={
        "expert_width_unit": "inferred: explains 120.5 GB of experts per GPU as reported at TP16 (192 -> 256)",
        "replicated": "inferred: with it TP16, TP8xPP2 and TP8xDP2 on H200 come out as reported",
    },
)

SGLANG = Engine(
    name="sglang",
    version="0.5",
    fills_pipeline=True,
    kv_dtypes=("auto", "fp8"),
    origin={"fills_pipeline": "its pipeline scheduler keeps one micro-batch per stage in flight"},
)

ENGINES = {engine.name: engine for engine in (WORKBENCH, VLLM, SGLANG)}
