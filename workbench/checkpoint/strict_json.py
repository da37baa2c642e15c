"""JSON from a file that nobody vouches for: UTF-8, no key twice, no NaN."""

from __future__ import annotations

import json
from typing import NoReturn

from workbench.base import short_repr

__all__ = ["parse_json"]


def parse_json(raw: bytes) -> object:
    """Value of a JSON document. Raises ValueError with a short reason, whatever the bytes."""
    try:
        # Decoded here: json.loads would also accept UTF-16 and UTF-32 bytes.
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"key {short_repr(name)} stands twice")
            seen.add(name)
    return value


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")
