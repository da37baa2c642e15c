"""Which checkpoints may be examined: those that say in their own folder that they were trained here."""

from __future__ import annotations

import tomllib
from pathlib import Path

from workbench.base import ConfigError
from workbench.checkpoint import ORIGIN_NAME
from workbench.spec import read_json

__all__ = ["is_trained_here"]


def is_trained_here(root: Path | str) -> bool:
    """Whether the folder says that its weights were trained by the recipe that lies beside them.

    Other models are no worse, but no answer of theirs to a question about a generated scene could be called wrong.
    """
    root = Path(root)
    try:
        origin = read_json(root / ORIGIN_NAME)
        recipe = tomllib.loads((root / "recipe.toml").read_text(encoding="utf-8"))
    except (ConfigError, OSError, ValueError):
        return False
    return origin.get("weights") == "trained" and recipe.get("name") == origin.get("recipe") is not None
