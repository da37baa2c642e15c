"""Training: one loop over the sharded model, its data made here, and export in the published layout.

Names are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module

_PUBLIC = {
    "TrainConfig": "workbench.training.config",
    "TrainReport": "workbench.training.launch",
    "export_run": "workbench.training.export",
    "read_config": "workbench.training.config",
    "read_metrics": "workbench.training.metrics",
    "train": "workbench.training.launch",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'workbench.training' has no attribute {name!r}")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value
