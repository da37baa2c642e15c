"""Does the device run what the model needs? Each operator of the model under its layout, tried there by itself."""

from __future__ import annotations

from collections.abc import Callable

from workbench.day0.gates import GateBook
from workbench.day0.prompts import draw_pictures
from workbench.operators import STATUSES, Coverage, Inventory, Workload, probe_operators
from workbench.operators.trace import trace_inventory, trace_vision
from workbench.placement import Layout
from workbench.report import Section
from workbench.serving import ImageProcessor
from workbench.spec import ModelSpec

__all__ = ["measure_coverage"]

PROMPT_TOKENS = 96  # more than one chunk of linear attention, and no multiple of it
NUM_SEQUENCES = 2
PROBE_SECONDS = 60.0  # of one operator; most take a few milliseconds


def measure_coverage(
    gates: GateBook,
    sections: list[Section],
    spec: ModelSpec,
    layout: Layout,
    *,
    precision: str,
    device: str,
    say: Callable[[str], None],
) -> None:
    """Trace a prefill, a decode step and a picture, and try each operator they need once per dtypes on `device`.

    The gate counts operators by name that are missing, fail, fall back to the host, are off by more than rounding or
    could not be tried. Raises what tracing and probing raise.
    """
    inventories = _inventories(spec, layout, precision)
    coverage = probe_operators(inventories, device, roofline=False, each_shape=False, time_limit_s=PROBE_SECONDS)
    lines = _gap_lines(coverage)
    num_operators = len({result.use.name for result in coverage.results})
    tried = f"{num_operators} operators in {len(coverage.results)} kinds of dtypes tried on {device}"
    evidence = "; ".join(lines) or f"{tried}: each there, on the device, right within rounding"
    gates.measured("operators.coverage", len(lines), evidence=evidence)
    passes = f"What a rank of {layout} runs in a prefill, a decode step" + (" and a picture" if spec.vision else "")
    text = f"{passes}, traced from the model itself; {tried}, each against float64 on the host."
    sections.append(Section(title="Operators", text=text, tables=coverage.tables()))
    say(f"operators: {tried}" + "".join(f"\n  {line}" for line in lines))


def _inventories(spec: ModelSpec, layout: Layout, precision: str) -> list[Inventory]:
    tokens = min(PROMPT_TOKENS, spec.max_context - 1)
    workloads = (
        Workload(phase="prefill", num_sequences=NUM_SEQUENCES, new_tokens=tokens),
        Workload(phase="decode", num_sequences=NUM_SEQUENCES, context=tokens),
    )
    found = [
        trace_inventory(spec, layout, workload, stage=stage, precision=precision)
        for workload in workloads
        for stage in range(layout.pp)
    ]
    if spec.vision is not None and spec.image is not None:
        grid = ImageProcessor(spec.image).process(draw_pictures()[0]).grid
        found.append(trace_vision(spec, layout, grid, precision=precision))
    return found


def _gap_lines(coverage: Coverage) -> list[str]:
    """One line per operator: its name, what is wrong with it, and the words of its worst case."""
    worst = {gap.use.name: gap for gap in sorted(coverage.gaps, key=lambda gap: STATUSES.index(gap.status))}
    return [f"{name} {gap.status}: {gap.detail}" for name, gap in sorted(worst.items())]
