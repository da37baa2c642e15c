"""From what each group costs in each format to mixes: fewer bytes step by step, each step the cheapest that is left.

For one group the formats worth having lie on the lower hull of (bytes, KL): a format above the line between two others
is beaten by them. Going down every hull at once, always along the flattest edge, gives the mixes of least added-up KL
for their size; between two neighbours on that path lies at most one step of one group. Costs are taken to add up, which
is what measuring the mixes afterwards is for.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

from workbench.align.sweep_report import Sensitivity
from workbench.nn.precision_map import PLAIN

__all__ = ["hull_of", "mix_path"]

Choice = dict[str, str]  # group -> scheme


def hull_of(options: Iterable[Sensitivity]) -> list[Sensitivity]:
    """The formats of one group that are worth having, largest first, with rising price; those that save nothing are
    not."""
    sorted_options = sorted((x for x in options if x.bytes_saved > 0), key=lambda x: (-x.bytes_stored, x.kl))
    hull: list[Sensitivity] = []
    for x in sorted_options:
        if hull and x.bytes_stored == hull[-1].bytes_stored:
            continue  # as small, and costs at least as much
        # A smaller format that costs no more makes the larger ones pointless.
        while hull and hull[-1].kl >= x.kl:
            hull.pop()
        while hull and _price(hull[-2] if len(hull) > 1 else None, hull[-1]) >= _price(hull[-1], x):
            hull.pop()
        hull.append(x)
    return hull


def _price(before: Sensitivity | None, after: Sensitivity) -> float:
    """Nats per byte of the step from one format (None: plain) to a smaller one."""
    kl, size = (0.0, after.bytes_plain) if before is None else (before.kl, before.bytes_stored)
    saved = size - after.bytes_stored
    return (after.kl - kl) / saved if saved > 0 else float("inf")


def mix_path(sensitivities: Sequence[Sensitivity]) -> list[Choice]:
    """Mixes from all plain to all as small as it pays, each one step of one group smaller than the one before."""
    groups: dict[str, list[Sensitivity]] = {}
    for x in sensitivities:
        groups.setdefault(x.group, []).append(x)
    hulls = {group: hull_of(options) for group, options in groups.items()}
    choice: Choice = dict.fromkeys(groups, PLAIN)
    queue = [(_price(None, hull[0]), group, 0) for group, hull in hulls.items() if hull]
    heapq.heapify(queue)
    path = [dict(choice)]
    while queue:
        _, group, step = heapq.heappop(queue)
        hull = hulls[group]
        choice[group] = hull[step].scheme
        path.append(dict(choice))
        if step + 1 < len(hull):
            heapq.heappush(queue, (_price(hull[step], hull[step + 1]), group, step + 1))
    return path


def predicted(choice: Mapping[str, str], sensitivities: Sequence[Sensitivity]) -> tuple[int, float]:
    """Bytes of the groups of a mix, and the sum of what they cost alone."""
    known = {(x.group, x.scheme): x for x in sensitivities}
    plain = {x.group: x.bytes_plain for x in sensitivities}
    size, kl = 0, 0.0
    for group, scheme in choice.items():
        entry = known.get((group, scheme))
        size += plain[group] if entry is None else entry.bytes_stored
        kl += 0.0 if entry is None else entry.kl
    return size, kl
