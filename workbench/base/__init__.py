"""Errors, quantities with units and origin, dtypes."""

from workbench.base.dtypes import DTYPE_BITS, num_bytes
from workbench.base.errors import (
    CheckpointError,
    ConfigError,
    DeploymentError,
    ImageError,
    LayoutError,
    LoadError,
    QueueFullError,
    RequestError,
    TokenizerError,
    UnsupportedModelError,
    WorkbenchError,
    WorkerDiedError,
)
from workbench.base.quantity import BASES, Basis, Quantity

__all__ = [
    "BASES",
    "DTYPE_BITS",
    "Basis",
    "CheckpointError",
    "ConfigError",
    "DeploymentError",
    "ImageError",
    "LayoutError",
    "LoadError",
    "Quantity",
    "QueueFullError",
    "RequestError",
    "TokenizerError",
    "UnsupportedModelError",
    "WorkbenchError",
    "WorkerDiedError",
    "num_bytes",
]
