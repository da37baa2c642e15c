"""Kimi-K2, K2.5, K2.6 and K2.7: text only, or wrapped with a vision tower.

What is new against DeepSeek-V3:
  [K2-1] 384 experts in one group, 64 heads, one dense layer, no multi-token-prediction layers.
  [K2-2] K2.5 wraps the text as `language_model.` beside a tower of layer norms and biases (MoonViT) and a projector
         that normalises before it merges 2 x 2 neighbours.
  [K2-3] K2.5 stores routed experts in INT4, groups of 32 columns (compressed-tensors); the NVFP4 edition of the same
         model puts its block outside `text_config` and speaks in globs.
Source: configs and modelling files of moonshotai/Kimi-K2-Instruct and Kimi-K2.5, nvidia/Kimi-K2.5-NVFP4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from workbench.spec import naming
from workbench.spec.dialect import decoder, is_named, num_layers, open_config
from workbench.spec.families.deepseek_v3 import NAMES, read_layers, read_mla
from workbench.spec.model import ModelSpec
from workbench.spec.tensors import TensorSpec
from workbench.spec.towers import moonvit_tensors, read_moonvit

__all__ = ["ARCHITECTURES", "FAMILY", "matches", "parse", "tensors"]

FAMILY = "kimi_k2"
ARCHITECTURES = ("KimiK25ForConditionalGeneration", "DeepseekV3ForCausalLM")
WRAPPED_NAMES = dataclasses.replace(NAMES, root="language_model.model.", head="language_model.lm_head")  # [K2-2]


def matches(config: Mapping[str, object]) -> bool:
    if "text_config" in config:
        return is_named(config, ("kimi_k25",), ARCHITECTURES[:1])
    return is_named(config, (FAMILY,), ARCHITECTURES[1:]) and config.get("model_type") == FAMILY


def parse(config: Mapping[str, object], image_config: Mapping[str, object] | None = None) -> ModelSpec:
    """ModelSpec from a Kimi-K2 or K2.5 config. Raises ConfigError, or UnsupportedModelError for a switch not known."""
    top, text = open_config(config)
    mixer = read_mla(text)
    layers, draft = read_layers(text, [mixer] * num_layers(text), mixer)
    vision, projector = (None, None) if text is top else read_moonvit(top.child("vision_config"))
    top.skip("use_unified_vision_chunk", "video_placeholder")
    return decoder(
        top,
        text,
        family=FAMILY,
        architecture=ARCHITECTURES[1 if text is top else 0],
        layers=layers,
        norm_eps=text.number("rms_norm_eps"),
        draft=draft,
        media_key="media_placeholder_token_id",
        vision=vision,
        projector=projector,
    )


def tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    yield from naming.standard_tensors(spec, NAMES if spec.vision is None else WRAPPED_NAMES)
    yield from moonvit_tensors(spec)
