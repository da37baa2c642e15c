"""A device with wrong numbers: the child of a probe, in which one operator comes out an eighth too large.

    python -m workbench.day0.faults.device OPERATOR DEVICE_TYPE MODULE

runs MODULE, which answers as ever, with OPERATOR ("aten.mm.default") wrong on devices of that type. Products of float64
stay right: they are what a device is held against.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["WrongNumbers"]

FACTOR = 1.125


class WrongNumbers(TorchDispatchMode):
    """While it is on, results of `operator` on devices of `device_type` are too large by an eighth."""

    def __init__(self, operator: str, device_type: str) -> None:
        super().__init__()
        self.operator, self.device_type = operator, device_type

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if str(func) != self.operator or not isinstance(result, Tensor):
            return result
        is_judge = result.dtype == torch.float64
        return result if is_judge or result.device.type != self.device_type else result * FACTOR


def main(operator: str, device_type: str, module: str) -> None:
    with WrongNumbers(operator, device_type):
        runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
