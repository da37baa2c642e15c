"""One look at a machine: its devices, what they can do, how fast, and with which software."""

from __future__ import annotations

import datetime
import platform
from dataclasses import dataclass, field
from pathlib import Path

from workbench.base import Cell, ConfigError, Quantity, Table, human
from workbench.cluster.devices import Device, list_devices
from workbench.cluster.host import MatmulRate, measure_disk_read, measure_matmul, measure_memory_copy
from workbench.cluster.locality import Locality, read_locality
from workbench.cluster.versions import Versions, read_versions

__all__ = ["MachineSurvey", "survey_machine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineSurvey:
    """`taken_at` is UTC, ISO 8601. Rates that were not asked for are None or empty."""

    host: str
    taken_at: str
    devices: tuple[Device, ...]
    memory_copy: Quantity | None
    disk_read: Quantity | None
    matmul: tuple[MatmulRate, ...]
    versions: Versions
    disk_direct: Quantity | None = None  # past the page cache
    locality: Locality = field(default_factory=Locality)

    def to_json(self) -> dict[str, object]:
        return {
            "host": self.host,
            "taken_at": self.taken_at,
            "devices": [device.to_json() for device in self.devices],
            "memory_copy": _quantity_json(self.memory_copy),
            "disk_read": _quantity_json(self.disk_read),
            "disk_direct": _quantity_json(self.disk_direct),
            "matmul": [rate.to_json() for rate in self.matmul],
            "locality": self.locality.to_json(),
            "versions": self.versions.to_json(),
        }

    def tables(self) -> tuple[Table, ...]:
        """Devices, features by device, rates, software."""
        devices = Table(
            title=f"Devices of {self.host}, {self.taken_at}",
            columns=("device", "name", "memory", "free", "cores", "process groups"),
            rows=tuple(
                (d.torch_name, d.name, _bytes(d.memory_total), _bytes(d.memory_free), d.cores, d.backend)
                for d in self.devices
            ),
        )
        known = (*self._feature_tables(), *self._rate_tables(), *self.locality.tables())
        return (devices, *known, self.versions.table())

    def _feature_tables(self) -> tuple[Table, ...]:
        measured = [d for d in self.devices if d.features]
        if not measured:
            return ()
        names = [feature.name for feature in measured[0].features]
        rows: list[tuple[Cell, ...]] = [(name, *(d.supports(name) for d in measured)) for name in names]
        refusals = [f"{d.torch_name}, {f.name}: {f.detail}" for d in measured for f in d.features if not f.is_supported]
        columns = ("can do (tried, numbers checked)", *(d.torch_name for d in measured))
        return (Table(columns=columns, rows=tuple(rows), note="\n".join(refusals)),)

    def _rate_tables(self) -> tuple[Table, ...]:
        rows: list[tuple[Cell, ...]] = []
        for name, rate in (
            ("memory copy", self.memory_copy),
            ("disk read", self.disk_read),
            ("disk read, direct", self.disk_direct),
        ):
            if rate is not None:
                rows.append((name, human(rate.value, rate.unit), rate.source))
        for x in self.matmul:
            value = "not measured" if x.rate is None else human(x.rate.value, x.rate.unit)
            rows.append((f"matmul {x.dtype}", value, x.reason if x.rate is None else x.rate.source))
        return (Table(columns=("rate", "measured", "conditions"), rows=tuple(rows)),) if rows else ()

    def render(self) -> str:
        return "\n\n".join(table.render() for table in self.tables())

    def _repr_html_(self) -> str:
        return "".join(table.to_html() for table in self.tables())


def survey_machine(*, folder: Path | str | None = None, features: bool = True, rates: bool = True) -> MachineSurvey:
    """Devices, what the system tells of their places, and software of this machine; with `features`, what each device
    type can do; with `rates`, how fast the host copies memory and one device of each type multiplies; with `folder`,
    how fast that folder is read, through the page cache and past it.

    Takes about half a minute on a small machine. Raises DeploymentError where the driver does not answer, ConfigError
    where `folder` holds nothing to read.
    """
    disk_read = None if folder is None else measure_disk_read(folder)  # refuses at once, not after the rest
    devices = list_devices(features=features)
    kinds = {device.type: device.torch_name for device in reversed(devices)}  # the first of each type speaks for it
    return MachineSurvey(
        host=platform.node(),
        taken_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        devices=devices,
        memory_copy=measure_memory_copy() if rates else None,
        disk_read=disk_read,
        matmul=tuple(rate for name in kinds.values() for rate in measure_matmul(name)) if rates else (),
        versions=read_versions(),
        disk_direct=None if folder is None else _direct(folder),
        locality=read_locality(),
    )


def _direct(folder: Path | str) -> Quantity | None:
    """The rate past the page cache; None where the file system does not offer that."""
    try:
        return measure_disk_read(folder, is_direct=True)
    except ConfigError:
        return None


def _bytes(quantity: Quantity | None) -> str | None:
    return None if quantity is None else human(quantity.value, quantity.unit)


def _quantity_json(quantity: Quantity | None) -> dict[str, object] | None:
    if quantity is None:
        return None
    return {"value": quantity.value, "unit": quantity.unit, "basis": quantity.basis, "conditions": quantity.source}
