"""Bytes to ranks: a dry run over headers, exact reads through a bounded window, and a ledger of every row written."""

from workbench.loading.ledger import Ledger, LedgerEntry, SourceRef
from workbench.loading.load import LoadedModel, LoadProgress, LoadStats, load_rank, load_sharded_weights
from workbench.loading.plan import Assignment, Extent, LoadPlan, Source, plan_load
from workbench.loading.reader import ReadPolicy, ShardReader
from workbench.loading.schedule import Window, schedule
from workbench.loading.transform import Transform

__all__ = [
    "Assignment",
    "Extent",
    "Ledger",
    "LedgerEntry",
    "LoadPlan",
    "LoadProgress",
    "LoadStats",
    "LoadedModel",
    "ReadPolicy",
    "ShardReader",
    "Source",
    "SourceRef",
    "Transform",
    "Window",
    "load_rank",
    "load_sharded_weights",
    "plan_load",
    "schedule",
]
