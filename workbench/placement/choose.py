"""A sensible layout where nobody asked for one: by divisibility alone, without a cost model."""

from __future__ import annotations

from workbench.base import LayoutError
from workbench.placement.layout import MAX_RANKS, Layout
from workbench.placement.table import check_layout
from workbench.spec import ModelSpec, MoESpec

__all__ = ["choose_layout"]

SHOWN = 8


def choose_layout(spec: ModelSpec, num_ranks: int) -> Layout:
    """Layout that uses all `num_ranks`: the widest tensor parallelism that divides the model, the rest as pipeline.

    Experts are spread whole over the tensor-parallel ranks where their number allows it. Raises LayoutError with the
    reason for every candidate where none fits.
    """
    if not 1 <= num_ranks <= MAX_RANKS:
        raise LayoutError("not a number of ranks", found=num_ranks, expected=f"1 to {MAX_RANKS}")
    has_experts = any(isinstance(layer.ffn, MoESpec) for layer in spec.layers)
    reasons: list[str] = []
    for tp in (n for n in range(num_ranks, 0, -1) if num_ranks % n == 0):
        for ep in (tp, 1) if has_experts and tp > 1 else (1,):
            layout = Layout(tp=tp, pp=num_ranks // tp, ep=ep)
            try:
                check_layout(spec, layout)
            except LayoutError as error:
                reasons.append(f"{layout}: {error.message}")
            else:
                return layout
    more = f"; and {len(reasons) - SHOWN} more" if len(reasons) > SHOWN else ""
    raise LayoutError(f"no layout of {num_ranks} ranks divides this model: " + "; ".join(reasons[:SHOWN]) + more)
