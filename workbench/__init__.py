"""Day-0 adaptation workbench: from a checkpoint nobody has seen to a deployment that is proven, measured and explained.

The public names below are loaded on first use, so that `import workbench` is quick and touches no device.
"""

from __future__ import annotations

from importlib import import_module

__version__ = "0.1.0"

_PUBLIC = {
    "AuditReport": "workbench.checkpoint",
    "Checkpoint": "workbench.checkpoint",
    "Deployment": "workbench.deployment",
    "Layout": "workbench.placement",
    "ModelSpec": "workbench.spec",
    "MultimodalInferenceService": "workbench.serving",
    "WorkbenchError": "workbench.base",
    "audit": "workbench.checkpoint",
    "inspect_checkpoint": "workbench.checkpoint",
    "list_devices": "workbench.cluster",
    "load_sharded_weights": "workbench.loading",
    "prove_gates": "workbench.day0",
    "read_spec": "workbench.spec",
    "run_day0": "workbench.day0",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
