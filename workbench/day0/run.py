"""One acceptance run, step by step; a step that fails leaves its gates unmeasured, and the reason in the report."""

from __future__ import annotations

import datetime
import platform
import shlex
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from workbench.base import CheckpointError, ConfigError, Table, WorkbenchError, error_text, human
from workbench.checkpoint import inspect_checkpoint, read_origin
from workbench.cluster import MachineSurvey, default_device, host_device, survey_machine
from workbench.day0.advice import Run, next_steps
from workbench.day0.devices import measure_features
from workbench.day0.files import measure_files
from workbench.day0.gates import GateBook, gate_forms
from workbench.day0.load import measure_loading
from workbench.day0.operators import measure_coverage
from workbench.day0.serve import measure_answers
from workbench.day0.verify import measure_parity, start_in_fp32
from workbench.deployment import Deployment
from workbench.exam.trained import is_trained_here
from workbench.placement import Layout, check_layout
from workbench.report import Day0Report, SampleAnswer, Section
from workbench.spec import ModelSpec, published_tensors, read_spec, require_runnable
from workbench.view import LoadWatch, bytes_by_role, terminal_progress

__all__ = ["run_day0"]

FP32_SHARE = 0.4  # parity in fp32 is tried where all ranks' weights fit into this share of the memory that is free
IN_FP32 = ("parity.fp32", "parity.batch")  # the first is also the beginning of parity.fp32_tokens
AFTER_LOADING = ("loading", "parity", "answers", "serving", "latency")  # gates that need a loaded model
DUMMY = "This proves the machinery and accepts no model: its weights were not trained"
LOG_COLUMNS = 120  # width of the gate table where the output is no terminal


@dataclass(kw_only=True)
class Findings:
    """What the steps of one run add to."""

    gates: GateBook
    say: Callable[[str], None]
    sections: list[Section] = field(default_factory=list)
    answers: list[SampleAnswer] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)  # (step, reason)


