"""What a model is: `ModelSpec`, the tensors it must be published with, and counts over both."""

from workbench.spec.config import read_json
from workbench.spec.counts import LayerCounts, ModelCounts, count_model, kv_bytes_per_token, state_bytes_per_sequence
from workbench.spec.model import (
    Activation,
    AttentionResidualSpec,
    DenseFFNSpec,
    FFNSpec,
    ImageSpec,
    KDASpec,
    LayerSpec,
    MixerSpec,
    MLASpec,
    ModelSpec,
    MoESpec,
    ProjectorSpec,
    QuantSpec,
    SpecialTokens,
    VisionSpec,
)
from workbench.spec.parse import parse_config, published_tensors, read_spec
from workbench.spec.quant_rules import QuantRow, QuantTable, module_kind, resolve_quant_rules
from workbench.spec.tensors import Part, Role, TensorSpec

__all__ = [
    "Activation",
    "AttentionResidualSpec",
    "DenseFFNSpec",
    "FFNSpec",
    "ImageSpec",
    "KDASpec",
    "LayerCounts",
    "LayerSpec",
    "MLASpec",
    "MixerSpec",
    "MoESpec",
    "ModelCounts",
    "ModelSpec",
    "Part",
    "ProjectorSpec",
    "QuantRow",
    "QuantSpec",
    "QuantTable",
    "Role",
    "SpecialTokens",
    "TensorSpec",
    "VisionSpec",
    "count_model",
    "kv_bytes_per_token",
    "module_kind",
    "parse_config",
    "published_tensors",
    "read_json",
    "read_spec",
    "resolve_quant_rules",
    "state_bytes_per_sequence",
]
