"""What a model needs under a layout, and what a device makes of it: inventories and coverage in one record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.base import Table
from workbench.operators.coverage import Coverage
from workbench.operators.inventory import Inventory, Workload, distinct_operators
from workbench.operators.probe import probe_operators
from workbench.placement import Layout

if TYPE_CHECKING:
    from workbench.spec import ModelSpec

__all__ = ["OperatorSurvey", "survey_operators"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorSurvey:
    """`inventories` of every stage and workload; `coverage` is None where no device was asked."""

    inventories: tuple[Inventory, ...]
    coverage: Coverage | None

    @property
    def ok(self) -> bool:
        """Whether the device runs every operator; an inventory alone has nothing to fail."""
        return self.coverage is None or self.coverage.ok

    @property
    def operator_names(self) -> tuple[str, ...]:
        """Every operator that is looked up, by name and overload; each lookup happens when the operator is called."""
        return tuple(sorted({use.name for use in distinct_operators(self.inventories)}))

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "operators": list(self.operator_names),
            "inventories": [inventory.to_json() for inventory in self.inventories],
            "coverage": None if self.coverage is None else self.coverage.to_json(),
        }

    def tables(self) -> tuple[Table, ...]:
        tables = [table for inventory in self.inventories for table in inventory.tables()]
        return (*tables, *(() if self.coverage is None else self.coverage.tables()))

    def render(self) -> str:
        return "\n\n".join(table.render() for table in self.tables())

    def _repr_html_(self) -> str:
        return "".join(table.to_html() for table in self.tables())


def survey_operators(
    spec: ModelSpec,
    layout: Layout,
    workloads: Sequence[Workload],
    *,
    precision: str = "bf16",
    image_grid: tuple[int, int, int] | None = None,
    device: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> OperatorSurvey:
    """Inventories of all stages for each workload, and of one image where a patch grid is given; with a `device`
    (torch's name), every distinct operator of them tried there. Raises what tracing and probing raise."""
    from workbench.operators.trace import trace_inventory, trace_vision

    inventories = [
        trace_inventory(spec, layout, workload, stage=stage, precision=precision)
        for workload in workloads
        for stage in range(layout.pp)
    ]
    if image_grid is not None:
        inventories.append(trace_vision(spec, layout, image_grid, precision=precision))
    coverage = None if device is None else probe_operators(inventories, device, progress=progress)
    return OperatorSurvey(inventories=tuple(inventories), coverage=coverage)
