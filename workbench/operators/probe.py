"""Tries every distinct operator of some inventories on a device, each in a child process with a time limit."""

from __future__ import annotations

import datetime
import json
import math
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

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
    command: Sequence[str] = PROBE_COMMAND,
    progress: Callable[[int, int], None] | None = None,
) -> Coverage:
    """What `device` (torch's name, "cpu" or "type:0") makes of every distinct operator of the inventories.

    Views are tried once per operator and dtypes, everything else at each of its shapes. An operator that hangs or takes
    its child down has failed, and the rest goes on. With `roofline` the limits of the device are measured first.
    Without `each_shape` one call speaks for each operator and dtypes, the largest of at most 64 MiB, and none is timed.
    `progress(done, total)` is called as answers come in. Raises DeploymentError where the child does not start at all.
    """
    group = (inventories,) if isinstance(inventories, Inventory) else tuple(inventories)
    distinct = distinct_operators(group)
    uses = _to_try(distinct) if each_shape else _one_of_each(distinct)
    dtypes = list(dict.fromkeys(use.input_dtypes[0] for use in uses if use.flops))
    limits = measure_roofline(device, dtypes, command=command, time_limit_s=time_limit_s) if roofline else Roofline()
    results: list[OperatorResult] = []
    for start in range(0, len(uses), BATCH):
        batch = uses[start : start + BATCH]
        tasks = [("operator" if each_shape else "untimed", json.dumps(use.to_json())) for use in batch]
        answers = run_probe(tasks, device=device, time_limit_s=time_limit_s, command=command)
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
