"""Qwen3-VL-MoE (30B-A3B, 235B-A22B).

What is new against Qwen3-MoE:
  [QVL-1] positions of three axes (M-RoPE) whose frequencies take turns; sections (24, 20, 20) unless given.
  [QVL-2] a vision tower of patches two frames deep; its states after some layers are merged on their own and added
          to the first decoder layers at the image's places (DeepStack).
  [QVL-3] the experts of a layer lie in two tensors, stored (experts, inputs, outputs), gate before up.
Source: config of Qwen/Qwen3-VL-30B-A3B-Instruct, transformers' qwen3_vl_moe and its weight conversion.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from workbench.spec import naming
from workbench.spec.dialect import decoder, is_named, open_config
from workbench.spec.families.qwen3_moe import read_layers
from workbench.spec.mixers import GQASpec
from workbench.spec.model import LayerSpec, ModelSpec
from workbench.spec.tensors import TensorSpec
from workbench.spec.towers import qwen_tower_tensors, read_qwen_tower

__all__ = ["ARCHITECTURES", "FAMILY", "matches", "parse", "tensors"]

FAMILY = "qwen3_vl_moe"
ARCHITECTURES = ("Qwen3VLMoeForConditionalGeneration",)
NAMES = naming.Names(root="model.language_model.", is_fused=True, is_transposed=True)  # [QVL-3]
SECTIONS = (24, 20, 20)


def matches(config: Mapping[str, object]) -> bool:
    return is_named(config, (FAMILY,), ARCHITECTURES)


def parse(config: Mapping[str, object], image_config: Mapping[str, object] | None = None) -> ModelSpec:
    """ModelSpec from a Qwen3-VL-MoE config. Raises ConfigError, or UnsupportedModelError for a switch not known."""
    top, text = open_config(config)
    vision, projector = read_qwen_tower(top.child("vision_config"))  # [QVL-2]
    top.skip("video_token_id", "vision_start_token_id", "vision_end_token_id")
    return decoder(
        top,
        text,
        family=FAMILY,
        architecture=ARCHITECTURES[0],
        layers=[_with_sections(layer) for layer in read_layers(text)],
        norm_eps=text.number("rms_norm_eps"),
        media_key="image_token_id",
        vision=vision,
        projector=projector,
    )


def _with_sections(layer: LayerSpec) -> LayerSpec:  # [QVL-1]
    mixer = layer.mixer
    assert isinstance(mixer, GQASpec)
    assert mixer.rope is not None
    sections = mixer.rope.sections or SECTIONS
    rope = dataclasses.replace(mixer.rope, sections=sections, has_interleaved_sections=True)
    return dataclasses.replace(layer, mixer=dataclasses.replace(mixer, rope=rope))


def tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    yield from naming.standard_tensors(spec, NAMES)
    yield from qwen_tower_tensors(spec)
