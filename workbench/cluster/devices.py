"""The devices of this machine: accelerators through torch's neutral door, and the host CPU. Importing touches nothing.

Accelerators are asked about in a child process, so that the caller (a notebook kernel, say) never initialises one.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from workbench.base import DeploymentError, Quantity, Table, host_memory, human
from workbench.cluster.probe import DEFAULT_COMMAND, run_probe

__all__ = ["FEATURE_NAMES", "Device", "Feature", "default_device", "host_device", "list_devices", "measure_features"]

# What the probe child can try (`tasks.FEATURES` holds how); here by name, so that asking needs no torch.
FEATURE_NAMES = (
    "fp32 matmul",
    "bf16 matmul",
    "fp16 matmul",
    "fp64 matmul",
    "int8 matmul",
    "fp8 e4m3 cast",
    "fp8 e5m2 cast",
    "fp8 scaled matmul",
    "grouped matmul",
    "attention (sdpa)",
    "depthwise conv",
    "nibble unpack",
    "top-k",
    "index_add",
)

LIST_SECONDS = 120.0  # the first touch of a driver can take long
FEATURE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Feature:
    """One thing a device was asked to do. `detail` carries its own words where it did not."""

    name: str
    is_supported: bool
    detail: str
    seconds: float

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "is_supported": self.is_supported,
            "detail": self.detail,
            "seconds": round(self.seconds, 6),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One device. `type` and `index` are torch's ("cpu" has no index); a quantity that is not offered is None.

    `backend` is torch's default process-group backend for the type; `cores` counts those this process may use.
    """

    type: str
    index: int | None
    name: str
    memory_total: Quantity | None
    memory_free: Quantity | None
    backend: str | None
    cores: int | None = None
    features: tuple[Feature, ...] = ()

    @property
    def torch_name(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"

    @property
    def is_accelerator(self) -> bool:
        return self.type != "cpu"

    def supports(self, feature: str) -> bool | None:
        """Whether a measured feature worked; None where it was not measured."""
        return next((x.is_supported for x in self.features if x.name == feature), None)

    def to_json(self) -> dict[str, object]:
        return {
            "type": self.type,
            "index": self.index,
            "name": self.name,
            "memory_total_bytes": None if self.memory_total is None else int(self.memory_total.value),
            "memory_free_bytes": None if self.memory_free is None else int(self.memory_free.value),
            "backend": self.backend,
            "cores": self.cores,
            "features": [feature.to_json() for feature in self.features],
        }

    def table(self) -> Table:
        rows = (
            ("device", self.torch_name),
            ("name", self.name),
            ("memory", _bytes_text(self.memory_total)),
            ("memory free", _bytes_text(self.memory_free)),
            ("cores", "–" if self.cores is None else str(self.cores)),
            ("process groups", self.backend or "–"),
            *((f.name, "works" if f.is_supported else f"no: {f.detail}") for f in self.features),
        )
        return Table(columns=("what", "found"), rows=rows)

    def render(self) -> str:
        return self.table().render()

    def _repr_html_(self) -> str:
        return self.table().to_html()


def _bytes_text(quantity: Quantity | None) -> str:
    return "not offered" if quantity is None else human(quantity.value, quantity.unit)


def list_devices(
    *, features: bool = False, time_limit_s: float = LIST_SECONDS, command: Sequence[str] = DEFAULT_COMMAND
) -> tuple[Device, ...]:
    """Accelerators of this machine, then its host CPU; with `features`, what each can do, measured by doing in a child
    process, which `command` starts.

    Raises DeploymentError where the child that asks the driver hangs or dies: a machine whose driver hangs is not a
    machine without accelerators.
    """
    (answer,) = run_probe([("accelerators", "")], time_limit_s=time_limit_s)
    if answer.error:
        raise DeploymentError(
            f"could not list accelerators: {answer.error}",
            next_step="Ask the driver alone: python -c 'import torch; print(torch.accelerator.device_count())'",
        )
    assert isinstance(answer.value, list)
    devices = (*(_accelerator(entry) for entry in answer.value), host_device())
    if not features:
        return devices
    return tuple(replace(d, features=measure_features(d.torch_name, command=command)) for d in devices)


def _accelerator(entry: dict[str, object]) -> Device:
    def memory(key: str) -> Quantity | None:
        value = entry.get(key)
        return Quantity(value, "B", "measured", "torch.accelerator") if isinstance(value, int) else None

    index, backend = entry["index"], entry.get("backend")
    assert isinstance(index, int)
    return Device(
        type=str(entry["type"]),
        index=index,
        name=str(entry["name"]),
        memory_total=memory("memory_total"),
        memory_free=memory("memory_free"),
        backend=None if backend is None else str(backend),
    )


@functools.cache
def default_device() -> str:
    """Type of this machine's accelerator ("cpu" where there is none), as torch names it; asked once per process."""
    return list_devices()[0].type


def host_device(*, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> Device:
    """The CPU host, from the kernel's own files; a container's memory limit counts where it is the smaller one."""
    memory = host_memory(proc=proc, cgroup=cgroup)
    source = "cgroup memory.max" if memory.is_container else "/proc/meminfo"
    affinity = getattr(os, "sched_getaffinity", None)
    return Device(
        type="cpu",
        index=None,
        name=_cpu_name(proc / "cpuinfo"),
        memory_total=None if memory.total is None else Quantity(memory.total, "B", "measured", source),
        memory_free=None if memory.available is None else Quantity(memory.available, "B", "measured", source),
        backend="gloo",
        cores=len(affinity(0)) if affinity else os.cpu_count(),
    )


def _cpu_name(path: Path) -> str:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def measure_features(
    device: str,
    names: tuple[str, ...] = FEATURE_NAMES,
    *,
    time_limit_s: float = FEATURE_SECONDS,
    command: Sequence[str] = DEFAULT_COMMAND,
) -> tuple[Feature, ...]:
    """What `device` (torch's name, "cpu" or "type:0") can do, each tried in a child with a time limit and checked."""
    tasks = [("feature", name) for name in names]
    return tuple(
        Feature(name=x.argument, is_supported=not x.error, detail=_first_line(x.error), seconds=x.seconds)
        for x in run_probe(tasks, device=device, time_limit_s=time_limit_s, command=command)
    )


def _first_line(text: str) -> str:
    return text.partition("\n")[0][:200]
