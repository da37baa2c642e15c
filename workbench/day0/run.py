"""One acceptance run, step by step; a step that cannot be made leaves its gates unmeasured and the reason in the report."""

from __future__ import annotations

import datetime
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from workbench.base import WorkbenchError, human
from workbench.checkpoint import audit, inspect_checkpoint
from workbench.checkpoint.origin import read_origin
from workbench.cluster import MachineSurvey, default_device, survey_machine
from workbench.day0.gates import GateBook
from workbench.day0.serve import measure_answers
from workbench.day0.verify import measure_parity
from workbench.deployment import Deployment
from workbench.deployment.summary import LoadSummary
from workbench.placement import Layout, check_layout
from workbench.report import Day0Report, SampleAnswer, Section
from workbench.spec import ModelSpec, published_tensors, read_spec
from workbench.view import LoadWatch, bytes_by_role, load_timeline

__all__ = ["run_day0"]

NEEDED_FEATURES = ("fp32 matmul", "bf16 matmul", "attention (sdpa)", "depthwise conv", "nibble unpack")
FP32_SHARE = 0.4  # parity in fp32 is tried where all ranks' weights fit into this share of the memory that is free


@dataclass(kw_only=True)
class Findings:
    """What the steps of one run add to."""

    gates: GateBook = field(default_factory=GateBook)
    sections: list[Section] = field(default_factory=list)
    answers: list[SampleAnswer] = field(default_factory=list)


