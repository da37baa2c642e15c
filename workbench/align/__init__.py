"""Is it right: an independent reference, capture of the fast model, and their comparison."""

from workbench.align.capture import Capture
from workbench.align.compare import FP32_TOLERANCE, Comparison, TensorDiff, Tolerance, compare_traces, tolerance_for
from workbench.align.deployed import TraceSource, deployment_forward
from workbench.align.merge import merge_ranks, undo_split
from workbench.align.parity import GreedyCheck, ParityPrompt, ParityReport, TraceForward, check_parity, model_forward
from workbench.align.reference import ReferencePrompt, Trace, reference_traces
from workbench.align.reference_vision import ReferenceImage, reference_patches, reference_vision
from workbench.align.reference_weights import PublishedWeights
from workbench.align.trace import forward_order

__all__ = [
    "FP32_TOLERANCE",
    "Capture",
    "Comparison",
    "GreedyCheck",
    "ParityPrompt",
    "ParityReport",
    "PublishedWeights",
    "ReferenceImage",
    "ReferencePrompt",
    "TensorDiff",
    "Tolerance",
    "Trace",
    "TraceForward",
    "TraceSource",
    "check_parity",
    "compare_traces",
    "deployment_forward",
    "forward_order",
    "merge_ranks",
    "model_forward",
    "reference_patches",
    "reference_traces",
    "reference_vision",
    "tolerance_for",
    "undo_split",
]
