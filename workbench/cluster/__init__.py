"""What it runs on: devices, what they can do, measured rates, versions. Importing this touches no device."""

from workbench.cluster.catalogue import Hardware, NodeLink, hardware_names, hardware_table, read_hardware
from workbench.cluster.cost import OPERATIONS, CollectiveFit, LinkCost, Operation, fit_cost
from workbench.cluster.devices import (
    FEATURE_NAMES,
    Device,
    Feature,
    default_device,
    host_device,
    list_devices,
    measure_features,
)
from workbench.cluster.host import MatmulRate, measure_copy, measure_disk_read, measure_matmul, measure_memory_copy
from workbench.cluster.links import measure_topology
from workbench.cluster.locality import Locality, read_locality
from workbench.cluster.survey import MachineSurvey, survey_machine
from workbench.cluster.topology import (
    AlgorithmChoice,
    CollectiveSupport,
    Fabric,
    PairLink,
    Topology,
    TopologyDevice,
    read_topology,
)
from workbench.cluster.versions import Versions, read_versions

__all__ = [
    "FEATURE_NAMES",
    "OPERATIONS",
    "AlgorithmChoice",
    "CollectiveFit",
    "CollectiveSupport",
    "Device",
    "Fabric",
    "Feature",
    "Hardware",
    "LinkCost",
    "Locality",
    "MachineSurvey",
    "MatmulRate",
    "NodeLink",
    "Operation",
    "PairLink",
    "Topology",
    "TopologyDevice",
    "Versions",
    "default_device",
    "fit_cost",
    "hardware_names",
    "hardware_table",
    "host_device",
    "list_devices",
    "measure_copy",
    "measure_disk_read",
    "measure_features",
    "measure_matmul",
    "measure_memory_copy",
    "measure_topology",
    "read_hardware",
    "read_locality",
    "read_topology",
    "read_versions",
    "survey_machine",
]
