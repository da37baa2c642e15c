"""What kind of weights a checkpoint folder holds, in words."""

from __future__ import annotations

from pathlib import Path

from workbench.base import ConfigError
from workbench.spec import read_json

__all__ = ["ORIGIN_NAME", "describe_weights"]

ORIGIN_NAME = "origin.json"  # beside the weights of a checkpoint that was made here; published ones have none


def describe_weights(root: Path) -> str:
    """E.g. "random weights: its answers are noise"; from `origin.json` where there is one."""
    path = root / ORIGIN_NAME
    if not path.exists():
        return "weights as published"
    try:
        kind = read_json(path).get("weights")
    except ConfigError:
        kind = None
    if kind == "random":
        return "random weights: its answers are noise"
    return f"{kind} weights" if isinstance(kind, str) else f"weights of unknown origin (unreadable {ORIGIN_NAME})"