def run_day0(
    root: Path | str,
    *,
    layout: Layout | None = None,
    precision: str = "mxfp4",
    device: str | None = None,
    max_tokens: int = 4096,
    out: Path | str | None = None,
    say: Callable[[str], None] | None = print,
) -> Day0Report:
    """Accept a checkpoint on the ranks of `layout`, held in `precision`; writes `report.html` and `report.json` to `out`.

    `device`: a device type, or None for the accelerator of this machine, else the CPU. `max_tokens`: cache length of a
    sequence. `say` gets a line per step. Raises ConfigError where the folder describes no model and LayoutError where
    the layout cannot hold it; everything else that goes wrong is in the report.
    """
    root, say, began = Path(root), say or (lambda line: None), time.perf_counter()
    spec = read_spec(root)
    layout = layout or Layout()
    check_layout(spec, layout)
    device = device or default_device()
    found = Findings()

    survey = _survey(found, root, say)
    with _step(found, "checkpoint", say):
        report = audit(root)
        evidence = report.summary()
        found.gates.measured("checkpoint.audit", len(report.errors), evidence=evidence)
        tables = [report.checks_table(), *([report.findings_table()] if report.findings else [])]
        found.sections.append(Section(title="Checkpoint", text=evidence, tables=tuple(tables)))
        say(evidence)
        _inspect(found, root, say)
    place = f"{layout} on {layout.world_size} x {device}"
    if fits := _fp32_fits(spec, layout, device):
        with _step(found, "parity.fp32", say), _step(found, "parity.batch", say):
            say(f"parity in fp32 with the reference: {place}")
            with Deployment.start(root, layout, precision="fp32", device=device, num_slots=4, max_tokens=512) as ranks:
                measure_parity(found.gates, found.sections, ranks, root, precision="fp32", say=say)
    else:
        for prefix in ("parity.fp32", "parity.batch"):
            found.gates.unmeasured(prefix, f"the weights in fp32 do not fit beside the rest: {place}")
    with _step(found, "", say):
        say(f"loading in {precision}: {place}")
        watch = LoadWatch(layout.world_size)
        with Deployment.start(
            root, layout, precision=precision, device=device, max_tokens=max_tokens, on_progress=watch
        ) as ranks:
            _loading(found, ranks, watch, device, say)
            with _step(found, "parity.serving", say):
                measure_parity(found.gates, found.sections, ranks, root, precision=precision, say=say)
            with _step(found, "", say):
                measure_answers(found.gates, found.sections, found.answers, ranks, root, say=say)

    origin = read_origin(root)
    result = Day0Report(
        model=spec.architecture,
        checkpoint=str(root),
        weights_kind="dummy" if origin.is_dummy else "real",
        weights_note=origin.note,
        gates=found.gates.close(),
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        hardware=_hardware(survey, device),
        versions={} if survey is None else survey.versions.to_json(),
        machine={} if survey is None else survey.to_json(),
        environment={
            "layout": str(layout),
            "ranks": layout.world_size,
            "precision": precision,
            "device": device,
            "parity in fp32": "run" if fits else "not run: does not fit",
            "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        },
        answers=tuple(found.answers),
        sections=tuple(found.sections),
        seconds=time.perf_counter() - began,
    )
    say("")
    say(result.render())
    if out is not None:
        page, record = result.write(out)
        say(f"report: {page} and {record}")
    return result


@contextmanager
def _step(found: Findings, prefix: str, say: Callable[[str], None]) -> Iterator[None]:
    """Gates of this step that have no value when it fails keep the error as their reason."""
    try:
        yield
    except WorkbenchError as error:
        found.gates.unmeasured(prefix, f"{type(error).__name__}: {error}")
        say(f"{type(error).__name__}: {error}")


def _survey(found: Findings, root: Path, say: Callable[[str], None]) -> MachineSurvey | None:
    survey = None
    with _step(found, "device", say):
        say("devices: what this machine has and can do")
        survey = survey_machine(folder=root)
        measured = [device for device in survey.devices if device.features]
        missing = [f"{d.torch_name}: {name}" for d in measured for name in NEEDED_FEATURES if not d.supports(name)]
        if measured:
            evidence = "; ".join(missing) or f"{', '.join(NEEDED_FEATURES)}, each run and its numbers checked"
            found.gates.measured("device.features", len(missing), evidence=evidence)
        found.sections.append(Section(title="Machine", tables=survey.tables()))
    return survey


def _inspect(found: Findings, root: Path, say: Callable[[str], None]) -> None:
    report = inspect_checkpoint(root)
    counts = report.counts
    text = (
        f"{counts.num_params:,} parameters, {counts.active_params:,} active per token, "
        f"{human(counts.weight_bytes, 'B')} of weights, {counts.kv_bytes_per_token:,} cache bytes per token, "
        f"{counts.state_bytes_per_sequence:,} state bytes per sequence"
    )
    found.sections.append(Section(title="Model", text=text, charts=(bytes_by_role(counts.bytes_by_role),)))
    say(text)


def _loading(found: Findings, ranks: Deployment, watch: LoadWatch, device: str, say: Callable[[str], None]) -> None:
    summary = LoadSummary.of(ranks.reports)
    table = summary.table()
    found.gates.measured("loading.rows", summary.rows_missing, evidence=f"ledgers of {len(ranks.reports)} ranks")
    found.gates.measured(
        "loading.read_ratio",
        summary.read_ratio,
        evidence=f"{summary.bytes_read:,} bytes read, {summary.bytes_assigned:,} assigned",
    )
    found.gates.measured(
        "loading.memory",
        summary.memory_excess(on_host=device == "cpu"),
        evidence=f"worst of {len(ranks.reports)} ranks; peak sampled while loading",
    )
    samples = {rank: list(points) for rank, points in watch.samples().items()}
    charts = (load_timeline(samples),) if any(samples.values()) else ()
    found.sections.append(Section(title="Loading", tables=(table,), charts=charts))
    say(table.title)


def _fp32_fits(spec: ModelSpec, layout: Layout, device: str) -> bool:
    """Whether the weights in fp32 are small against free host memory (an accelerator's own memory is not asked: where
    its ranks cannot hold them, loading says so)."""
    needed = 4 * sum(tensor.num_params for tensor in published_tensors(spec))
    replicas = layout.dp if device == "cpu" else 1
    return needed * replicas <= FP32_SHARE * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _hardware(survey: MachineSurvey | None, device: str) -> str:
    if survey is None:
        return f"{platform.processor() or platform.machine()}, used as {device}"
    names = [d.name for d in survey.devices if d.type == device] or [d.name for d in survey.devices]
    label = "CPU only" if device == "cpu" else device
    return f"{names[0]}, {len(names)} device{'s' if len(names) > 1 else ''} ({label})"
