"""Which layout, and why: memory ledgers, times from traced operators and measured links, a search over all of it.

Nothing here needs torch until a model is looked at.
"""

from workbench.planner.calibrate import CalibratedEfficiency, CategoryFit, calibrate, calibrate_host
from workbench.planner.candidates import Candidate, Refusal, all_layouts
from workbench.planner.check import CheckLine, PlanCheck, check_deployment, check_memory, check_times, measure_other
from workbench.planner.cost import CostError, CostLine, Efficiency, StageCost, StepCost, stage_cost, step_cost
from workbench.planner.engines import ENGINES, SGLANG, VLLM, WORKBENCH, Engine
from workbench.planner.launch import LaunchCommand, LaunchPlan, launch_all, launch_sglang, launch_vllm, launch_workbench
from workbench.planner.memory import CacheNeed, MemoryLedger, MemoryLine, Reserve, stage_ledger
from workbench.planner.objective import Objective
from workbench.planner.pages import HybridPages, hybrid_pages
from workbench.planner.report import PlanReport
from workbench.planner.reported import REPORTED, Comparison, Reported, compare_reported
from workbench.planner.search import default_precision, plan
from workbench.planner.stages import cut_stages
from workbench.planner.weights import WeightTable, read_weight_table

__all__ = [
    "ENGINES",
    "REPORTED",
    "SGLANG",
    "VLLM",
    "WORKBENCH",
    "CacheNeed",
    "CalibratedEfficiency",
    "Candidate",
    "CategoryFit",
    "CheckLine",
    "Comparison",
    "CostError",
    "CostLine",
    "Efficiency",
    "Engine",
    "HybridPages",
    "LaunchCommand",
    "LaunchPlan",
    "MemoryLedger",
    "MemoryLine",
    "Objective",
    "PlanCheck",
    "PlanReport",
    "Refusal",
    "Reported",
    "Reserve",
    "StageCost",
    "StepCost",
    "WeightTable",
    "all_layouts",
    "calibrate",
    "calibrate_host",
    "check_deployment",
    "check_memory",
    "check_times",
    "compare_reported",
    "cut_stages",
    "default_precision",
    "hybrid_pages",
    "launch_all",
    "launch_sglang",
    "launch_vllm",
    "launch_workbench",
    "measure_other",
    "plan",
    "read_weight_table",
    "stage_cost",
    "stage_ledger",
    "step_cost",
]
