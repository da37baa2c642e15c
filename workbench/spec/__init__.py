"""What a model is: `ModelSpec`, the tensors it must be published with, and counts over both."""

from workbench.spec.config import read_json
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
from workbench.spec.tensors import Part, Role, TensorSpec

__all__ = [
    "Activation",
    "AttentionResidualSpec",
    "DenseFFNSpec",
    "FFNSpec",
    "ImageSpec",
    "KDASpec",
    "LayerSpec",
    "MLASpec",
    "MixerSpec",
    "MoESpec",
    "ModelSpec",
    "Part",
    "ProjectorSpec",
    "QuantSpec",
    "Role",
    "SpecialTokens",
    "TensorSpec",
    "VisionSpec",
    "parse_config",
    "published_tensors",
    "read_json",
    "read_spec",
]
