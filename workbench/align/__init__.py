"""Is it right: an independent reference, capture of the fast model, and their comparison."""

from workbench.align.capture import Capture
from workbench.align.compare import Comparison, TensorDiff, compare_traces
from workbench.align.deployed import TraceSource, deployment_forward
from workbench.align.merge import merge_ranks, undo_split
from workbench.align.parity import ParityPrompt, TraceForward, check_parity, model_forward
from workbench.align.parity_report import GreedyCheck, ParityReport
from workbench.align.reference import ReferencePrompt, Trace, choices_of, reference_traces
from workbench.align.reference_vision import ReferenceImage, reference_patches, reference_vision
from workbench.align.reference_weights import PublishedWeights
from workbench.align.rounding import BF16_GRIDS
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
from workbench.align.yardstick import ExactAndNoise, noisy_references

__all__ = [
    "BF16_GRIDS",
    "BF16_TOLERANCE",
    "FP32_TOLERANCE",
    "Capture",
    "Comparison",
    "ExactAndNoise",
    "GreedyCheck",
    "MeasuredTolerance",
    "Noise",
    "ParityPrompt",
    "ParityReport",
    "PublishedWeights",
    "ReferenceImage",
    "ReferencePrompt",
    "RoundingTolerance",
    "TensorDiff",
    "Tolerance",
    "Trace",
    "TraceForward",
    "TraceSource",
    "check_parity",
    "choices_of",
    "compare_traces",
    "deployment_forward",
    "forward_order",
    "merge_ranks",
    "model_forward",
    "noisy_references",
    "reference_patches",
    "reference_traces",
    "reference_vision",
    "tolerance_for",
    "undo_split",
]
