"""Which weight format a device can really expand: formats differ from chip to chip, so the choice is made by trying."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from workbench.base import LayoutError, Table, UnsupportedModelError
from workbench.operators.coverage import Coverage
from workbench.operators.inventory import Inventory, Workload
from workbench.operators.probe import probe_operators
from workbench.placement import Layout

if TYPE_CHECKING:
    from workbench.spec import ModelSpec

__all__ = ["PREFERENCE", "FormatChoice", "FormatTrial", "choose_precision"]

# The published form first, then what stays closest to it in less than 16 bits, then what needs no expansion at all.
PREFERENCE = ("mxfp4", "fp8", "int8", "int4", "bf16")
PROBED = Workload(phase="decode", num_sequences=1, context=0)

Probe = Callable[[Inventory, str], Coverage]


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatTrial:
    precision: str
    is_supported: bool
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"precision": self.precision, "is_supported": self.is_supported, "reason": self.reason}


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatChoice:
    """`precision` is the first of `trials` that `device` supports; those after it were not tried."""

    device: str
    precision: str
    trials: tuple[FormatTrial, ...]

    def to_json(self) -> dict[str, Any]:
        trials = [trial.to_json() for trial in self.trials]
        return {"device": self.device, "precision": self.precision, "trials": trials}

    def table(self) -> Table:
        rows = tuple((t.precision, "works" if t.is_supported else "no", t.reason or None) for t in self.trials)
        title = f"Weight formats on {self.device}: {self.precision}"
        return Table(title=title, columns=("format", "device", "why"), rows=rows)

    def render(self) -> str:
        return self.table().render()

    def _repr_html_(self) -> str:
        return self.table().to_html()


def choose_precision(
    spec: ModelSpec,
    layout: Layout,
    device: str,
    *,
    wanted: Sequence[str] = PREFERENCE,
    probe: Probe | None = None,
) -> FormatChoice:
    """The first of `wanted` whose weights `device` expands rightly and by itself, every operator of it tried there.

    A format counts only if each operator that takes its weights apart, and each matrix product, runs on the device;
    one that falls back to the host is no path. `probe(inventory, device)` tries them, by default in child processes.
    Raises UnsupportedModelError with the reason for each format where none works.
    """
    from workbench.operators.trace import trace_inventory

    try_all = probe or (lambda inventory, where: probe_operators(inventory, where, roofline=False))
    trials: list[FormatTrial] = []
    for precision in wanted:
        try:
            inventory = trace_inventory(spec, layout, PROBED, precision=precision)
        except LayoutError as error:  # a matrix cut inside a group of columns
            trials.append(FormatTrial(precision=precision, is_supported=False, reason=str(error)))
            continue
        needed = tuple(u for u in inventory.operators if u.category in ("dequantise", "gemm", "grouped_gemm"))
        coverage = try_all(replace(inventory, operators=needed), device)
        gaps = [f"{gap.use.name} {gap.status}: {gap.detail}" for gap in coverage.gaps]
        reason = "; ".join(gaps[:2]) + (f"; and {len(gaps) - 2} more" if len(gaps) > 2 else "")
        trials.append(FormatTrial(precision=precision, is_supported=coverage.ok, reason=reason))
        if coverage.ok:
            return FormatChoice(device=device, precision=precision, trials=tuple(trials))
    raise UnsupportedModelError(
        f"no weight format of this model has a path on {device}",
        found="; ".join(f"{trial.precision}: {trial.reason}" for trial in trials),
        next_step="Give the device's plug-in the operators named above, or choose another device",
    )
