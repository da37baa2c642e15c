"""Reading a config file key by key, so that what was not read can be shown."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NoReturn

from workbench.base import ConfigError, UnsupportedModelError, read_small_file, short_repr
from workbench.spec.model import ModelSpec

__all__ = ["ConfigReader", "read_json"]

_MISSING = object()
MAX_CONFIG_BYTES = 16 << 20  # a config is kilobytes; a hostile one must not fill memory


def read_json(path: Path) -> dict[str, object]:
    """A JSON object from a file. Raises ConfigError where it is absent, too large, malformed or not an object."""
    try:
        value = json.loads(read_small_file(path, max_bytes=MAX_CONFIG_BYTES), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not readable as JSON: {error}", where=path) from None
    if not isinstance(value, dict):
        raise ConfigError("not a JSON object", where=path, found=type(value).__name__)
    return value


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate keys {sorted({n for n in names if names.count(n) > 1})}")
    return value


class ConfigReader:
    """A mapping that remembers which keys were asked for; `finish` returns the rest as the spec's unknown keys."""

    def __init__(self, values: Mapping[str, object], *, where: str = "config.json", ignore: Collection[str] = ()):
        self._values = values
        self._where = where
        self._ignore = frozenset(ignore)
        self._read: set[str] = set()
        self._children: list[ConfigReader] = []

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def skip(self, *keys: str) -> None:
        """Keys known to carry nothing we need."""
        self._read.update(keys)

    def child(self, key: str) -> ConfigReader:
        value = self._take(key, _MISSING)
        if not isinstance(value, Mapping):
            self._mistyped(key, value, "an object")
        reader = ConfigReader(value, where=f"{self._where}: {key}", ignore=self._ignore)
        reader._prefix = f"{self._prefix}{key}."
        self._children.append(reader)
        return reader

    _prefix = ""

    def integer(self, key: str, *, default: object = _MISSING, minimum: int = 1, maximum: int = 1 << 40) -> int:
        value = self._take(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self._mistyped(key, value, "an integer")
        # Bounded above as well: a size of 10**30 would only fail much later, inside arithmetic or an allocation.
        if not (minimum <= value or value == default) or value > maximum:
            self._mistyped(key, value, f"an integer from {minimum} to {maximum}")
        return value

    def number(self, key: str) -> float:
        value = self._take(key, _MISSING)
        if not _is_finite(value):
            self._mistyped(key, value, "a finite number")
        return float(value)  # type: ignore[arg-type]

    def boolean(self, key: str) -> bool:
        value = self._take(key, _MISSING)
        if not isinstance(value, bool):
            self._mistyped(key, value, "true or false")
        return value

    def string(self, key: str, *, default: object = _MISSING) -> str:
        value = self._take(key, default)
        if not isinstance(value, str):
            self._mistyped(key, value, "a string")
        return value

    def int_list(self, key: str) -> tuple[int, ...]:
        value = self._take(key, _MISSING)
        if not isinstance(value, list) or not all(isinstance(x, int) and not isinstance(x, bool) for x in value):
            self._mistyped(key, value, "a list of integers")
        return tuple(value)

    def str_list(self, key: str) -> tuple[str, ...]:
        value = self._take(key, _MISSING)
        if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
            self._mistyped(key, value, "a list of strings")
        return tuple(value)

    def float_triple(self, key: str) -> tuple[float, float, float]:
        value = self._take(key, _MISSING)
        if not isinstance(value, list) or len(value) != 3 or not all(map(_is_finite, value)):
            self._mistyped(key, value, "a list of three finite numbers")
        return (float(value[0]), float(value[1]), float(value[2]))

    def require(self, key: str, wanted: object) -> None:
        """Read a switch of which only one setting is computed here; raises UnsupportedModelError otherwise."""
        value = self._take(key, _MISSING)
        if value != wanted or isinstance(value, bool) != isinstance(wanted, bool):
            raise UnsupportedModelError(
                f"{key} has a setting that this version does not compute",
                where=self._where,
                found=short_repr(value),
                expected=repr(wanted),
            )

    def refuse(self, key: str, why: str) -> NoReturn:
        raise UnsupportedModelError(f"{key}: {why}", where=self._where, found=short_repr(self._values.get(key)))

    def unread(self) -> list[tuple[str, object]]:
        own = [
            (self._prefix + key, value)
            for key, value in self._values.items()
            if key not in self._read and key not in self._ignore
        ]
        return own + [pair for child in self._children for pair in child.unread()]

    def finish(self, spec: ModelSpec) -> ModelSpec:
        return dataclasses.replace(spec, unknown_keys=tuple(self.unread()))

    def _take(self, key: str, default: object) -> object:
        self._read.add(key)
        if key in self._values:
            return self._values[key]
        if default is _MISSING:
            raise ConfigError(f"key {key!r} is missing", where=self._where)
        return default

    def _mistyped(self, key: str, value: object, wanted: str) -> NoReturn:
        raise ConfigError(f"{key} has a wrong value", where=self._where, found=short_repr(value), expected=wanted)


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e30
