"""Can the devices do what every model needs? What a survey found, as a gate."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.cluster import Device
from workbench.day0.gates import GateBook

__all__ = ["NEEDED_FEATURES", "measure_features"]

NEEDED_FEATURES = ("fp32 matmul", "bf16 matmul", "attention (sdpa)", "depthwise conv", "nibble unpack")


def measure_features(gates: GateBook, devices: Sequence[Device]) -> None:
    """Count needed features that a device refused or answered with wrong numbers, over all devices that were tried."""
    measured = [device for device in devices if device.features]
    if not measured:
        gates.unmeasured("device.features", "no device was tried")
        return
    missing = [f"{d.torch_name}: {name}" for d in measured for name in NEEDED_FEATURES if not d.supports(name)]
    evidence = "; ".join(missing) or f"{', '.join(NEEDED_FEATURES)}, each run and its numbers checked"
    gates.measured("device.features", len(missing), evidence=evidence)