def run_day0(
    root: Path | str,
    *,
    layout: Layout | None = None,
    precision: str = "mxfp4",
    device: str | None = None,
    max_tokens: int | None = None,
    limits: Mapping[str, float] | None = None,
    out: Path | str | None = None,
    survey: MachineSurvey | None = None,
    published: Path | str | None = None,
    stop_at_fault: bool = False,
    say: Callable[[str], None] | None = print,
) -> Day0Report:
    """Accept a checkpoint on the ranks of `layout`, held in `precision`; writes `report.html` and `.json` to `out`.

    `device`: a device type, or None for the accelerator of this machine, else the CPU. `max_tokens`: cache length of a
    sequence; None takes 4096, or the model's context where that is shorter. `limits`: other thresholds by gate id, such
    as {"latency.first_token": 2.0} (seconds). `survey`: one of this machine that was taken before, features included;
    None takes one now. `published`: another copy, known to be right, that parity is held against: values that are wrong
    in the files agree with themselves. `stop_at_fault` leaves out the steps after a gate that failed. `say` gets a line
    per step; None says nothing. Raises ConfigError where the folder describes no model, `out` cannot be written or a
    limit is unusable, LayoutError where the layout does not divide the model, and CheckpointError for a ghost, which
    holds no weights; everything else that goes wrong is in the report.
    """
    root, began = Path(root), time.perf_counter()
    origin = read_origin(root)
    if origin.is_ghost:  # its zeros agree with themselves: every gate about numbers would pass
        raise CheckpointError(
            "there is nothing to accept: these files hold no weights",
            where=root,
            found=origin.note,
            expected="weights",
            next_step="Rehearse with a ghost (`workbench rehearse`), and accept the checkpoint once it has arrived",
        )
    spec, layout = read_spec(root), layout or Layout()
    require_runnable(spec)
    check_layout(spec, layout)
    published = None if published is None else Path(published)
    if published is not None:
        read_spec(published)
    forms = gate_forms(has_known_answers=is_trained_here(root) and spec.vision is not None)
    found = Findings(gates=GateBook(forms, limits=limits), say=say or (lambda line: None))
    if out is not None:
        _make_folder(Path(out))  # before the work, not after it
    device = default_device() if device in (None, "auto") else device
    fp32 = "run as served" if precision == "fp32" else "run" if _fits_in_fp32(spec, layout, device) else "does not fit"

    survey = _survey(found, root, survey)
    _checkpoint(found, root)
    if fp32 == "does not fit":
        for prefix in IN_FP32:
            reason = f"the weights in fp32 do not fit into the memory that is free: {_place(layout, device)}"
            found.gates.unmeasured(prefix, reason)
    steps: list[tuple[tuple[str, ...], Callable[[], None]]] = [
        (("operators",), partial(_operators, found, spec, layout, precision, device))
    ]
    if fp32 == "run":
        steps.append((IN_FP32, partial(_parity_in_fp32, found, root, layout, device, published)))
    start = partial(
        Deployment.start,
        root,
        layout,
        precision=precision,
        device=device,
        max_tokens=max_tokens or min(4096, spec.max_context),
    )
    serve = partial(_loaded, found, root, start, precision, layout, device, is_shown=bool(say), published=published)
    steps.append((AFTER_LOADING, serve))
    for prefixes, step in steps:
        if stop_at_fault and found.gates.failed:
            for prefix in prefixes:
                found.gates.unmeasured(prefix, f"not asked any more: {found.gates.failed[0]} has failed")
        else:
            step()
    if survey is not None:
        *tables, _ = survey.tables()  # the last one lists the software, which the report shows by itself
        found.sections.append(Section(title="Machine", tables=tuple(tables)))
    if found.failures:
        table = Table(columns=("step", "reason"), rows=tuple(found.failures))
        found.sections.insert(0, Section(title="Steps that failed", tables=(table,)))

    gates = found.gates.close()
    how = Run(
        checkpoint=str(root),
        layout=str(layout),
        precision=precision,
        device=device,
        out=str(out or "out/day0"),
        is_dummy=origin.is_dummy,
        program=_program(),
    )
    result = Day0Report(
        model=spec.architecture,
        checkpoint=str(root),
        weights_kind="dummy" if origin.is_dummy else "real",
        weights_note=origin.note,
        gates=gates,
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        hardware=_hardware(survey, device),
        versions={} if survey is None else survey.versions.to_json(),
        machine={} if survey is None else survey.to_json(),
        environment={
            "layout": str(layout),
            "ranks": layout.world_size,
            "precision": precision,
            "device": device,
            "parity in fp32": fp32,
            **({} if published is None else {"parity held against": str(published)}),
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        },
        answers=tuple(found.answers),
        sections=tuple(found.sections),
        seconds=time.perf_counter() - began,
        next_steps=next_steps(gates, how),
    )
    found.say("")
    found.say(result.render(width=shutil.get_terminal_size((LOG_COLUMNS, 24)).columns))
    if origin.is_dummy:
        found.say(f"{DUMMY} ({origin.note})")
    if out is not None:
        page, record = result.write(out)
        found.say(f"\nreport: {page} and {record}")
    return result


@contextmanager
def _step(found: Findings, name: str, *prefixes: str) -> Iterator[None]:
    """A step that fails ends here: gates under `prefixes` that have no value keep the error as their reason."""
    try:
        yield
    except WorkbenchError as error:
        reason = detail = error_text(error)
    except Exception as error:  # a bug of ours must not cost the report of hours of work; it is shown for what it is
        reason = f"unexpected {error_text(error)}"
        detail = traceback.format_exc()
    else:
        return
    for prefix in prefixes:
        found.gates.unmeasured(prefix, reason)
    found.failures.append((name, detail))
    found.say(f"{name}: {detail}")


def _survey(found: Findings, root: Path, survey: MachineSurvey | None) -> MachineSurvey | None:
    with _step(found, "devices", "device"):
        found.say("devices: what this machine has and can do")
        survey = survey or survey_machine(folder=root)
        measure_features(found.gates, survey.devices)
    return survey


