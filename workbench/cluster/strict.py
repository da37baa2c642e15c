"""Reading JSON that nobody vouches for: every field by name, of one type, within bounds; nothing else beside it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workbench.base import BASES, ConfigError, Quantity, read_small_file, short_repr

__all__ = ["Fields", "parse_json_file", "quantity_to_json"]


class Fields:
    """The members of one JSON object. What does not fit raises ConfigError, which names the file and the member."""

    def __init__(self, record: object, place: str, where: object) -> None:
        self.place, self.where = place, where
        if not isinstance(record, dict):
            raise self.error("", record, "an object")
        self._record: dict[str, Any] = dict(record)

    def error(self, key: str, found: object, expected: str) -> ConfigError:
        name = ".".join(part for part in (self.place, key) if part) or "the document"
        return ConfigError(f"{name} is not as expected", where=self.where, found=short_repr(found), expected=expected)

    def take(self, key: str) -> object:
        if key not in self._record:
            raise self.error(key, "nothing", "a value")
        return self._record.pop(key)

    def text(self, key: str, *, among: tuple[str, ...] = (), most: int = 1000) -> str:
        value = self.take(key)
        if not isinstance(value, str) or len(value) > most or (among and value not in among):
            raise self.error(key, value, f"one of {', '.join(among)}" if among else f"a text of at most {most} letters")
        return value

    def flag(self, key: str) -> bool:
        value = self.take(key)
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def count(self, key: str, *, low: int = 0, high: int = 1 << 53) -> int:
        return self._count(self.take(key), key, low, high)

    def counts(self, key: str, *, low: int = 0, high: int = 1 << 53) -> tuple[int, ...]:
        return tuple(self._count(value, f"{key}[{i}]", low, high) for i, value in enumerate(self.items(key)))

    def _count(self, value: object, key: str, low: int, high: int) -> int:
        if type(value) is not int or not low <= value <= high:
            raise self.error(key, value, f"a whole number from {low} to {high}")
        return value

    def number(self, key: str, *, low: float = 0.0) -> float:
        value = self.take(key)
        if type(value) not in (int, float) or not low <= _finite(value) < math.inf:
            raise self.error(key, value, f"a finite number from {low:g}")
        return float(value)  # type: ignore[arg-type]

    def items(self, key: str) -> list[object]:
        value = self.take(key)
        if not isinstance(value, list):
            raise self.error(key, value, "a list")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        values = self.items(key)
        for i, value in enumerate(values):
            if not isinstance(value, str):
                raise self.error(f"{key}[{i}]", value, "a text")
        return tuple(str(value) for value in values)

    def child(self, key: str) -> Fields:
        return Fields(self.take(key), f"{self.place}.{key}" if self.place else key, self.where)

    def children(self, key: str) -> Iterator[Fields]:
        place = f"{self.place}.{key}" if self.place else key
        for i, value in enumerate(self.items(key)):
            yield Fields(value, f"{place}[{i}]", self.where)

    def optional(self, key: str) -> Fields | None:
        if self._record.get(key) is None:
            self.take(key)
            return None
        return self.child(key)

    def keys(self) -> tuple[str, ...]:
        return tuple(self._record)

    def quantity(self, unit: str) -> Quantity:
        """This object as `quantity_to_json` writes it, in `unit`."""
        value, found = self.number("value"), self.text("unit")
        basis, source = self.text("basis", among=BASES), self.text("source", most=4000)
        self.done()
        if found != unit:
            raise self.error("unit", found, repr(unit))
        return Quantity(value, unit, basis, source)  # type: ignore[arg-type]

    def done(self) -> None:
        """Nothing may be left unread."""
        if self._record:
            raise self.error("", f"also {', '.join(sorted(self._record))}"[:200], "no other members")


def _finite(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def quantity_to_json(quantity: Quantity | None) -> dict[str, object] | None:
    if quantity is None:
        return None
    return {"value": quantity.value, "unit": quantity.unit, "basis": quantity.basis, "source": quantity.source}


def parse_json_file(path: Path, *, max_bytes: int) -> object:
    """The JSON document in a file. Raises ConfigError for a large, broken or ambiguous one (doubled names, NaN)."""

    def members(pairs: list[tuple[str, object]]) -> dict[str, object]:
        record = dict(pairs)
        if len(record) != len(pairs):
            raise ValueError("a name stands twice in one object")
        return record

    def refuse(name: str) -> object:
        raise ValueError(f"{name} is not a number of JSON")

    content = read_small_file(path, max_bytes=max_bytes)
    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=members, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not a JSON document: {error}", where=path) from None
