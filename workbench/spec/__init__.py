"""What a model is: `ModelSpec`, the tensors it must be published with, and counts over both."""

from workbench.spec.blocks import BLOCKS, missing_blocks, needed_blocks, require_runnable
from workbench.spec.cached_rows import KV_DTYPES, KV_SCALE_BYTES, check_kv_dtype
from workbench.spec.config import read_json
from workbench.spec.counts import (
    LayerCounts,
    ModelCounts,
    count_draft,
    count_model,
    index_bytes_per_token,
    kv_bytes,
    kv_bytes_per_token,
    state_bytes_per_sequence,
)
from workbench.spec.mixers import (
    BlockSparseSpec,
    CompressedSpec,
    GatedDeltaSpec,
    GQASpec,
    IndexerSpec,
    KDASpec,
    MixerSpec,
    MLASpec,
)
from workbench.spec.model import (
    Activation,
    AttentionResidualSpec,
    DenseFFNSpec,
    DraftSpec,
    FFNSpec,
    HyperConnectionSpec,
    ImageSpec,
    LayerSpec,
    ModelSpec,
    MoESpec,
    ProjectorSpec,
    SpecialTokens,
    VisionSpec,
)
from workbench.spec.parse import draft_tensors, parse_config, published_tensors, read_spec
from workbench.spec.quant import QuantGroup, QuantSpec, RuleBook
from workbench.spec.quant_rules import QuantRow, QuantTable, module_kind, resolve_quant_rules
from workbench.spec.reading import ReadingCost, reading_cost
from workbench.spec.rope import LlamaScaling, RopeSpec, YarnSpec
from workbench.spec.routing import choose_experts
from workbench.spec.storage import SCHEMES, UNREAD_PARTS, Scheme, pieces_of, scheme_table
from workbench.spec.tensors import Part, Role, TensorSpec

__all__ = [
    "Activation",
    "AttentionResidualSpec",
    "BLOCKS",
    "BlockSparseSpec",
    "CompressedSpec",
    "DenseFFNSpec",
    "DraftSpec",
    "FFNSpec",
    "GQASpec",
    "GatedDeltaSpec",
    "HyperConnectionSpec",
    "ImageSpec",
    "IndexerSpec",
    "KDASpec",
    "KV_DTYPES",
    "KV_SCALE_BYTES",
    "LayerCounts",
    "LayerSpec",
    "LlamaScaling",
    "MLASpec",
    "MixerSpec",
    "MoESpec",
    "ModelCounts",
    "ModelSpec",
    "Part",
    "ProjectorSpec",
    "QuantGroup",
    "QuantRow",
    "QuantSpec",
    "QuantTable",
    "ReadingCost",
    "Role",
    "RopeSpec",
    "RuleBook",
    "SCHEMES",
    "UNREAD_PARTS",
    "Scheme",
    "SpecialTokens",
    "TensorSpec",
    "VisionSpec",
    "YarnSpec",
    "check_kv_dtype",
    "choose_experts",
    "count_draft",
    "count_model",
    "draft_tensors",
    "index_bytes_per_token",
    "kv_bytes",
    "kv_bytes_per_token",
    "missing_blocks",
    "module_kind",
    "needed_blocks",
    "parse_config",
    "pieces_of",
    "published_tensors",
    "read_json",
    "read_spec",
    "reading_cost",
    "require_runnable",
    "resolve_quant_rules",
    "scheme_table",
    "state_bytes_per_sequence",
]
