"""What a model computes: single-device blocks, quantised storage, caches. Names are loaded on first use."""

from __future__ import annotations

from importlib import import_module

_PUBLIC = {
    "Cache": "workbench.nn.cache",
    "ExpertDispatch": "workbench.nn.moe",
    "Experts": "workbench.nn.moe",
    "LOCAL": "workbench.nn.tensor_parallel",
    "Linear": "workbench.nn.linear",
    "LocalDispatch": "workbench.nn.moe",
    "MatrixStore": "workbench.nn.linear",
    "MoE": "workbench.nn.moe",
    "Model": "workbench.nn.model",
    "PRECISIONS": "workbench.nn.precision",
    "Precision": "workbench.nn.precision",
    "Projector": "workbench.nn.projector",
    "ResidualStream": "workbench.nn.residual",
    "SCHEMES": "workbench.nn.quant",
    "Scheme": "workbench.nn.quant",
    "Segments": "workbench.nn.batch",
    "SingleRank": "workbench.nn.tensor_parallel",
    "StackedLinear": "workbench.nn.linear",
    "StateCache": "workbench.nn.cache",
    "TensorParallel": "workbench.nn.tensor_parallel",
    "TokenBatch": "workbench.nn.batch",
    "VisionTower": "workbench.nn.vision",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'workbench.nn' has no attribute {name!r}")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value
