"""How ranks talk: process groups of a layout, counted and differentiable collectives, and their use by the model."""

from workbench.parallel.apply import allocate, attach, build_stage, narrow
from workbench.parallel.collectives import CollectiveLog, CollectiveRecord, CollectiveTotal, Group
from workbench.parallel.experts import AllToAllDispatch, ReplicatedDispatch, share_sizes
from workbench.parallel.flight import FlightEntry, FlightFinding, FlightRecorder, compare_flights, read_flights
from workbench.parallel.mesh import (
    RankContext,
    group_members,
    join_processes,
    layout_of,
    make_context,
    make_mesh,
    single_context,
)
from workbench.parallel.pipeline import Pipeline, payload_vectors
from workbench.parallel.tensor_parallel import GroupTensorParallel
from workbench.parallel.vision import advance_image, begin_image, encode_images, share_images, sum_vision_gradients

__all__ = [
    "AllToAllDispatch",
    "CollectiveLog",
    "CollectiveRecord",
    "CollectiveTotal",
    "FlightEntry",
    "FlightFinding",
    "FlightRecorder",
    "Group",
    "GroupTensorParallel",
    "Pipeline",
    "RankContext",
    "ReplicatedDispatch",
    "advance_image",
    "allocate",
    "attach",
    "begin_image",
    "build_stage",
    "encode_images",
    "group_members",
    "compare_flights",
    "join_processes",
    "layout_of",
    "make_context",
    "make_mesh",
    "narrow",
    "payload_vectors",
    "share_images",
    "share_sizes",
    "read_flights",
    "single_context",
    "sum_vision_gradients",
]
