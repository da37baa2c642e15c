"""A topology measured: messages between every pair of ranks and collectives over groups, in child processes.

What hangs or fails becomes a claim of the topology ("claimed, not measured: ..."), with the operation and the ranks,
and the rest is measured with new processes. Importing this loads no torch; the ranks do.
"""

from __future__ import annotations

import contextlib
import datetime
import platform
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from workbench.base import ConfigError, Quantity
from workbench.cluster.cost import CollectiveFit, LinkCost, fit_cost
from workbench.cluster.devices import Device, list_devices
from workbench.cluster.host import MatmulRate, measure_copy, measure_matmul
from workbench.cluster.link_survey import Findings, LinkSurvey, Series, plan_series
from workbench.cluster.locality import read_locality
from workbench.cluster.rank_pool import RankPool
from workbench.cluster.rank_process import WORKER, LocalRank
from workbench.cluster.topology import AlgorithmChoice, PairLink, Topology, TopologyDevice
from workbench.cluster.topology_parts import SHORT_NAMES

__all__ = ["measure_topology"]

MAX_RANKS = 64
STEP_SECONDS = 20.0
JOIN_SECONDS = 120.0  # the first touch of a driver can take long
SIZES = {"cpu": (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22), "": tuple(1 << n for n in range(10, 28, 3))}
FIT_DTYPES = ("bfloat16", "float32")
PLAIN = "one call"


def measure_topology(
    num_ranks: int,
    *,
    device: str | None = None,
    sizes: Sequence[int] | None = None,
    dtypes: Sequence[str] = FIT_DTYPES,
    rates: bool = True,
    time_limit_s: float = STEP_SECONDS,
    join_limit_s: float = JOIN_SECONDS,
    command: Sequence[str] = WORKER,
    on_step: Callable[[str], None] | None = None,
) -> Topology:
    """Links and collectives of `num_ranks` ranks on this host, one per device of type `device` (default: this machine's
    accelerator, else its CPU; ranks share devices where there are fewer).

    `sizes` are bytes that one rank puts in, `dtypes` torch names; the first of them speaks for a group. With `rates`,
    how fast the devices multiply and copy, too. One step may take `time_limit_s`. `on_step` hears what comes next.
    Raises ConfigError for a number of ranks or sizes that make no sense, DeploymentError where the driver does not
    answer at all. Over several hosts: see relay.py.
    """
    if not 1 <= num_ranks <= MAX_RANKS:
        raise ConfigError("ranks to measure on one host", found=num_ranks, expected=f"1 to {MAX_RANKS}")
    say = on_step or (lambda what: None)
    used = used_devices(num_ranks, device)
    chosen = message_sizes(used[0].type, sizes)
    devices = describe_devices(used, platform.node() or "this host", rates, say)
    names = [x.torch_name for x in used]
    with tempfile.TemporaryDirectory(prefix="links-") as folder:
        count = iter(range(1 << 30))

        def new_pool() -> RankPool:
            ranks = [LocalRank(command, {"GLOO_SOCKET_IFNAME": "lo", "LOCAL_RANK": str(i)}) for i in range(num_ranks)]
            meeting = f"file://{Path(folder) / f'rendezvous-{next(count)}'}"
            return RankPool(ranks, names, init_method=meeting, time_limit_s=time_limit_s)

        findings = survey_links(
            new_pool, devices, sizes=chosen, dtypes=tuple(dtypes), join_limit_s=join_limit_s, say=say
        )
    topology = assemble(f"{num_ranks} ranks on {devices[0].host}", devices, findings)
    return with_told_links(topology, used)


def used_devices(num_ranks: int, kind: str | None) -> list[Device]:
    """The device of each rank on this host. Raises ConfigError where there is none of that kind."""
    found = list_devices()
    offered = [x for x in found if x.type == (kind or found[0].type)]
    if not offered:
        raise ConfigError("no such device on this machine", found=kind, expected=", ".join({x.type for x in found}))
    return [offered[rank % len(offered)] for rank in range(num_ranks)]


def message_sizes(kind: str, sizes: Sequence[int] | None) -> tuple[int, ...]:
    chosen = tuple(sorted(set(sizes or SIZES.get(kind, SIZES[""]))))
    if len(chosen) < 2 or chosen[0] < 1:
        raise ConfigError("message sizes", found=list(chosen), expected="two or more, from 1 byte on")
    return chosen


