"""A deployment rehearsed before the weights arrive: ghost, audit, read plan, and one rank's share really loaded."""

from workbench.rehearsal.read_plan import FileReads, ReadPlan, all_ranks_bytes, read_plan
from workbench.rehearsal.report import LoadFigures, RehearsalReport
from workbench.rehearsal.run import rehearse
from workbench.rehearsal.shares import StageShare, check_ledger, stage_shares

__all__ = [
    "FileReads",
    "LoadFigures",
    "ReadPlan",
    "RehearsalReport",
    "StageShare",
    "all_ranks_bytes",
    "check_ledger",
    "read_plan",
    "rehearse",
    "stage_shares",
]
