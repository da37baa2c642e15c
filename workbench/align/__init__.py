"""Is it right: an independent reference, capture of the fast model, and their comparison."""

from workbench.align.align_report import AlignReport, Blame, OperatorError
from workbench.align.alignment import ForeignTrace, Served, align_model
from workbench.align.capture import Capture
from workbench.align.compare import Comparison, TensorDiff, compare_traces
from workbench.align.counter_report import CounterTests, SuspectResult
from workbench.align.countertests import counter_test
from workbench.align.deployed import TraceSource, deployment_forward, deployment_replay, served_by
from workbench.align.held import held_weights, schemes_of
from workbench.align.merge import merge_ranks, undo_split
from workbench.align.metrics import Distance, LogitAgreement, RouterAgreement
from workbench.align.parity import (
    ParityPrompt,
    TraceForward,
    TraceReplay,
    check_parity,
    model_forward,
    model_replay,
    require_reference,
)
from workbench.align.parity_report import GreedyCheck, ParityReport
from workbench.align.reference import ReferencePrompt, Trace, choices_of, reference_traces
from workbench.align.reference_vision import ReferenceImage, reference_patches, reference_vision
from workbench.align.reference_weights import PublishedWeights
from workbench.align.rounding import BF16_GRIDS
from workbench.align.sweep import Budget, sweep_checkpoint, sweep_precisions
from workbench.align.sweep_report import Mix, Sensitivity, SweepReport
from workbench.align.tolerance import (
    BF16_TOLERANCE,
    FP32_TOLERANCE,
    MeasuredTolerance,
    Noise,
    RoundingTolerance,
    Tolerance,
    tolerance_for,
)
from workbench.align.trace import forward_order
from workbench.align.trace_folder import TraceFolder, read_trace_folder, write_trace_folder
from workbench.align.yardstick import ExactAndNoise, noisy_references

__all__ = [
    "AlignReport",
    "BF16_GRIDS",
    "BF16_TOLERANCE",
    "Blame",
    "Budget",
    "Capture",
    "Comparison",
    "CounterTests",
    "Distance",
    "ExactAndNoise",
    "FP32_TOLERANCE",
    "ForeignTrace",
    "GreedyCheck",
    "LogitAgreement",
    "MeasuredTolerance",
    "Mix",
    "Noise",
    "OperatorError",
    "ParityPrompt",
    "ParityReport",
    "PublishedWeights",
    "ReferenceImage",
    "ReferencePrompt",
    "RoundingTolerance",
    "RouterAgreement",
    "Sensitivity",
    "Served",
    "SuspectResult",
    "SweepReport",
    "TensorDiff",
    "Tolerance",
    "Trace",
    "TraceFolder",
    "TraceForward",
    "TraceReplay",
    "TraceSource",
    "align_model",
    "check_parity",
    "require_reference",
    "choices_of",
    "compare_traces",
    "counter_test",
    "deployment_forward",
    "deployment_replay",
    "forward_order",
    "held_weights",
    "merge_ranks",
    "model_forward",
    "model_replay",
    "noisy_references",
    "read_trace_folder",
    "reference_patches",
    "reference_traces",
    "reference_vision",
    "schemes_of",
    "served_by",
    "sweep_checkpoint",
    "sweep_precisions",
    "tolerance_for",
    "undo_split",
    "write_trace_folder",
]
