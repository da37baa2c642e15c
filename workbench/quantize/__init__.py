"""Checkpoints in another storage precision: encoded offline, a matrix at a time, and readable by others."""

from workbench.quantize.convert import quantize_checkpoint
from workbench.quantize.record import QuantizedKind, QuantizeReport
from workbench.quantize.storage import STORED_AS, encode_stored, stored_reference

__all__ = [
    "STORED_AS",
    "QuantizeReport",
    "QuantizedKind",
    "encode_stored",
    "quantize_checkpoint",
    "stored_reference",
]
