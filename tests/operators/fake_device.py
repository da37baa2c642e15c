"""A probe child with an accelerator of its own: torch's Python door for third-party devices, faults to order.

FAKE_DEVICE in the environment is a JSON object: "operators" that the device has, each computed by a kernel of its own
on memory of its own; of these "to_host" copy to the host and compute there, "wrong" are a little off, "broken" answer
nonsense, "hanging" never return, "crashing" take the process down. An operator that is not listed does not exist,
unless "fallback" is given: then the device's catch-all computes it on the host.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.utils import backend_registration

from workbench.operators.child import main

NAME = "fakecard"
KEPT: list[torch.library.Library] = []  # registrations end with the object
CARD = ThreadPoolExecutor(1)  # the card's own processor: what it does is no work of the thread that calls
ERROR = 1.02  # of an operator that is a little off


class CardTensor(torch.Tensor):
    """A tensor on the card. `memory` holds its contents; torch itself never sees them."""

    memory: torch.Tensor

    @staticmethod
    def of(memory: torch.Tensor) -> CardTensor:
        made = torch._C._acc.create_empty_tensor(tuple(memory.shape), memory.dtype)
        made.__class__ = CardTensor
        made.memory = memory
        return made


def unwrap(value: Any) -> Any:
    if isinstance(value, CardTensor):
        return value.memory
    if isinstance(value, (list, tuple)):
        return type(value)(unwrap(item) for item in value)
    return torch.device("cpu") if isinstance(value, torch.device) else value


def wrap(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return CardTensor.of(value)
    return type(value)(wrap(item) for item in value) if isinstance(value, (list, tuple)) else value


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    with torch.inference_mode():
        return func(*unwrap(args), **{key: unwrap(value) for key, value in kwargs.items()})


def kernel(func: Any, fault: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if fault == "hanging":
            time.sleep(600)
        if fault == "crashing":
            os.abort()
        if fault == "to_host":
            host = [x.to("cpu") if isinstance(x, CardTensor) else x for x in args]
            return func(*host, **{k: unwrap(v) for k, v in kwargs.items()}).to(NAME)
        out = CARD.submit(compute, func, args, kwargs).result()
        if fault == "wrong":
            out = out * ERROR
        if fault == "broken":
            out = out * 3 + 1
        if func._schema.name.endswith("_"):
            return args[0]
        goes_to_host = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
        return out if goes_to_host else wrap(out)

    return run


def copy_from(source: torch.Tensor, target: torch.Tensor, _non_blocking: bool = False) -> torch.Tensor:
    unwrap(target).copy_(unwrap(source))
    return target


def on_host(func: Any, *args: Any, **kwargs: Any) -> Any:
    return wrap(func(*unwrap(args), **{key: unwrap(value) for key, value in kwargs.items()}))


def set_up(plan: dict[str, list[str]]) -> None:
    backend_registration._setup_privateuseone_for_python_backend(NAME)
    torch.library.impl("aten::_copy_from", "privateuseone")(copy_from)
    basics = ("aten.empty.memory_format", "aten.empty_strided.default", "aten.as_strided.default", "aten.view.default")
    if "fallback" in plan:
        everything = torch.library.Library("_", "IMPL")
        everything.fallback(on_host, "PrivateUse1")
        KEPT.append(everything)
    faults = {name: fault for fault, names in plan.items() if fault != "operators" for name in names}
    for name in dict.fromkeys((*basics, *plan["operators"], *faults)):
        _, operator, overload = name.split(".")
        func = getattr(getattr(torch.ops.aten, operator), overload)
        torch.library.impl(func.name(), "privateuseone")(kernel(func, faults.get(name, "")))


if __name__ == "__main__":
    set_up(json.loads(os.environ["FAKE_DEVICE"]))
    sys.exit(main())
