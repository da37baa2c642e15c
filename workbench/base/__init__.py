"""Errors, quantities with units and origin, dtypes, tables, text that is safe to show."""

from workbench.base.dtypes import DTYPE_BITS, num_bytes
from workbench.base.errors import (
    ChangeUnderWayError,
    CheckpointError,
    ConfigError,
    DeploymentError,
    ImageError,
    LayoutError,
    LoadError,
    ModelRestartingError,
    NoRoomError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    RequestFailedError,
    TokenizerError,
    TraceError,
    UnsupportedModelError,
    WorkbenchError,
    WorkerDiedError,
)
from workbench.base.files import read_small_file
from workbench.base.plain import plain
from workbench.base.process import (
    HostBytes,
    forget_peak,
    host_memory,
    peak_resident_bytes,
    private_resident_bytes,
    resident_bytes,
)
from workbench.base.quantity import BASES, Basis, Quantity
from workbench.base.table import Cell, Table, human, printable, printable_lines
from workbench.base.text import error_text, short_repr

__all__ = [
    "HostBytes",
    "BASES",
    "DTYPE_BITS",
    "Basis",
    "Cell",
    "ChangeUnderWayError",
    "CheckpointError",
    "ConfigError",
    "DeploymentError",
    "ImageError",
    "LayoutError",
    "LoadError",
    "ModelRestartingError",
    "NoRoomError",
    "PromptTooLongError",
    "Quantity",
    "QueueFullError",
    "RequestError",
    "RequestFailedError",
    "Table",
    "TokenizerError",
    "TraceError",
    "UnsupportedModelError",
    "WorkbenchError",
    "WorkerDiedError",
    "error_text",
    "forget_peak",
    "host_memory",
    "human",
    "num_bytes",
    "peak_resident_bytes",
    "plain",
    "printable",
    "printable_lines",
    "private_resident_bytes",
    "read_small_file",
    "resident_bytes",
    "short_repr",
]
