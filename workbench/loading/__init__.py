"""Bytes to ranks: a dry run over headers, exact reads through a bounded window, and a ledger of every row written."""

from workbench.loading.expert_source import ExpertMemory
from workbench.loading.ledger import Ledger, LedgerEntry, SourceRef
from workbench.loading.load import LoadedModel, LoadStats, load_rank, load_sharded_weights
from workbench.loading.pieces import Piece, PiecewiseLoad, PreparedLoad, load_in_pieces, prepare_load
from workbench.loading.plan import Assignment, Extent, LoadPlan, Source, plan_load
from workbench.loading.reader import ReadPolicy, ShardReader
from workbench.loading.schedule import Window, schedule
from workbench.loading.stages import STAGES, StageTimes
from workbench.loading.stream import LoadProgress
from workbench.loading.transform import Transform

__all__ = [
    "Assignment",
    "ExpertMemory",
    "Extent",
    "Ledger",
    "LedgerEntry",
    "LoadPlan",
    "LoadProgress",
    "LoadStats",
    "LoadedModel",
    "Piece",
    "PiecewiseLoad",
    "PreparedLoad",
    "ReadPolicy",
    "STAGES",
    "ShardReader",
    "Source",
    "SourceRef",
    "StageTimes",
    "Transform",
    "Window",
    "load_in_pieces",
    "load_rank",
    "load_sharded_weights",
    "plan_load",
    "prepare_load",
    "schedule",
]
