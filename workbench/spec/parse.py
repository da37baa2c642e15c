"""From a config in any known dialect to a ModelSpec, and from a ModelSpec to the tensors it is published with."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from workbench.base import ConfigError, UnsupportedModelError
from workbench.spec.config import read_json
from workbench.spec.families import family_named, family_of, known_families
from workbench.spec.model import ModelSpec
from workbench.spec.tensors import TensorSpec

__all__ = ["draft_tensors", "parse_config", "published_tensors", "read_spec"]


def parse_config(config: Mapping[str, object], image_config: Mapping[str, object] | None = None) -> ModelSpec:
    """ModelSpec by the family that recognises `config`. Raises UnsupportedModelError if none does, else ConfigError."""
    family = family_of(config)
    if family is not None:
        return family.parse(config, image_config)
    raise UnsupportedModelError(
        "no family recognises this config",
        found=f"model_type={config.get('model_type')!r}, architectures={config.get('architectures')!r}",
        expected=" or ".join(name for family in known_families() for name in family.ARCHITECTURES),
        next_step="`workbench inspect` guesses what it can of an unknown model; docs/adding-a-family.md adds one",
    )


def read_spec(root: Path | str) -> ModelSpec:
    """ModelSpec of a checkpoint folder (or of a bare `config.json`), with its image settings where they are present.

    Raises UnsupportedModelError for a model of no known family, and ConfigError for everything else that is wrong.
    """
    root = Path(root)
    config_path = root / "config.json" if root.is_dir() else root
    if not config_path.exists():
        raise ConfigError("file is missing", where=config_path, next_step=_where_to_look(root))
    if config_path.suffix == ".safetensors":
        raise ConfigError("a file of weights, not a description", where=root, next_step="Give the folder it lies in")
    image_path = config_path.parent / "preprocessor_config.json"
    image_config = read_json(image_path) if config_path.name == "config.json" and os.path.lexists(image_path) else None
    return parse_config(read_json(config_path), image_config)


def _where_to_look(root: Path) -> str:
    """A hint for a path that describes no model: one folder too high is the usual mistake."""
    below = sorted(path.parent.name for path in root.glob("*/config.json"))
    if below:
        return f"Folders in it that have one: {', '.join(below[:5])}{', …' if len(below) > 5 else ''}"
    return "A checkpoint folder holds config.json beside its *.safetensors files; the config alone will do as well"


def published_tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    """Every tensor a checkpoint of this model must hold, with its place in the model."""
    return family_named(spec.family).tensors(spec)


def draft_tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    """Tensors of the multi-token-prediction layers: a checkpoint may hold them, and the model is whole without."""
    family = family_named(spec.family)
    return family.draft_tensors(spec) if spec.draft is not None and hasattr(family, "draft_tensors") else iter(())
