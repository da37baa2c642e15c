"""Inventories of operators for many layouts, each traced once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from workbench.placement import Layout
from workbench.planner.objective import Objective
from workbench.spec import ModelSpec

if TYPE_CHECKING:
    from workbench.operators.inventory import Inventory

__all__ = ["InventoryBook", "TraceInventory"]

# (spec, layout, workload, stage=..., precision=...) -> Inventory, as `operators.trace_inventory`
TraceInventory = Callable[..., "Inventory"]


class InventoryBook:
    """Asks `trace` for the inventories that a plan needs and keeps the answers."""

    def __init__(
        self, spec: ModelSpec, trace: TraceInventory | None = None, trace_vision: TraceInventory | None = None
    ) -> None:
        if trace is None:
            from workbench.operators import trace as tracing

            trace, trace_vision = tracing.trace_inventory, trace_vision or tracing.trace_vision
        self.spec, self._trace, self._trace_vision = spec, trace, trace_vision
        self._known: dict[tuple[object, ...], Inventory] = {}

    def decode(self, layout: Layout, precision: str, *, sequences: int, context: int) -> list[Inventory]:
        """Every stage of one decode step."""
        return self._stages(layout, precision, "decode", sequences, 1, context)

    def prefill(self, layout: Layout, precision: str, objective: Objective) -> list[Inventory]:
        """Every stage of one chunk of a prompt, in the middle of it: the average chunk, since work grows evenly."""
        before = (objective.num_chunks - 1) * objective.chunk // 2
        return self._stages(layout, precision, "prefill", 1, objective.chunk, before)

    def fullest_prefill(self, layout: Layout, precision: str, objective: Objective) -> list[Inventory]:
        """Every stage of the last chunk of a prompt that fills the context: where activations are largest."""
        chunk = min(objective.chunk_tokens, objective.context)
        return self._stages(layout, precision, "prefill", 1, chunk, objective.context - chunk)

    def vision(self, layout: Layout, precision: str, grid: tuple[int, int, int]) -> Inventory | None:
        """One picture of `grid` (frames, rows, columns of patches) through the tower; None without one."""
        if self.spec.vision is None or self._trace_vision is None:
            return None
        key = ("vision", layout.tp, precision, grid)
        if key not in self._known:
            self._known[key] = self._trace_vision(self.spec, layout, grid, precision=precision)
        return self._known[key]

    def _stages(
        self, layout: Layout, precision: str, phase: str, sequences: int, new: int, context: int
    ) -> list[Inventory]:
        from workbench.operators.inventory import Workload

        workload = Workload(phase=phase, num_sequences=sequences, new_tokens=new, context=context)  # type: ignore[arg-type]
        found = []
        for stage in range(layout.pp):
            key = (layout, stage, precision, workload)
            if key not in self._known:
                self._known[key] = self._trace(self.spec, layout, workload, stage=stage, precision=precision)
            found.append(self._known[key])
        return found
