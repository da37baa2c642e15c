"""One file per family. Adding a file here adds the family: nothing else lists them.

A family module has `FAMILY` (its name in records), `ARCHITECTURES`, `matches(config)`, `parse(config, image_config)`
and `tensors(spec)`; `draft_tensors(spec)` where it publishes multi-token-prediction layers. Exactly one family may
recognise a config.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Protocol, cast

from workbench.base import ConfigError
from workbench.spec.model import ModelSpec
from workbench.spec.tensors import TensorSpec

__all__ = ["Family", "family_named", "family_of", "known_families"]


class Family(Protocol):
    """What a module in this folder offers."""

    __name__: str
    FAMILY: str
    ARCHITECTURES: tuple[str, ...]

    def matches(self, config: Mapping[str, object]) -> bool: ...
    def parse(self, config: Mapping[str, object], image_config: Mapping[str, object] | None = None) -> ModelSpec: ...
    def tensors(self, spec: ModelSpec) -> Iterator[TensorSpec]: ...


def known_families() -> tuple[Family, ...]:
    """Every family in this folder (and in folders appended to this package's `__path__`), by name."""
    return _load(tuple(__path__))


@lru_cache(maxsize=8)
def _load(paths: tuple[str, ...]) -> tuple[Family, ...]:
    names = sorted({module.name for module in pkgutil.iter_modules(paths) if not module.name.startswith("_")})
    return tuple(cast(Family, importlib.import_module(f"{__name__}.{name}")) for name in names)


def family_of(config: Mapping[str, object]) -> Family | None:
    """The family that recognises a config, None without one. Raises ConfigError where two do."""
    found = [family for family in known_families() if family.matches(config)]
    if len(found) > 1:
        raise ConfigError("two families recognise this config", found=" and ".join(f.FAMILY for f in found))
    return found[0] if found else None


def family_named(name: str) -> Family:
    """The family of a ModelSpec by its `family`. Raises KeyError for a name nobody has."""
    return {family.FAMILY: family for family in known_families()}[name]
