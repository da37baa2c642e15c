"""Tries every distinct operator of some inventories on a device, each in a child process with a time limit."""

from __future__ import annotations

import datetime
import json
import math
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from workbench.base import DeploymentError, Quantity
from workbench.cluster.probe import ProbeResult, run_probe
from workbench.operators.coverage import Coverage, OperatorResult, Roofline
from workbench.operators.inventory import Inventory, OperatorUse, distinct_operators

__all__ = ["PROBE_COMMAND", "measure_roofline", "probe_operators"]

PROBE_COMMAND = (sys.executable, "-m", "workbench.operators.child")
OPERATOR_SECONDS = 60.0
MAX_CHECK_BYTES = 64 << 20  # of the call that speaks for its kind
BATCH = 256  # operators per child: progress is told, and a child that leaks is soon replaced


def probe_operators(
    inventories: Inventory | Sequence[Inventory],
    device: str = "cpu",
    *,
    time_limit_s: float = OPERATOR_SECONDS,
    roofline: bool = True,
    each_shape: bool = True,
    cold_weights: bool = False,
    at_once: int = 1,
    command: Sequence[str] = PROBE_COMMAND,
    progress: Callable[[int, int], None] | None = None,
) -> Coverage:
    """What `device` (torch's name, "cpu" or "type:0") makes of every distinct operator of the inventories.

    Views are tried once per operator and dtypes, everything else at each of its shapes. An operator that hangs or takes
    its child down has failed, and the rest goes on. With `roofline` the limits of the device are measured first.
    Without `each_shape` one call speaks for each operator and dtypes, the largest of at most 64 MiB, and none is timed.
    How fast an operator is inside a pass: with `cold_weights` each call meets weights that were last used as many bytes
    ago as the pass reads; `at_once` children try the same side by side, as ranks do that share a machine, and the mean
    of their times counts.

    `progress(done, total)` is called as answers come in. Raises DeploymentError where the child does not start at all.
    """
    group = (inventories,) if isinstance(inventories, Inventory) else tuple(inventories)
    distinct = distinct_operators(group)
    uses = _to_try(distinct) if each_shape else _one_of_each(distinct)
    dtypes = list(dict.fromkeys(use.input_dtypes[0] for use in uses if use.flops))
    limits = measure_roofline(device, dtypes, command=command, time_limit_s=time_limit_s) if roofline else Roofline()
    # The pass that reads least between two uses of a weight leaves it warmest.
    between = min((x.weight_bytes for x in group), default=0)
    results: list[OperatorResult] = []
    for start in range(0, len(uses), BATCH):
        batch = uses[start : start + BATCH]
        if each_shape and cold_weights:
            tasks = [("cold", json.dumps([use.to_json(), between])) for use in batch]
        else:
            tasks = [("operator" if each_shape else "untimed", json.dumps(use.to_json())) for use in batch]
        with ThreadPoolExecutor(at_once) as pool:
            ask = partial(run_probe, tasks, device=device, time_limit_s=time_limit_s, command=command)
            sides = [job.result() for job in [pool.submit(ask) for _ in range(at_once)]]
        answers = [together(group) for group in zip(*sides, strict=True)]
        results += [_result(use, answer, limits) for use, answer in zip(batch, answers, strict=True)]
        if progress is not None:
            progress(len(results), len(uses))
    return Coverage(
        device=device,
        device_name=platform.node() if device == "cpu" else device,
        taken_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        results=tuple(results),
        roofline=limits,
    )


def _to_try(uses: Sequence[OperatorUse]) -> list[OperatorUse]:
    """Every use that works, and the smallest of each kind of view: a view's shapes are arithmetic, not kernels."""
    views: dict[tuple[object, ...], OperatorUse] = {}
    found: list[OperatorUse] = []
    for use in uses:
        if not use.is_view:
            found.append(use)
            continue
        key = (use.name, use.input_dtypes)
        known = views.get(key)
        if known is None or _num_elements(use) < _num_elements(known):
            views[key] = use
    return [*found, *views.values()]


def _one_of_each(uses: Sequence[OperatorUse]) -> list[OperatorUse]:
    """The largest use of each operator and dtypes that is cheap to compare, or the smallest where none is."""
    kinds: dict[tuple[object, ...], list[OperatorUse]] = {}
    for use in uses:
        kinds.setdefault((use.name, use.input_dtypes), []).append(use)
    found = []
    for group in kinds.values():
        cheap = [use for use in group if use.num_bytes <= MAX_CHECK_BYTES]
        found.append(max(cheap, key=_num_elements) if cheap else min(group, key=_num_elements))
    return found


def _num_elements(use: OperatorUse) -> int:
    return sum(math.prod(shape) for shape in use.input_shapes)


def together(answers: Sequence[ProbeResult]) -> ProbeResult:
    """What several children say of one operator: the first that has a gap, else the first with the mean time of all."""
    gap = next((x for x in answers if not isinstance(x.value, dict) or x.value["status"] != "ran"), None)
    if gap is not None or len(answers) == 1:
        return gap or answers[0]
    values = [x.value for x in answers if isinstance(x.value, dict)]
    times = [value["seconds"] for value in values if value.get("seconds")]
    if not times:
        return answers[0]
    return replace(answers[0], value={**values[0], "seconds": statistics.mean(times)})


def _result(use: OperatorUse, answer: ProbeResult, limits: Roofline) -> OperatorResult:
    if answer.error:
        if answer.error.startswith("child did not start"):
            raise DeploymentError(
                f"operators cannot be tried: {answer.error}", next_step="Run `workbench devices` to see what is wrong"
            )
        return OperatorResult(use=use, status="failed", detail=answer.error.partition("\n")[0][:200])
    assert isinstance(answer.value, dict)
    result = OperatorResult(use=use, **answer.value)
    least = limits.least_seconds(use)
    if result.seconds and least is not None:
        return replace(result, share=least / result.seconds)
    return result


def measure_roofline(
    device: str,
    dtypes: Sequence[str],
    *,
    command: Sequence[str] = PROBE_COMMAND,
    time_limit_s: float = OPERATOR_SECONDS,
) -> Roofline:
    """Limits of a device (torch's name), measured in a child process: a large copy, and large products by dtype."""
    tasks = [("copy", ""), *(("matmul", dtype) for dtype in dtypes)]
    copy, *products = run_probe(tasks, device=device, time_limit_s=time_limit_s, command=command)
    memory = None
    if isinstance(copy.value, dict):
        memory = Quantity(
            copy.value["bytes_per_s"], "B/s", "measured", f"copy of {copy.value['size']:,} bytes, {device}"
        )
    rates = []
    for answer in products:
        if isinstance(answer.value, dict):
            source = f"{answer.value['rows']} x {answer.value['size']} products, {device}"
            rates.append((answer.argument, Quantity(answer.value["flops_per_s"], "FLOP/s", "measured", source)))
    return Roofline(matmul=tuple(rates), memory=memory)
