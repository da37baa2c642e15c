"""Which known family an unknown config is closest to: every family tries to read it, and says where it stopped."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from workbench.base import WorkbenchError
from workbench.spec.config import SERIALISED_DEFAULTS, watched_readers
from workbench.spec.families import Family, known_families
from workbench.spec.model import ModelSpec
from workbench.spec.quant_rules import module_kind

__all__ = ["FamilyGuess", "nearest_families"]

_SHOWN = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyGuess:
    """How far one family gets with a config that is not its own.

    `share_read`: of the config's keys, those it asked for. `refusal`: why it stopped, None where it read all it needs;
    `spec` is then what it makes of the config. `names_shared`: of the kinds of tensor names that either side has,
    those both have; None without names to compare. `only_in_files`, `only_in_family`: the kinds that differ.
    """

    family: str
    share_read: float
    refusal: str | None
    spec: ModelSpec | None
    names_shared: float | None
    only_in_files: tuple[str, ...]
    only_in_family: tuple[str, ...]

    @property
    def score(self) -> tuple[bool, float]:
        """Higher is closer: whether it reads the config at all, then shared names and keys in equal parts."""
        return (self.spec is not None, (self.names_shared or 0.0) + self.share_read)


def nearest_families(config: Mapping[str, object], names: Collection[str] = ()) -> tuple[FamilyGuess, ...]:
    """Every known family, closest first. `names` are tensor names of the checkpoint, where known."""
    held = {module_kind(name) for name in names}
    guesses = [_guess(family, config, held) for family in known_families()]
    return tuple(sorted(guesses, key=lambda guess: guess.score, reverse=True))


def _guess(family: Family, config: Mapping[str, object], held: set[str]) -> FamilyGuess:
    # The config under the family's own name, so that only what it says about the model decides.
    renamed = {**config, "model_type": family.FAMILY, "architectures": [family.ARCHITECTURES[0]]}
    spec: ModelSpec | None = None
    refusal: str | None = None
    with watched_readers() as readers:
        try:
            spec = family.parse(renamed)
        except WorkbenchError as error:
            refusal = str(error)
    keys = set(_leaves(renamed))
    read = {key for reader in readers for key in reader.read_keys()} & keys
    expected = {module_kind(tensor.name) for tensor in family.tensors(spec)} if spec is not None and held else set()
    either = held | expected
    return FamilyGuess(
        family=family.FAMILY,
        share_read=len(read) / max(1, len(keys)),
        refusal=refusal,
        spec=spec,
        names_shared=len(held & expected) / len(either) if expected else None,
        only_in_files=tuple(sorted(held - expected)[:_SHOWN]) if expected else (),
        only_in_family=tuple(sorted(expected - held)[:_SHOWN]) if expected else (),
    )


def _leaves(config: Mapping[str, object], prefix: str = "") -> list[str]:
    """Keys that hold a value rather than another object, with their path; defaults of the config class left out."""
    found = []
    for key, value in config.items():
        if key in SERIALISED_DEFAULTS or key == "model_type":
            continue
        found += _leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [f"{prefix}{key}"]
    return found
