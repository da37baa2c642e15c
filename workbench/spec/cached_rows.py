"""How a deployment may hold the rows that tokens leave behind; `nn.rows` does it, the planner counts it."""

from __future__ import annotations

from workbench.base import ConfigError

__all__ = ["KV_DTYPES", "KV_SCALE_BYTES", "check_kv_dtype"]

KV_DTYPES = ("auto", "fp8", "int8")  # as computed, or one byte a value
KV_SCALE_BYTES = 2  # of a row of one byte a value: bf16


def check_kv_dtype(kv_dtype: str) -> None:
    """Raises ConfigError for a name that is none of KV_DTYPES."""
    if kv_dtype not in KV_DTYPES:
        raise ConfigError("no such storage of cached rows", found=kv_dtype, expected=", ".join(KV_DTYPES))
