"""What it runs on: devices, what they can do, measured rates, versions. Importing this touches no device."""

from workbench.cluster.devices import (
    FEATURE_NAMES,
    Device,
    Feature,
    default_device,
    host_device,
    list_devices,
    measure_features,
)
from workbench.cluster.host import MatmulRate, measure_disk_read, measure_matmul, measure_memory_copy
from workbench.cluster.survey import MachineSurvey, survey_machine
from workbench.cluster.versions import Versions, read_versions

__all__ = [
    "FEATURE_NAMES",
    "Device",
    "Feature",
    "MachineSurvey",
    "MatmulRate",
    "Versions",
    "default_device",
    "host_device",
    "list_devices",
    "measure_disk_read",
    "measure_features",
    "measure_matmul",
    "measure_memory_copy",
    "read_versions",
    "survey_machine",
]