def _checkpoint(found: Findings, root: Path) -> None:
    with _step(found, "audit", "checkpoint"):
        measure_files(found.gates, found.sections, root, say=found.say)
    with _step(found, "inspect"):
        counts = inspect_checkpoint(root).counts
        text = (
            f"{counts.num_params:,} parameters, {counts.active_params:,} active per token, "
            f"{human(counts.weight_bytes, 'B')} of weights, {counts.kv_bytes_per_token:,} cache bytes per token, "
            f"{counts.state_bytes_per_sequence:,} state bytes per sequence"
        )
        found.sections.append(Section(title="Model", text=text, charts=(bytes_by_role(counts.bytes_by_role),)))
        found.say(text)


def _operators(found: Findings, spec: ModelSpec, layout: Layout, precision: str, device: str) -> None:
    with _step(found, "operators", "operators"):
        found.say(f"operators: what a rank needs, tried on {device}")
        measure_coverage(found.gates, found.sections, spec, layout, precision=precision, device=device, say=found.say)


def _parity_in_fp32(found: Findings, root: Path, layout: Layout, device: str, published: Path | None) -> None:
    with _step(found, "parity in fp32", *IN_FP32):
        found.say(f"parity in fp32 with the reference: {_place(layout, device)}")
        with start_in_fp32(root, layout, device) as ranks:
            measure_parity(
                found.gates, found.sections, ranks, root, precision="fp32", published=published, say=found.say
            )


def _loaded(
    found: Findings,
    root: Path,
    start: Callable[..., Deployment],
    precision: str,
    layout: Layout,
    device: str,
    *,
    is_shown: bool,
    published: Path | None,
) -> None:
    """Ranks as they serve, and all that is asked of them; `start` takes a progress callback, which is seen where
    `is_shown`."""
    with _step(found, f"loading in {precision}", *AFTER_LOADING), terminal_progress(layout.world_size) as progress:
        found.say(f"loading in {precision}: {_place(layout, device)}")
        with start(on_progress=progress if is_shown else progress.watch) as ranks:
            _served(found, ranks, root, progress.watch, precision, on_host=device == "cpu", published=published)


def _place(layout: Layout, device: str) -> str:
    return f"{layout} on {layout.world_size} x {device}"


def _served(
    found: Findings,
    ranks: Deployment,
    root: Path,
    watch: LoadWatch,
    precision: str,
    *,
    on_host: bool,
    published: Path | None,
) -> None:
    """Everything that is asked of the model as it is served; `on_host`: its weights stay in host memory."""
    with _step(found, "what loading cost", "loading"):
        measure_loading(
            found.gates, found.sections, ranks.reports, samples=watch.samples(), on_host=on_host, say=found.say
        )
    with _step(found, "parity as served", "parity"):
        measure_parity(
            found.gates,
            found.sections,
            ranks,
            root,
            precision=precision,
            is_served=True,
            published=published,
            say=found.say,
        )
    with _step(found, "answers", "answers", "serving", "latency"):
        measure_answers(found.gates, found.sections, found.answers, ranks, root, say=found.say)


def _fits_in_fp32(spec: ModelSpec, layout: Layout, device: str) -> bool:
    """Whether the weights in fp32 are small against the host memory that is free (an accelerator's own memory is not
    asked: where its ranks cannot hold them, loading says so)."""
    free = host_device().memory_free
    needed = 4 * sum(tensor.num_params for tensor in published_tensors(spec))
    replicas = layout.dp if device == "cpu" else 1
    return free is not None and needed * replicas <= FP32_SHARE * free.value


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"the report cannot be written here: {error.strerror or error}", where=out) from None


def _program() -> str:
    """What the reader types for this command: the path of the script that runs, where a shell would not find it."""
    is_known = Path(sys.argv[0]).name != "workbench" or shutil.which("workbench") is not None
    return "workbench" if is_known else shlex.quote(sys.argv[0])


def _hardware(survey: MachineSurvey | None, device: str) -> str:
    if survey is None:
        return f"{platform.processor() or platform.machine()}, used as {device}"
    names = [d.name for d in survey.devices if d.type == device] or [d.name for d in survey.devices]
    label = "CPU only" if device == "cpu" else device
    return f"{names[0]}, {len(names)} device{'s' if len(names) > 1 else ''} ({label})"