def survey_links(
    new_pool: Callable[[], RankPool],
    devices: Sequence[TopologyDevice],
    *,
    sizes: tuple[int, ...],
    dtypes: tuple[str, ...],
    join_limit_s: float,
    say: Callable[[str], None],
) -> Findings:
    """Everything between these ranks; nothing for a single one."""
    survey = LinkSurvey(new_pool, num_ranks=len(devices), join_limit_s=join_limit_s, say=say)
    if len(devices) > 1:
        with survey:
            survey.cover()
            for series in plan_series(tuple(x.host for x in devices), sizes, dtypes):
                survey.measure(series)
    return survey.findings


def describe_devices(
    used: Sequence[Device], host: str, rates: bool, say: Callable[[str], None], first_rank: int = 0
) -> tuple[TopologyDevice, ...]:
    """The ranks' devices on one host, numbered from `first_rank`; copy and matmul rates are those of the first of each
    kind, and of a device that several ranks share, each has its part."""
    measured: dict[str, tuple[Quantity | None, tuple[MatmulRate, ...]]] = {}
    if rates:
        for device in {x.type: x for x in reversed(used)}.values():
            say(f"rates of {device.torch_name}")
            measured[device.type] = (measure_copy(device.torch_name), measure_matmul(device.torch_name))
    sharing = Counter(x.torch_name for x in used)
    return tuple(
        _describe(first_rank + i, host, x, sharing[x.torch_name], *measured.get(x.type, (None, ())))
        for i, x in enumerate(used)
    )


def _describe(
    rank: int, host: str, device: Device, sharing: int, copy: Quantity | None, matmul: Sequence[MatmulRate]
) -> TopologyDevice:
    def part(quantity: Quantity | None) -> Quantity | None:
        if quantity is None or sharing == 1:
            return quantity
        source = f"1/{sharing} of {quantity.source}"
        return Quantity(quantity.value / sharing, quantity.unit, quantity.basis, source)

    rates = {SHORT_NAMES.get(x.dtype, x.dtype): part(x.rate) for x in matmul}
    known = {name: rate for name, rate in rates.items() if rate is not None}
    return TopologyDevice(
        rank=rank,
        host=host,
        name=device.name,
        device_type=device.type,
        memory_total=part(device.memory_total),
        memory_bandwidth=part(copy),
        matmul=known,
        formats=tuple(known),
    )


def assemble(name: str, devices: Sequence[TopologyDevice], findings: Findings) -> Topology:
    """The record of what was found: fits of every series that came to its end."""
    taken_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    costs = {series: fit_cost(points, f"{series}, {taken_at}") for series, points in findings.points.items()}
    pairs, fits = [], []
    for series, cost in costs.items():
        if series.operation == "send_recv":
            pairs.append(PairLink(a=series.ranks[0], b=series.ranks[1], cost=cost))
        elif series.algorithm == series.operation:
            fits.append(CollectiveFit(operation=series.operation, ranks=series.ranks, dtype=series.dtype, cost=cost))
    return Topology(
        name=name,
        devices=tuple(devices),
        pairs=tuple(pairs),
        collectives=tuple(fits),
        claims=tuple(findings.claims),
        taken_at=taken_at,
        coverage=tuple(findings.coverage),
        choices=tuple(_choices(costs)),
    )


def _choices(costs: dict[Series, LinkCost]) -> Iterator[AlgorithmChoice]:
    """Each special way beside the plain one over the same ranks in the same dtype."""
    for special, cost in costs.items():
        with contextlib.suppress(KeyError):
            if special.algorithm != special.operation:
                plain = costs[replace(special, algorithm=special.operation)]
                yield AlgorithmChoice(
                    operation=special.operation,
                    ranks=special.ranks,
                    dtype=special.dtype,
                    candidates=((PLAIN, plain), (special.algorithm, cost)),
                )


def with_told_links(topology: Topology, used: Sequence[Device]) -> Topology:
    """Claims for pairs of accelerators that a vendor's tool calls linked and that were not measured."""
    locality = read_locality() if any(x.is_accelerator for x in used) else None
    if locality is None or not locality.links:
        return topology
    claims = list(topology.claims)
    for a, first in enumerate(used):
        for b in range(a + 1, len(used)):
            if first.index is None or used[b].index is None or topology.link(a, b) is not None:
                continue
            words = locality.link_words(first.index, used[b].index or 0)
            if words is not None:
                claims.append(f"claimed, not measured: ranks {a} {b}: {words}")
    return replace(topology, claims=tuple(claims))
