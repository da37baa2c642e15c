"""What each holder of keys may take: its weight among those who wait, its rate, and how many requests at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workbench.base import ConfigError, read_small_file

__all__ = ["Quota", "read_quotas"]

MAX_FILE_BYTES = 1 << 20
MAX_WEIGHT = 1000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Quota:
    """Of the slots that several holders want, each gets a part by its `weight`. None: as everybody.

    Raises ConfigError for what leaves nothing.
    """

    weight: float = 1.0
    requests_per_minute: int | None = None
    at_once: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and 1 / MAX_WEIGHT <= self.weight <= MAX_WEIGHT):
            raise ConfigError("no weight", found=self.weight, expected=f"{1 / MAX_WEIGHT:g} to {MAX_WEIGHT:g}")
        for name in ("requests_per_minute", "at_once"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1", found=value)


def read_quotas(path: Path) -> dict[str, Quota]:
    """Quotas by holder, from a file with one `holder weight=2 requests_per_minute=60 at_once=4` a line; each is
    optional, `#` begins a comment.

    Raises ConfigError for anything else, and for a holder that stands twice.
    """
    text = read_small_file(path, max_bytes=MAX_FILE_BYTES, error=ConfigError).decode("utf-8", "replace")
    quotas: dict[str, Quota] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        holder, *options = words
        where = f"{path}, line {number}"
        if holder in quotas or "=" in holder:
            raise ConfigError("a holder stands twice, or none does", where=where, found=holder)
        try:
            quotas[holder] = Quota(**_options(options))  # type: ignore[arg-type]
        except (ConfigError, TypeError, ValueError) as error:
            raise ConfigError(
                f"not a quota: {error}",
                where=where,
                expected="holder weight=2 requests_per_minute=60 at_once=4",
            ) from None
    return quotas


def _options(words: list[str]) -> Mapping[str, float | int]:
    options: dict[str, float | int] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name in options:
            raise ValueError(f"{name} stands twice")
        options[name] = float(value) if name == "weight" else int(value)
    return options
