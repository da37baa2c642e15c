"""What is on disk: safetensors headers, the index, the audit of both, and small synthetic checkpoints."""

from workbench.checkpoint.audit import audit
from workbench.checkpoint.checkpoint import Checkpoint
from workbench.checkpoint.findings import AuditReport, ContentCheck, Finding, FindingKind, Severity
from workbench.checkpoint.ghost import Ghost, write_ghost
from workbench.checkpoint.ghost_mark import GHOST_NAME, GhostMark, read_ghost_mark
from workbench.checkpoint.header import HeaderProblem, ShardHeader, TensorEntry, read_header
from workbench.checkpoint.index import INDEX_NAME, ShardIndex, find_index, read_index
from workbench.checkpoint.inspect import InspectReport, inspect_checkpoint
from workbench.checkpoint.origin import ORIGIN_NAME, Origin, read_origin
from workbench.checkpoint.synthetic import write_checkpoint
from workbench.checkpoint.synthetic_config import F0, F1, F2, K3, Sizes, k3_config, preprocessor_config
from workbench.checkpoint.unknown import UnknownReport, inspect_unknown
from workbench.checkpoint.writer import encode_array, to_bf16, write_index, write_shard

__all__ = [
    "F0",
    "F1",
    "F2",
    "GHOST_NAME",
    "INDEX_NAME",
    "K3",
    "ORIGIN_NAME",
    "AuditReport",
    "Checkpoint",
    "ContentCheck",
    "Finding",
    "FindingKind",
    "Ghost",
    "GhostMark",
    "HeaderProblem",
    "InspectReport",
    "Origin",
    "Severity",
    "ShardHeader",
    "ShardIndex",
    "Sizes",
    "TensorEntry",
    "UnknownReport",
    "audit",
    "encode_array",
    "find_index",
    "inspect_checkpoint",
    "inspect_unknown",
    "k3_config",
    "preprocessor_config",
    "read_ghost_mark",
    "read_header",
    "read_index",
    "read_origin",
    "to_bf16",
    "write_checkpoint",
    "write_ghost",
    "write_index",
    "write_shard",
]
