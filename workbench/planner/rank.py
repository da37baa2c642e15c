"""What a rank really holds, by the headings of a ledger: called on each of them through `Deployment.call`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workbench.base import forget_peak, peak_resident_bytes, private_resident_bytes

if TYPE_CHECKING:
    from workbench.deployment.commands import RankCommands

__all__ = ["HeldMemory", "measure_held", "measure_peak"]

UNPLANNED = "not in the plan"


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldMemory:
    """Bytes of one rank: parameters and buffers by role, caches by kind, and what the process has of memory of its own
    (mapped files left out), all of it touched."""

    weights: dict[str, int]
    caches: dict[str, int]
    private_bytes: int


def measure_held(commands: RankCommands) -> HeldMemory:
    """Ends every sequence in the slots: what a cache has not used yet is no memory before it is written to."""
    from workbench.loading.host_memory import return_freed_memory

    runner = commands.runner
    for tensor in runner.cache.tensors:
        tensor.zero_()
    weights, caches = _weights(runner.model), _caches(runner.cache)
    return_freed_memory()
    forget_peak()
    return HeldMemory(weights=dict(weights), caches=dict(caches), private_bytes=private_resident_bytes()[0])


def measure_peak(_: RankCommands) -> int:
    """Most memory of its own that the process has had since `measure_held`, in bytes."""
    private, mapped = private_resident_bytes()
    return max(private, peak_resident_bytes() - mapped)


def _weights(model: object) -> Counter[str]:
    """By role of the published tensors; each storage once, though two names may lead to it."""
    from torch import nn

    from workbench.spec import published_tensors

    assert isinstance(model, nn.Module)
    roles = {param: t.role for t in published_tensors(model.spec) for param in (t.param, *t.also_fills)}  # type: ignore[arg-type]
    seen: set[int] = set()
    found: Counter[str] = Counter()
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        for leaf, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if tensor.untyped_storage()._cdata in seen:
                continue
            seen.add(tensor.untyped_storage()._cdata)
            # Codes and scales of a matrix go by the name of the matrix.
            role = roles.get(f"{dot}{leaf}") or roles.get(f"{dot}weight") or UNPLANNED
            found[role] += tensor.nbytes
    return found


def _caches(cache: object) -> Counter[str]:
    from workbench.nn.cache import StateCache

    assert isinstance(cache, StateCache)
    found: Counter[str] = Counter()
    for role, states in (("state", cache.state), ("convolution", cache.conv)):
        found[role] += sum(x.nbytes for x in states.values())
    found["snapshots"] = sum(x.nbytes for x in cache.snapshots.tensors)
    tables = {"latent": (cache.latent,), "index keys": (cache.index,), "keys and values": (cache.keys, cache.values)}
    for role, kinds in tables.items():
        found[role] += sum(part.nbytes for layers in kinds for rows in layers.values() for part in rows.parts)
    return +found
