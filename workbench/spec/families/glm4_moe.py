"""GLM-4.5 and 4.6.

What is new about this family:
  [G4-1] grouped-query attention with biases on q, k and v, head-wise q and k norms (large model), half rotated.
  [G4-2] routing, dense prefix, shared expert and multi-token-prediction layers as DeepSeek-V3, in one group.
Source: config of zai-org/GLM-4.5, transformers' glm4_moe.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from workbench.spec import naming
from workbench.spec.dialect import decoder, is_named, num_layers, open_config, read_rope
from workbench.spec.families.deepseek_v3 import read_layers
from workbench.spec.mixers import GQASpec
from workbench.spec.model import ModelSpec
from workbench.spec.tensors import TensorSpec

__all__ = ["ARCHITECTURES", "FAMILY", "draft_tensors", "matches", "parse", "tensors"]

FAMILY = "glm4_moe"
ARCHITECTURES = ("Glm4MoeForCausalLM",)
NAMES = naming.Names()


def matches(config: Mapping[str, object]) -> bool:
    return is_named(config, (FAMILY,), ARCHITECTURES)


def parse(config: Mapping[str, object], image_config: Mapping[str, object] | None = None) -> ModelSpec:
    """ModelSpec from a GLM-4.5 config. Raises ConfigError, or UnsupportedModelError for a switch not known."""
    top, text = open_config(config)
    eps, head_dim = text.number("rms_norm_eps"), text.integer("head_dim")
    mixer = GQASpec(  # [G4-1]
        num_heads=text.integer("num_attention_heads"),
        num_kv_heads=text.integer("num_key_value_heads"),
        head_dim=head_dim,
        v_dim=head_dim,
        rope=read_rope(text, head_dim),
        has_bias=text.boolean("attention_bias"),
        qk_norm="head" if text.boolean("use_qk_norm", default=False) else "none",
        qk_norm_eps=eps,
    )
    layers, draft = read_layers(text, [mixer] * num_layers(text), mixer)  # [G4-2]
    return decoder(top, text, family=FAMILY, architecture=ARCHITECTURES[0], layers=layers, norm_eps=eps, draft=draft)


def tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    return naming.standard_tensors(spec, NAMES)


def draft_tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    return naming.draft_tensors(spec, NAMES)
