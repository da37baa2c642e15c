"""Inventories as multisets, for comparing one with another."""

from __future__ import annotations

from collections import Counter

from workbench.operators import Inventory, OperatorUse

__all__ = ["collectives_of", "differences", "operators_of"]


def operators_of(inventory: Inventory) -> Counter[tuple[object, ...]]:
    """Layer kind, category, name, shapes, dtypes, work and bytes of every call."""
    counts: Counter[tuple[object, ...]] = Counter()
    for use in inventory.operators:
        counts[_identity(use)] += use.count
    return counts


def collectives_of(inventory: Inventory) -> Counter[tuple[object, ...]]:
    counts: Counter[tuple[object, ...]] = Counter()
    for use in inventory.collectives:
        counts[use.layer_kind, use.operation, use.group, use.ranks, use.dtype, use.num_bytes] += use.count
    return counts


def differences(found: Counter[tuple[object, ...]], expected: Counter[tuple[object, ...]]) -> str:
    """A few entries that only one of the two has; empty where they are equal."""
    more, less = found - expected, expected - found
    lines = [f"+{count} {entry}" for entry, count in list(more.items())[:4]]
    return "\n".join(lines + [f"-{count} {entry}" for entry, count in list(less.items())[:4]])


def _identity(use: OperatorUse) -> tuple[object, ...]:
    work = use.flops, use.bytes_read, use.bytes_written, use.weight_bytes
    return (use.layer_kind, use.category, use.name, use.input_shapes, use.input_dtypes, *work)
