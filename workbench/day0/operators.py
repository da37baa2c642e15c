"""Does the device run what the model needs? Each operator of the model under its layout, tried there by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workbench.day0.gates import GateBook
from workbench.day0.prompts import draw_pictures
from workbench.operators import STATUSES, Coverage, Inventory, Workload, probe_operators
from workbench.operators.probe import PROBE_COMMAND
from workbench.operators.trace import trace_inventory, trace_vision
from workbench.placement import Layout
from workbench.report import Gate, Section
from workbench.serving import ImageProcessor
from workbench.spec import ModelSpec

__all__ = ["judge_coverage", "measure_coverage"]

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
    command: Sequence[str] = PROBE_COMMAND,
) -> None:
    """Trace a prefill, a decode step and a picture, and try each operator they need once per dtypes on `device`.

    The gate counts operators by name that are missing, fail, fall back to the host, are off by more than rounding or
    could not be tried. `command` starts the child process that tries them. Raises what tracing and probing raise.
    """
    inventories = _inventories(spec, layout, precision)
    coverage = probe_operators(
        inventories, device, roofline=False, each_shape=False, time_limit_s=PROBE_SECONDS, command=command
    )
    tried = _tried(coverage, "kinds of dtypes")
    judge_coverage(gates, coverage, each="kinds of dtypes")
    passes = f"What a rank of {layout} runs in a prefill, a decode step" + (" and a picture" if spec.vision else "")
    text = f"{passes}, traced from the model itself; {tried}, each against float64 on the host."
    sections.append(Section(title="Operators", text=text, tables=coverage.tables()))
    say(f"operators: {tried}" + "".join(f"\n  {line}" for line in _gap_lines(coverage)))


def judge_coverage(gates: GateBook, coverage: Coverage, *, each: str = "shapes") -> Gate:
    """Enter the gate `operators.coverage`: the number of operators, by name, with a gap of any kind, each as evidence.

    `each` says what an operator was tried with. Raises ValueError where the gate has its value already.
    """
    lines = _gap_lines(coverage)
    evidence = "; ".join(lines) or f"{_tried(coverage, each)}: each there, on the device, right within rounding"
    return gates.measured("operators.coverage", len(lines), evidence=evidence)


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


def _tried(coverage: Coverage, each: str) -> str:
    num_operators = len({result.use.name for result in coverage.results})
    return f"{num_operators} operators in {len(coverage.results)} {each} tried on {coverage.device}"


def _gap_lines(coverage: Coverage) -> list[str]:
    """One line per operator: its name, what is wrong with it, and the words of its worst case."""
    worst = {gap.use.name: gap for gap in sorted(coverage.gaps, key=lambda gap: STATUSES.index(gap.status))}
    return [f"{name} {gap.status}: {gap.detail}" for name, gap in sorted(worst.items())]
