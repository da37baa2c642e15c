"""Kimi-K2, K2.5, K2.6 and K2.7: text only, or wrapped with a vision tower.

What is new against DeepSeek-V3:
  [K2-1] 384 experts in one group, 64 heads, one dense layer, no multi-token-prediction layers.
  [K2-2] K2.5 wraps the text as `language_model.` beside a tower of layer norms and biases (MoonViT) and a projector
         that normalises before it merges 2 x 2 neighbours.
  [K2-3] K2.5 stores routed experts in INT4, groups of 32 columns (compressed-tensors); the NVFP4 edition of the same
         model puts its block outside `text_config` and speaks in globs. A block inside speaks of the text's own
         names: "lm_head" is `language_model.lm_head`, which is plain in the files.
  [K2-4] K2.5 cuts pictures as K3 does, with the budget of its preprocessor file and without a chessboard.
Source: configs and modelling files of moonshotai/Kimi-K2-Instruct and Kimi-K2.5, nvidia/Kimi-K2.5-NVFP4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from workbench.spec import naming
from workbench.spec.config import ConfigReader
from workbench.spec.dialect import decoder, is_named, num_layers, open_config
from workbench.spec.families.deepseek_v3 import NAMES, read_layers, read_mla
from workbench.spec.model import ImageSpec, ModelSpec, VisionSpec
from workbench.spec.quant_config import read_quant
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
    quant = read_quant(top, text)
    if quant is not None and text is not top and not top.has("quantization_config"):
        quant = dataclasses.replace(quant, prefix="language_model.")  # [K2-3]
    return decoder(
        top,
        text,
        quant=quant,
        family=FAMILY,
        architecture=ARCHITECTURES[1 if text is top else 0],
        layers=layers,
        norm_eps=text.number("rms_norm_eps"),
        draft=draft,
        media_key="media_placeholder_token_id",
        vision=vision,
        projector=projector,
        image=None if vision is None or image_config is None else _read_image(image_config, vision),  # [K2-4]
    )


def _read_image(image_config: Mapping[str, object], vision: VisionSpec) -> ImageSpec:
    media = ConfigReader(image_config, where="preprocessor_config.json").child("media_proc_cfg")
    media.require("fixed_output_tokens", None, default=None)
    media.require("transparent_bg_config", None, default=None)
    media.require("patch_size", vision.patch_size)
    media.require("merge_kernel_size", vision.merge_size)
    return ImageSpec(
        patch_size=vision.patch_size,
        merge_size=vision.merge_size,
        patch_limit=media.integer("in_patch_limit"),
        patch_limit_per_side=media.integer("patch_limit_on_one_side"),
        mean=media.float_triple("image_mean"),
        std=media.float_triple("image_std"),
        has_chessboard=False,
    )


def tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    yield from naming.standard_tensors(spec, NAMES if spec.vision is None else WRAPPED_NAMES)
    yield from moonvit_tensors(spec)
